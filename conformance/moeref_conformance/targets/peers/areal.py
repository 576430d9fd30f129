"""AReaL's loader and weight updates as a target: the model is mbridge's, as AReaL has it by default.

Its `MegatronEngine` is a trainer. Here it gets a model, and neither data, an optimizer nor an inference engine: only
`_load_model_from_hf` and `_update_weights_via_registry` are called.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common, mbridge_calls, plain_model, stand_ins

#: What is read of AReaL. The rest of it serves other parts of the engine, as the packages of `ABSENT` do.
READ = (
    "areal.engine.core.model",
    "areal.engine.megatron_engine",
    "areal.engine.megatron_utils.fp8",
    "areal.engine.megatron_utils.megatron",
    "areal.engine.megatron_utils.megatron_lora",
    "areal.infra.platforms",
    "areal.models.mcore",
    "areal.utils.logging",
    "areal.utils.math",
)
ABSENT = ("megatron.bridge", "torchdata")


class AReaL:
    """`MegatronEngine` between mbridge's model and the broadcast to its inference engines.

    The first rank of each pipeline stage sends that stage's tensors, and the other ranks none. AReaL pads no
    vocabulary: mbridge is asked to, and the checkpoint is given padded, so that cells with TP can be judged at all.
    """

    info = common.source_info("areal", "https://github.com/areal-project/AReaL/issues")
    claims = replace(
        common.CLAIMS,
        families=frozenset({"qwen3_moe"}),  # of those that it converts, the one that mbridge builds here
        non_writers="nothing",
        receivers="share",
    )

    def preload(self) -> None:
        """Import the engine, and mbridge with it, without the packages around it."""
        stand_ins.read_alone("areal", READ, ABSENT)
        importlib.import_module("areal.engine.megatron_engine")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        with mbridge_calls.built(cell, world) as (bridge, models, chunks):
            loading = given(bridge, models)  # mbridge does not know the wrapper
            sending = given(bridge, [plain_model.Wrapped(chunk) for chunk in chunks])
            read = plain_model.padding(loading._load_model_from_hf, bridge.hf_config.vocab_size, cell.layout.tp)
            yield common.BridgeSession(export=common.BridgeExport(chunks, read=read, write=lambda: sent(sending)))


def given(bridge: Any, models: Sequence[Any]) -> Any:
    """The engine with a model, as its `initialize` leaves it, that keeps what it would broadcast."""
    from megatron.core import parallel_state

    home: Any = importlib.import_module("areal.engine.megatron_engine")

    class Engine(home.MegatronEngine):  # type: ignore[misc]
        def _update_bucket_weights_from_distributed(self, meta: object, tensors: list[tuple[str, Any]]) -> None:
            self.broadcast += tensors
            tensors.clear()

    engine: Any = object.__new__(Engine)
    vars(engine).update(
        bridge=bridge,
        bridge_cls="mbridge",
        hf_config=bridge.hf_config,
        tf_config=bridge.config,
        model=models,
        config=Namespace(use_lora=False, is_critic=False),
        fp8_direct_convert=False,
        quantization_config=None,
        process_group_initialized=True,
        is_pp_head=parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0,
        _cpu_group=None,  # the default group, which is of gloo
        broadcast=[],
    )
    engine._glu_fc1_names = engine._build_glu_fc1_names()
    engine._mark_duplicated_params()
    return engine


def sent(engine: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as the engine broadcasts them."""
    engine._update_weights_via_registry(Namespace(weight_chunked_mem_mb=common.BUCKET / 2**20, version=1))
    tensors, engine.broadcast = engine.broadcast, []
    yield from tensors


#: What `--target areal` names.
target = AReaL
