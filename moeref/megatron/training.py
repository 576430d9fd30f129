"""Gradients of one step under megatron-core's own schedule, data-parallel wrapper and gradient reduction."""

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
from megatron.core.pipeline_parallel import get_forward_backward_func

from moeref.bridge import ShardMap
from moeref.megatron import context, device, precision
from moeref.megatron.forward import mask_of


def gradients(
    chunks: Sequence[GPTModel], shard_map: ShardMap, tokens_BS: torch.Tensor
) -> dict[tuple[int, str], torch.Tensor]:
    """Gradients in fp32 of this rank's parameters by (chunk, local name), reduced over all ranks that share them.

    The loss is the mean over all tokens of the cross entropy of the next token over the unpadded vocabulary, where the
    first token follows the last. One row is a microbatch, and every data-parallel replica gets all rows. Weights and
    buffers stay as they are.
    Raises ValueError for a model with multi-token prediction layers, which have a loss of their own, and if the
    schedule is interleaved and the rows are no multiple of PP; LayoutError and PaddingError as `logits` does.
    """
    layout, (rows, length) = shard_map.layout, tokens_BS.shape
    if shard_map.model.mtp_layers:
        raise ValueError(
            f"{shard_map.model.family}: the loss of multi-token prediction layers is not part of this step"
        )
    if layout.vpp > 1 and rows % layout.pp:
        raise ValueError(f"{rows} microbatches are no multiple of pp={layout.pp}, which interleaving wants")
    precision.check_length(chunks[0].config, layout, length)
    tokens_BS = tokens_BS.to(device.of(chunks))
    at_S = context.part(length, layout, parallel_state.get_context_parallel_rank()).to(tokens_BS.device)
    mask_11SS = mask_of(length, chunks, layout)
    batches = list(zip(tokens_BS[:, at_S], tokens_BS.roll(-1, 1)[:, at_S], strict=True))

    def step(batch: Iterator[tuple[torch.Tensor, torch.Tensor]], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens_S, labels_S = next(batch)
        out = chunk(tokens_S[None], at_S[None], mask_11SS)

        def loss(local_1SV: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            # Megatron's own cross entropy counts the padding of the vocabulary, which grows with TP.
            full_1SV = tensor_parallel.gather_from_tensor_model_parallel_region(local_1SV)
            logits_SV = full_1SV[0, :, : shard_map.model.vocab].float()
            # The schedule multiplies by CP and divides by the number of microbatches; DDP averages over DP and CP.
            return torch.nn.functional.cross_entropy(logits_SV, labels_S, reduction="sum") / length, {}

        return out, loss

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    # Finalising would move the experts' bias towards balance: a part of the optimiser's step.
    with _set(chunks[0].config, finalize_model_grads_func=finalize_model_grads, moe_router_bias_update_rate=0.0):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=wrapped if len(chunks) > 1 else wrapped[0],
            num_microbatches=rows,
            seq_length=length,
            micro_batch_size=1,
        )
    return {
        (number, name): parameter.main_grad.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


@contextmanager
def _set(config: Any, **values: Any) -> Iterator[None]:
    """Fields of a config, for a while; one config serves all chunks."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)
