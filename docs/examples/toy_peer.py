"""The adapter of a bridge, `toy-bridge`, that builds, loads and exports by four calls, as most bridges do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, World
from moeref_conformance.targets.peers import common


class ToyBridge:
    """The README's calls: `config_of`, `build`, `load_weights`, `export_weights`."""

    info = common.info("toy-bridge", "https://example.org/toy-bridge/issues")
    claims = Claims(
        facets=frozenset({"export", "forward"}),
        families=frozenset({"qwen3_moe"}),
        backends=frozenset({"gloo"}),
        norms=frozenset({"fused"}),
        experts=frozenset({"grouped"}),
        has_plan=False,
        receivers="all",
    )

    def preload(self) -> None:
        """Import the bridge and its models."""
        importlib.import_module("toy_bridge")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        bridge: Any = importlib.import_module("toy_bridge")
        hf_config = common.hf_config(world)
        with common.groups(cell):
            settings = {**common.ON_CPU, **common.parallel_settings(cell)}
            models = bridge.build(bridge.config_of(hf_config), params_dtype=common.torch_dtype(cell), **settings)
            yield common.BridgeSession(
                export=common.BridgeExport(
                    models,
                    read=lambda folder: bridge.load_weights(models, folder),
                    write=lambda: bridge.export_weights(models),
                ),
                forward=common.BridgeForward(models, cell, hf_config.vocab_size),
            )


#: What `--target toy-bridge` names.
target = ToyBridge
