"""How mbridge (ISEEKYAN) is called, for its release and its main. It has neither a table of names nor a plan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common

#: Where both are told of failures.
ISSUES = "https://github.com/ISEEKYAN/mbridge/issues"


class MbridgeCalls:
    """The README's calls: `AutoBridge`, `get_model`, `load_weights`, `export_weights`."""

    claims = replace(
        common.CLAIMS,
        facets=frozenset({"export", "forward"}),
        families=frozenset({"qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3"}),
        mtp=1,
        dispatchers=frozenset({"alltoall", "allgather"}),
    )

    def preload(self) -> None:
        """Import the bridge and its models."""
        importlib.import_module("mbridge")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        with built(cell, world) as (bridge, models, chunks):
            yield common.BridgeSession(
                export=common.BridgeExport(
                    chunks,
                    read=lambda folder: bridge.load_weights(models, folder),
                    write=lambda: bridge.export_weights(models),
                ),
                forward=common.BridgeForward(chunks, cell, bridge.hf_config.vocab_size),
            )


@contextmanager
def built(cell: Cell, world: World) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """mbridge's bridge of the cell's checkpoint, the models that it builds on one rank, and the chunks in them."""
    with common.groups(cell):
        bridge = bridge_of(cell, world)
        models = bridge.get_model(bf16=cell.dtype == "bfloat16", use_cpu_initialization=True)
        yield bridge, models, [getattr(model, "module", model) for model in models]


def bridge_of(cell: Cell, world: World, pads: bool = True) -> Any:
    """mbridge's bridge of the cell's checkpoint, which asks for megatron-core's groups. `pads`: vocabularies too."""
    package: Any = importlib.import_module("mbridge")
    hf_config = common.hf_config(world)
    for name, value in (hf_config.rope_parameters or {}).items():
        # mbridge reads these where transformers 4 had them: in the config itself.
        if name in ("rope_theta", "partial_rotary_factor") and not hasattr(hf_config, name):
            setattr(hf_config, name, value)
    # mbridge pads to a multiple of this argument only; megatron-core needs a multiple of TP.
    multiple = {"make_vocab_size_divisible_by": cell.layout.tp} if pads else {}
    bridge = package.AutoBridge.from_config(hf_config, dtype=common.torch_dtype(cell), **multiple)
    settings = {**common.ON_CPU, **common.parallel_settings(cell)}
    if cell.mtp:
        settings["mtp_num_layers"] = cell.mtp
    bridge.set_extra_args(**settings)
    bridge.export_weights_buffer_max_size_bytes = common.BUCKET  # read by main alone
    return bridge
