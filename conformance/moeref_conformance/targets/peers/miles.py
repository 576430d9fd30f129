"""miles' converters as a target: mbridge loads, with miles' models for it, as in its conversion script.

miles began as a fork of slime, and builds its model from command line arguments too; here it is megatron-core's own.
`HfWeightIteratorDirect` is what it sends weights with by default (`raw`); its other mode sends what Megatron-Bridge
exports.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common, mbridge_calls, plain_model, slime_calls, stand_ins

#: What the converters import of Ray and never call.
RAY = {"ray": ("get",), "ray.actor": ("ActorHandle",)}
#: Packages whose `__init__` imports what a trainer needs, and a converter does not.
PACKAGES = ("miles.backends.megatron_utils", "miles.backends.megatron_utils.update_weight")


class Miles:
    """mbridge's `load_weights`, and `HfWeightIteratorDirect` as actors call it.

    The conversion pads no vocabulary: it is given one that TP divides, so that cells with TP can be judged at all.
    """

    info = common.source_info("miles", "https://github.com/radixark/miles/issues")
    claims = replace(
        common.CLAIMS,
        families=frozenset({"qwen3_moe", "glm4_moe"}),  # of those that it converts, the ones that mbridge loads in fp32
        mtp=1,
    )

    def preload(self) -> None:
        """Import mbridge and the converters, with names in place of Ray's and sglang's."""
        stand_ins.holding({**slime_calls.SGLANG, **RAY})
        importlib.import_module("miles_plugins.mbridge")  # more models for mbridge
        stand_ins.without_init("miles", PACKAGES)
        importlib.import_module("miles.backends.megatron_utils.update_weight.hf_weight_iterator_direct")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        with common.groups(cell):
            share_groups()
            bridge = mbridge_calls.bridge_of(cell, world, pads=False)
            chunks = plain_model.build(bridge.hf_config, cell)
            load = partial(bridge.load_weights, chunks, memory_efficient=True)
            read = plain_model.padding(load, bridge.hf_config.vocab_size, cell.layout.tp)
            yield common.BridgeSession(
                export=common.BridgeExport(chunks, read=read, write=lambda: sent(bridge.hf_config, cell, chunks))
            )


def share_groups() -> None:
    """Tell miles megatron-core's groups, those that its converters read."""
    from megatron.core import parallel_state

    info: Any = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo
    kinds = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "etp": "expert_tensor"}
    asked = {short: f"{kind}_parallel" for short, kind in kinds.items()}
    groups = {
        short: info(
            rank=getattr(parallel_state, f"get_{kind}_rank")(),
            size=getattr(parallel_state, f"get_{kind}_world_size")(),
            group=getattr(parallel_state, f"get_{kind}_group")(),
        )
        for short, kind in asked.items()
    }
    importlib.import_module("miles.backends.training_utils.parallel").set_parallel_state(Namespace(**groups))
    importlib.import_module("miles.utils.distributed_utils").init_gloo_group()


def sent(hf_config: Any, cell: Cell, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as an actor hands them to engines."""
    iterators: Any = importlib.import_module("miles.backends.megatron_utils.update_weight.hf_weight_iterator_direct")
    return slime_calls.sent(iterators, hf_config, cell, chunks)


#: What `--target miles` names.
target = Miles
