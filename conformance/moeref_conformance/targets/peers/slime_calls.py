"""What the converters of slime and of its fork miles need around them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from moeref_conformance.contract.api import Cell
from moeref_conformance.targets.peers import common, plain_model

#: What the converters import of sglang, and never call without an engine.
SGLANG = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.utils": ("MultiprocessingSerializer",),
    "sglang.srt.utils.patch_torch": ("monkey_patch_torch_reductions",),
    "sglang.srt.weight_sync": (),
    "sglang.srt.weight_sync.tensor_bucket": ("FlattenedTensorBucket",),
}


def arguments(hf_config: Any, cell: Cell) -> Namespace:
    """What the converters read of a command line."""
    shapes = {"kv_channels": None, "q_lora_rank": None, **plain_model.shapes(hf_config, cell)}
    return Namespace(
        **{**shapes, "num_query_groups": hf_config.num_key_value_heads},
        num_experts=shapes["num_moe_experts"],
        vocab_size=hf_config.vocab_size,
        padded_vocab_size=plain_model.padded_vocabulary(hf_config, cell),
        update_weight_buffer_size=common.BUCKET,
        swiglu=True,  # read by miles alone
    )


def sent(iterators: Any, hf_config: Any, cell: Cell, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as an actor hands them to engines. `iterators` is the module of `HfWeightIteratorDirect`."""
    args, models = arguments(hf_config, cell), [plain_model.Wrapped(chunk) for chunk in chunks]
    held = dict(iterators.named_params_and_buffers(args, models))
    direct = iterators.HfWeightIteratorDirect(args, models, type(hf_config).__name__.lower(), None)
    for chunk in direct.get_hf_weight_chunks(held):
        yield from chunk
