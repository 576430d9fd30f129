"""A forward pass through the model chunks of this rank under megatron-core's pipeline schedule."""

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


def logits(
    chunks: Sequence[GPTModel], shard_map: ShardMap, tokens_BS: torch.Tensor, micro_batch: int = 1
) -> torch.Tensor | None:
    """The decoder's `logits_BSV` in fp32 over the unpadded vocabulary on ranks of the last stage, None elsewhere.

    Each `micro_batch` rows that follow each other are a microbatch. Multi-token prediction layers are skipped. Every
    rank takes all tokens, and every rank of the last stage returns all logits, also under context parallelism. Tokens
    may be on any device; logits are on the model's.

    Raises LayoutError for a length that the layout does not divide, PaddingError for one that the FP8 recipe does not
    allow, and ValueError for rows that do not divide into microbatches.
    """
    layout, (_, length) = shard_map.layout, tokens_BS.shape
    precision.check_length(chunks[0].config, layout, length)
    tokens_BS = tokens_BS.to(device.of(chunks))
    positions_S = context.part(length, layout, parallel_state.get_context_parallel_rank()).to(tokens_BS.device)
    microbatches = split(tokens_BS[:, positions_S], micro_batch)
    # The interleaved schedule needs a multiple of PP microbatches.
    filled = microbatches + microbatches[-1:] * (-len(microbatches) % (layout.pp if layout.vpp > 1 else 1))
    mask_11SS = mask_of(length, chunks, layout)

    def step(rows: Iterator[torch.Tensor], chunk: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        out = chunk(next(rows), positions_S[None], mask_11SS)
        return out, lambda out_BSV, non_loss_data=True: out_BSV

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad(), _without_mtp(chunks):
        stored = run_schedule(
            step, filled, chunks, length, micro_batch_size=micro_batch, forward_only=True, collect_non_loss_data=True
        )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    local_BSV = torch.cat(stored[: len(microbatches)])
    full_BSV = tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV)
    if layout.cp > 1:
        joined_SBV = context.gather(full_BSV.transpose(0, 1), parallel_state.get_context_parallel_group())
        full_BSV = context.restore(joined_SBV, layout.cp).transpose(0, 1)
    logits_BSV: torch.Tensor = full_BSV[..., : shard_map.model.vocab].float()
    return logits_BSV


def split(rows_BS: torch.Tensor, micro_batch: int) -> list[torch.Tensor]:
    """Microbatches of `micro_batch` rows. Raises ValueError for rows that do not divide into them."""
    if len(rows_BS) % micro_batch:
        raise ValueError(f"{len(rows_BS)} rows do not divide into microbatches of {micro_batch}")
    return list(torch.split(rows_BS, micro_batch))


def run_schedule(
    step: Callable[..., Any],
    microbatches: Sequence[Any],
    chunks: Sequence[torch.nn.Module],
    length: int,
    **options: int,
) -> Any:
    """Run megatron-core's schedule on this rank. `step` gets an iterator over `microbatches` and a chunk."""
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(microbatches) for _ in chunks] if several else iter(microbatches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=length,
        **options,
    )


def mask_of(length: int, chunks: Sequence[torch.nn.Module], layout: Layout) -> torch.Tensor | None:
    """The causal mask `[1, 1, S, S]` of megatron-core's local attention: True where a token must not attend.

    None where attention applies causality itself: under context parallelism, and in Transformer Engine.
    """
    if layout.cp > 1 or te_layers.in_use(chunks):
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device.of(chunks)).triu(1)[None, None]


@contextmanager
def _without_mtp(chunks: Sequence[GPTModel]) -> Iterator[None]:
    """Skip MTP layers in the forward: only their loss needs them, and megatron-core 0.16.1 fails without labels."""
    layers, process = chunks[0].config.mtp_num_layers, [chunk.mtp_process for chunk in chunks]
    chunks[0].config.mtp_num_layers = None  # all chunks share one config
    for chunk in chunks:
        chunk.mtp_process = False
    try:
        yield
    finally:
        chunks[0].config.mtp_num_layers = layers
        for chunk, was in zip(chunks, process, strict=True):
            chunk.mtp_process = was
