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
from moeref.config.precision import recipe
from moeref.dispatcher import padding
from moeref.layout import Layout
from moeref.megatron import batches, context, device, padding_mask, precision, te_layers

#: From a microbatch and the logits `[B, S/CP, V/TP]` of this rank, what is kept of them: `[B, S/CP, …]`.
Kept = Callable[[batches.Microbatch, torch.Tensor], torch.Tensor]


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
    found = outputs(chunks, shard_map, rows(chunks, shard_map.layout, tokens_BS, micro_batch), _as_it_is, _whole)
    return None if found is None else torch.cat(found)


def packed_logits(
    chunks: Sequence[GPTModel], shard_map: ShardMap, packs: Sequence[Sequence[torch.Tensor]]
) -> list[list[torch.Tensor]] | None:
    """As `logits`, of samples `tokens_S` that are packed: a microbatch for each of `packs`. Logits [S, V] by sample.

    Samples are padded as `moeref.dispatcher.padding.plan` says. Raises ValueError for a pack without tokens. For gated
    delta nets megatron-core raises AssertionError where `deterministic_mode` is asked for, and 0.16
    NotImplementedError in any mode.
    """
    packed = batches.of_samples(on_device(packs, chunks), packing_plan(chunks, shard_map.layout))
    found = outputs(chunks, shard_map, packed, _as_it_is, _whole)
    return None if found is None else [of.unpacked(whole) for of, whole in zip(packed, found, strict=True)]


def rows(
    chunks: Sequence[GPTModel],
    layout: Layout,
    tokens_BS: torch.Tensor,
    micro_batch: int,
    mask_BS: torch.Tensor | None = None,
) -> list[batches.Microbatch]:
    """Microbatches of rows on the model's device, checked against layout and FP8 recipe as `logits` says."""
    precision.check_length(chunks[0].config, layout, tokens_BS.shape[1])
    context.check_length(tokens_BS.shape[1], layout)
    return batches.of_rows(tokens_BS.to(device.of(chunks)), micro_batch, mask_BS)


def packing_plan(chunks: Sequence[GPTModel], layout: Layout) -> padding.Plan:
    """How packed samples are padded for this model."""
    return padding.plan(layout, recipe=recipe(vars(chunks[0].config)))


def on_device(packs: Sequence[Sequence[torch.Tensor]], chunks: Sequence[GPTModel]) -> list[list[torch.Tensor]]:
    """The samples of each pack on the model's device."""
    return [[sample.to(device.of(chunks)) for sample in pack] for pack in packs]


def outputs(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    microbatches: list[batches.Microbatch],
    kept: Kept,
    joined: Callable[[torch.Tensor, batches.Microbatch, ShardMap], torch.Tensor],
) -> list[torch.Tensor] | None:
    """What `joined` makes of what is `kept` of each microbatch's logits, on ranks of the last stage."""
    layout, length = shard_map.layout, microbatches[0].tokens_BS.shape[1]
    # The interleaved schedule needs a multiple of PP microbatches.
    filled = microbatches + microbatches[-1:] * (-len(microbatches) % (layout.pp if layout.vpp > 1 else 1))
    forward = forward_of(chunks, layout, length)

    def step(data: Iterator[batches.Microbatch], chunk: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        of = next(data)
        return forward(of, chunk), lambda out_BSV, non_loss_data=True: kept(of, out_BSV)

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad(), _without_mtp(chunks):
        size = len(microbatches[0].tokens_BS)
        stored = run_schedule(
            step, filled, chunks, length, micro_batch_size=size, forward_only=True, collect_non_loss_data=True
        )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    return [joined(local, of, shard_map) for local, of in zip(stored, microbatches, strict=False)]  # without fillers


def _as_it_is(_: batches.Microbatch, local_BSV: torch.Tensor) -> torch.Tensor:
    return local_BSV


def _whole(local_BSV: torch.Tensor, of: batches.Microbatch, shard_map: ShardMap) -> torch.Tensor:
    """The logits of a microbatch from those of this rank's part of vocabulary and positions."""
    full_BSV = in_order(tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV), of, shard_map)
    return full_BSV[..., : shard_map.model.vocab].float()


def in_order(local: torch.Tensor, of: batches.Microbatch, shard_map: ShardMap) -> torch.Tensor:
    """What CP ranks hold of the positions `[B, S/CP, …]` of a microbatch, joined in their order."""
    if shard_map.layout.cp == 1:
        return local
    joined = context.gather(local.transpose(0, 1), parallel_state.get_context_parallel_group())
    return joined[of.order(shard_map.layout).to(joined.device)].transpose(0, 1)


def forward_of(chunks: Sequence[torch.nn.Module], layout: Layout, length: int) -> Callable[..., torch.Tensor]:
    """What runs a chunk on this rank's part of a microbatch of this length, with labels where MTP layers need them."""
    cp_rank, mask_11SS = parallel_state.get_context_parallel_rank(), mask_of(length, chunks, layout)

    def forward(data: batches.Microbatch, chunk: Any, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        at_S, packed = data.part(layout, cp_rank), data.packed
        extra: dict[str, Any] = {}
        if packed is not None:
            padding_BS = padding_mask.for_chunk(data.padding_BS[:, at_S], chunk)
            extra = {"packed_seq_params": packed, "padding_mask": padding_BS}
        if labels_BS is not None:
            extra["labels"] = labels_BS
        mask = mask_11SS if packed is None else None
        out: torch.Tensor = chunk(data.tokens_BS[:, at_S], data.positions_S[at_S][None], mask, **extra)
        return out

    return forward


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
