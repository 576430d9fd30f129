"""mcore-bridge (ModelScope) as a target. It maps names while tensors move, so it has neither a table nor a plan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common


class McoreBridge:
    """The README's calls: `hf_to_mcore_config`, `get_mcore_model`, `load_weights`, `export_weights`."""

    info = common.info("mcore-bridge", "https://github.com/modelscope/mcore-bridge/issues")
    claims = replace(
        common.CLAIMS,
        facets=frozenset({"export", "forward"}),
        # Its Qwen3-Next takes a third layer for a delta net where full_attention_interval is 3, and exports by a GPU.
        families=frozenset({"qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss"}),
        mtp=2,
        dispatchers=frozenset({"alltoall", "allgather"}),
    )

    def preload(self) -> None:
        """Import the bridge and its models."""
        for module in ("mcore_bridge", "mcore_bridge.model", "mcore_bridge.bridge"):
            importlib.import_module(module)

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        bridge: Any = importlib.import_module("mcore_bridge")
        hf_config = common.hf_config(world)
        with common.groups(cell):
            config = bridge.ModelConfig(
                **{
                    **bridge.hf_to_mcore_config(hf_config),
                    **common.ON_CPU,
                    **common.parallel_settings(cell),
                    "params_dtype": common.torch_dtype(cell),
                    "mtp_num_layers": cell.mtp or None,
                }
            )
            models = bridge.get_mcore_model(config)
            yield common.BridgeSession(
                export=common.BridgeExport(
                    models,
                    read=lambda folder: config.bridge.load_weights(models, folder),
                    write=lambda: config.bridge.export_weights(models),
                ),
                forward=common.BridgeForward(models, cell, hf_config.get_text_config().vocab_size),
            )


#: What `--target mcore-bridge` names.
target = McoreBridge
