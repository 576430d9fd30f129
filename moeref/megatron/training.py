"""Gradients of one training step under megatron-core's schedule, DistributedDataParallel and gradient reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel

from moeref.bridge import ShardMap
from moeref.megatron import context, device, precision
from moeref.megatron.forward import mask_of, run_schedule, split

#: The loss of one microbatch: from its logits `[B, S/CP, V]` in fp32 over the unpadded vocabulary, the numbers of its B
#: rows and the positions `[S/CP]` in them that the logits are of.
Loss = Callable[[torch.Tensor, Sequence[int], torch.Tensor], torch.Tensor]


def gradients(
    chunks: Sequence[GPTModel], shard_map: ShardMap, tokens_BS: torch.Tensor, micro_batch: int = 1
) -> dict[tuple[int, str], torch.Tensor]:
    """The fp32 gradients of this rank's parameters by (chunk, local name), reduced over the ranks that share them.

    The loss is the mean cross entropy of the next token over the unpadded vocabulary; the label of the last token is
    the first token. Each `micro_batch` rows that follow each other are a microbatch; data-parallel replicas may have
    different ones. Weights and buffers do not change.

    Raises ValueError for a model with multi-token prediction layers, whose loss is not supported, and under VPP for a
    number of microbatches that is not a multiple of PP; other errors as `logits` does.
    """
    layout, length = shard_map.layout, tokens_BS.shape[1]
    if shard_map.model.mtp_layers:
        raise ValueError(
            f"{shard_map.model.family}: the loss of multi-token prediction layers is not part of this step"
        )
    precision.check_length(chunks[0].config, layout, length)
    labels_BS = tokens_BS.roll(-1, 1)

    def loss(logits_BSV: torch.Tensor, rows: Sequence[int], at_S: torch.Tensor) -> torch.Tensor:
        targets_BS = labels_BS[list(rows)].to(at_S.device)[:, at_S]
        total = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum")
        return total / (micro_batch * length)

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    accumulate(wrapped, shard_map, tokens_BS, loss, micro_batch)
    return {
        (number, name): parameter.main_grad.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def accumulate(
    wrapped: Sequence[DistributedDataParallel],
    shard_map: ShardMap,
    tokens_BS: torch.Tensor,
    loss: Loss,
    micro_batch: int = 1,
) -> None:
    """Put the gradient of the mean of `loss` over microbatches into `main_grad`, reduced over ranks that share it.

    `loss` is called on the ranks of the last stage. Raises ValueError as `gradients` does.
    """
    layout, length, chunks = shard_map.layout, tokens_BS.shape[1], [one.module for one in wrapped]
    tokens_BS = tokens_BS.to(device.of(chunks))
    at_S = context.part(length, layout, parallel_state.get_context_parallel_rank()).to(tokens_BS.device)
    mask_11SS = mask_of(length, chunks, layout)
    batches = [rows.tolist() for rows in split(torch.arange(len(tokens_BS)), micro_batch)]
    if layout.vpp > 1 and len(batches) % layout.pp:
        microbatches = f"{len(batches)} microbatches are no multiple of pp={layout.pp}"
        raise ValueError(f"{microbatches}, which the interleaved schedule needs")

    def step(batch: Iterator[list[int]], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        rows = next(batch)
        out = chunk(tokens_BS[rows][:, at_S], at_S[None], mask_11SS)

        def scaled(local_BSV: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            # Megatron's vocabulary-parallel cross entropy includes the padding, whose size depends on TP.
            full_BSV = tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV)
            # The schedule multiplies by CP and divides by the number of microbatches; DDP averages over DP and CP.
            return loss(full_BSV[..., : shard_map.model.vocab].float(), rows, at_S), {}

        return out, scaled

    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    # With a rate above 0, finalize_model_grads would also update the routers' expert bias.
    with _set(chunks[0].config, finalize_model_grads_func=finalize_model_grads, moe_router_bias_update_rate=0.0):
        run_schedule(step, batches, wrapped, length, micro_batch_size=micro_batch)


@contextmanager
def _set(config: Any, **values: Any) -> Iterator[None]:
    """Set fields of a config inside the `with` block. All chunks share this config."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)
