"""slime's converters as a target: weights of Hugging Face into Megatron's modules, and its iterator over what it sends.

slime builds its model from command line arguments; here it is megatron-core's own, and only the converters are judged.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common, plain_model, slime_calls, stand_ins


class Slime:
    """`load_hf_weights`, and `HfWeightIteratorDirect` as actors call it."""

    info = common.source_info("slime", "https://github.com/THUDM/slime/issues")
    claims = replace(
        common.CLAIMS,
        families=frozenset({"qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"}),
        mtp=1,
    )

    def preload(self) -> None:
        """Import the converters, with names in place of sglang's."""
        stand_ins.holding(slime_calls.SGLANG)
        accelerator: Any = importlib.import_module("slime.utils.accelerator")
        on_cpu = {name: lambda self, *_: "cpu" for name in accelerator.Accelerator.__abstractmethods__}
        accelerator.set_accelerator(type("OnCpu", (accelerator.Accelerator,), {**on_cpu, "name": "cpu"})())
        importlib.import_module("slime.backends.megatron_utils.hf_to_megatron")
        importlib.import_module("slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        hf_config = common.hf_config(world)
        with common.groups(cell):
            importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
            chunks = plain_model.build(hf_config, cell)
            models, args = [plain_model.Wrapped(chunk) for chunk in chunks], slime_calls.arguments(hf_config, cell)
            loader: Any = importlib.import_module("slime.backends.megatron_utils.hf_to_megatron")
            yield common.BridgeSession(
                export=common.BridgeExport(
                    chunks,
                    read=lambda folder: loader.load_hf_weights(args, models, folder),
                    write=lambda: sent(hf_config, cell, chunks),
                )
            )


def sent(hf_config: Any, cell: Cell, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as an actor hands them to engines."""
    iterators: Any = importlib.import_module("slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct")
    return slime_calls.sent(iterators, hf_config, cell, chunks)


#: What `--target slime` names.
target = Slime
