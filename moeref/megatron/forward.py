"""A forward pass through real chunks under megatron-core's own pipeline schedule, giving full logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from moeref.bridge import ShardMap
from moeref.layout import Layout
from moeref.megatron import context, device, precision, te_layers


def logits(chunks: Sequence[GPTModel], shard_map: ShardMap, tokens_BS: torch.Tensor) -> torch.Tensor | None:
    """`logits_BSV` in fp32 over the unpadded vocabulary on last-stage ranks, None elsewhere. One row a microbatch.

    They are the decoder's; multi-token prediction layers are left out. Under context parallelism every rank is given
    all tokens, computes its part, and has all logits. Tokens may be on any device; logits are on the model's.
    Raises LayoutError for a length that does not divide, and PaddingError for one that a recipe's factors do not.

    The interleaved schedule wants microbatches in multiples of PP: missing ones repeat the last row and are left out of
    the result.
    """
    layout, (_, length) = shard_map.layout, tokens_BS.shape
    precision.check_length(chunks[0].config, layout, length)
    tokens_BS = tokens_BS.to(device.of(chunks))
    positions_S = context.part(length, layout, parallel_state.get_context_parallel_rank()).to(tokens_BS.device)
    rows_S = list(tokens_BS[:, positions_S])
    group = layout.pp if layout.vpp > 1 else 1
    rows_S += [rows_S[-1]] * (-len(rows_S) % group)
    mask_11SS = mask_of(length, chunks, layout)

    def step(rows: Iterator[torch.Tensor], chunk: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        out = chunk(next(rows)[None], positions_S[None], mask_11SS)
        return out, lambda out_1SV, non_loss_data=True: out_1SV

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad(), _without_mtp(chunks):
        stored = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rows_S) for _ in chunks] if len(chunks) > 1 else iter(rows_S),
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows_S),
            seq_length=length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    local_BSV = torch.cat(stored[: len(tokens_BS)])
    full_BSV = tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV)
    if layout.cp > 1:
        joined_SBV = context.gather(full_BSV.transpose(0, 1), parallel_state.get_context_parallel_group())
        full_BSV = context.restore(joined_SBV, layout.cp).transpose(0, 1)
    logits_BSV: torch.Tensor = full_BSV[..., : shard_map.model.vocab].float()
    return logits_BSV


def mask_of(length: int, chunks: Sequence[torch.nn.Module], layout: Layout) -> torch.Tensor | None:
    """`[1, 1, S, S]`, True where nothing is seen, on the chunks' device: for megatron-core's local attention.

    None where attention makes its own: under context parallelism, and in Transformer Engine.
    """
    if layout.cp > 1 or te_layers.in_use(chunks):
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device.of(chunks)).triu(1)[None, None]


@contextmanager
def _without_mtp(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Leave MTP layers out of the forward: it is their loss that needs them, and 0.16.1 fails there without labels."""
    layers, process = chunks[0].config.mtp_num_layers, [chunk.mtp_process for chunk in chunks]
    chunks[0].config.mtp_num_layers = None  # one config serves all chunks
    for chunk in chunks:
        chunk.mtp_process = False
    try:
        yield
    finally:
        chunks[0].config.mtp_num_layers = layers
        for chunk, was in zip(chunks, process, strict=True):
            chunk.mtp_process = was
