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
from moeref.megatron import batches, device, mtp, padding_mask
from moeref.megatron.forward import forward_of, on_device, packing_plan, rows, run_schedule

#: The loss of one microbatch: from its logits `[B, S/CP, V]` in fp32 over the unpadded vocabulary, the numbers of its B
#: rows and the positions `[S/CP]` in them that the logits are of.
Loss = Callable[[torch.Tensor, Sequence[int], torch.Tensor], torch.Tensor]
#: The same of a microbatch by its number, summed over the labels that are here.
_Summed = Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]


def gradients(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    tokens_BS: torch.Tensor,
    micro_batch: int = 1,
    *,
    mask_BS: torch.Tensor | None = None,
    bias_rate: float = 0.0,
) -> dict[tuple[int, str], torch.Tensor]:
    """The fp32 gradients of this rank's parameters by (chunk, local name), reduced over the ranks that share them.

    Parameters that are frozen (`requires_grad` False) have none.

    The loss is the mean over the tokens of all replicas of the cross entropy of the next token over the unpadded
    vocabulary; the label of the last token is the first token. With `mask_BS` (bool) only predictions of tokens where
    it is True count, whatever row, microbatch or replica they are in. Multi-token prediction layers add their loss on
    these labels: for layer k of K, `mtp_loss_scaling_factor` / K times the mean over all tokens that have a label k
    positions on in their row. megatron-core takes that mean over each CP rank's part of a microbatch.

    Each `micro_batch` rows that follow each other are a microbatch; data-parallel replicas may have different ones.
    Weights and buffers do not change, but for the routers' expert bias: it grows by `bias_rate` (megatron-core's
    moe_router_bias_update_rate) for experts with fewer tokens of the step than the mean, and shrinks for those with
    more.

    Raises ValueError for a mask that is not bool or of another shape, or with which no replica has a token to train on;
    and under VPP for a number of microbatches that is not a multiple of PP. Other errors as `logits` does.
    """
    return _step(chunks, shard_map, rows(chunks, shard_map.layout, tokens_BS, micro_batch, mask_BS), bias_rate)


def policy_gradients(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    tokens_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    advantages_BS: torch.Tensor,
    micro_batch: int = 1,
    *,
    temperature: float = 1.0,
    entropy: float = 0.0,
    bias_rate: float = 0.0,
) -> dict[tuple[int, str], torch.Tensor]:
    """As `gradients`, of a policy's loss in place of the cross entropy.

    It is the mean, over the tokens of all replicas where `mask_BS` is True, of -(advantage · logprob + `entropy` · H).
    The log-probability of a token and the entropy H of what it is drawn from are of logits divided by `temperature`.
    `advantages_BS` [B, S] are constants, in fp32. All tokens count where the routers' expert bias grows or shrinks by
    `bias_rate`, as in `gradients`, whether they are trained on or not.

    Multi-token prediction layers add their own loss, as in `gradients`. Raises ValueError for advantages of another
    shape; other errors as `gradients` does.
    """
    if advantages_BS.shape != tokens_BS.shape:
        raise ValueError(f"advantages are {list(advantages_BS.shape)}, tokens {list(tokens_BS.shape)}")
    microbatches = rows(chunks, shard_map.layout, tokens_BS, micro_batch, mask_BS)
    of_labels = torch.split(advantages_BS.to(device.of(chunks)).roll(-1, 1), micro_batch)
    return _policy_step(chunks, shard_map, microbatches, of_labels, temperature, entropy, bias_rate)


def packed_policy_gradients(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    packs: Sequence[Sequence[torch.Tensor]],
    masks: Sequence[Sequence[torch.Tensor]],
    advantages: Sequence[Sequence[torch.Tensor]],
    *,
    temperature: float = 1.0,
    entropy: float = 0.0,
    bias_rate: float = 0.0,
) -> dict[tuple[int, str], torch.Tensor]:
    """As `policy_gradients`, of samples that are packed as for `packed_gradients`.

    `masks` and `advantages` have those of each sample. Raises ValueError also for other numbers of packs, samples or
    tokens, and for `seq_aux_loss`; with multi-token prediction layers for any loss of the routers and a `bias_rate`.
    """
    padding_mask.check_losses(chunks[0].config)
    sizes, given = ([[len(sample) for sample in pack] for pack in of] for of in (packs, advantages))
    if sizes != given:
        raise ValueError(f"advantages are of samples of {given} tokens, packs of {sizes}")
    plan, longest = packing_plan(chunks, shard_map.layout), packed_total(chunks, shard_map, packs)
    microbatches = batches.of_samples(on_device(packs, chunks), plan, longest, masks)
    pairs = zip(microbatches, on_device(advantages, chunks), strict=True)
    of_labels = [one.spread([sample.roll(-1) for sample in of])[None] for one, of in pairs]
    return _policy_step(chunks, shard_map, microbatches, of_labels, temperature, entropy, bias_rate)


def _policy_step(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    microbatches: Sequence[batches.Microbatch],
    of_labels: Sequence[torch.Tensor],
    temperature: float,
    entropy: float,
    bias_rate: float,
) -> dict[tuple[int, str], torch.Tensor]:
    """The gradients of a policy's loss; `of_labels` has the advantages `[B, S]` of each microbatch's labels."""

    def loss(logits_BSV: torch.Tensor, number: int, at_S: torch.Tensor) -> torch.Tensor:
        labels_BS = microbatches[number].labels_BS[:, at_S]
        all_BSV = (logits_BSV / temperature).log_softmax(-1)
        logprobs_BS = all_BSV.gather(-1, labels_BS.clamp_min(0)[..., None])[..., 0]
        entropies_BS = -(all_BSV.exp() * all_BSV).sum(-1)
        gain_BS = of_labels[number][:, at_S] * logprobs_BS + entropy * entropies_BS
        summed: torch.Tensor = -gain_BS[labels_BS != batches.IGNORED].sum()
        return summed

    return _step(chunks, shard_map, microbatches, bias_rate, loss)


def packed_gradients(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    packs: Sequence[Sequence[torch.Tensor]],
    masks: Sequence[Sequence[torch.Tensor]] | None = None,
    *,
    bias_rate: float = 0.0,
) -> dict[tuple[int, str], torch.Tensor]:
    """As `gradients`, of samples that are packed as for `packed_logits`. Replicas may have other numbers of tokens.

    `masks` has the loss mask of each sample. All replicas pad to the longest of their packs, so that every dispatcher
    takes them. Padding counts in no loss of the routers and in no expert's bias; megatron-core's z-loss is a mean over
    the means of TP and CP ranks, which have unequal numbers of tokens. Raises ValueError also for `seq_aux_loss`, which
    megatron-core would compute over a whole pack, and with multi-token prediction layers for any loss of the routers
    and for a `bias_rate`.
    """
    padding_mask.check_losses(chunks[0].config)
    plan, longest = packing_plan(chunks, shard_map.layout), packed_total(chunks, shard_map, packs)
    return _step(chunks, shard_map, batches.of_samples(on_device(packs, chunks), plan, longest, masks), bias_rate)


def packed_total(chunks: Sequence[GPTModel], shard_map: ShardMap, packs: Sequence[Sequence[torch.Tensor]]) -> int:
    """The length to which `packed_gradients` pads each pack, and `total` of `moeref.replay.packed` for its routes.

    All data-parallel replicas call it, each with its packs. Raises ValueError for a pack without tokens.
    """
    length = batches.packed_length(packs, packing_plan(chunks, shard_map.layout))
    return _over_replicas(length, chunks, torch.distributed.ReduceOp.MAX)


def _over_replicas(number: int, chunks: Sequence[GPTModel], operation: Any) -> int:
    """A number reduced over the data-parallel replicas."""
    total = torch.tensor(number, device=device.of(chunks))
    torch.distributed.all_reduce(total, operation, group=parallel_state.get_data_parallel_group())
    return int(total)


def _step(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    microbatches: Sequence[batches.Microbatch],
    bias_rate: float = 0.0,
    loss: _Summed | None = None,
) -> dict[tuple[int, str], torch.Tensor]:
    """The gradients of a mean over labels, of their cross entropy if no other `loss` is given."""
    share = _share(chunks, microbatches)
    if not share:
        raise ValueError("the loss mask leaves no token to train on, in any microbatch of any replica")

    def cross_entropy(logits_BSV: torch.Tensor, number: int, at_S: torch.Tensor) -> torch.Tensor:
        labels_BS = microbatches[number].labels_BS[:, at_S]
        return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")

    def mean(*given: Any) -> torch.Tensor:
        return (loss or cross_entropy)(*given) / share

    _accumulate(in_ddp(chunks), shard_map, microbatches, mean, bias_rate)
    return {
        (number, name): parameter.main_grad.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def _share(chunks: Sequence[GPTModel], microbatches: Sequence[batches.Microbatch], ahead: int = 0) -> float:
    """How many labels a microbatch has, averaged over those of all replicas; `ahead`: positions after the decoder's."""
    own = sum(int((of.ahead(ahead) != batches.IGNORED).sum()) for of in microbatches)
    counts = len(microbatches) * parallel_state.get_data_parallel_world_size()
    share: float = _over_replicas(own, chunks, torch.distributed.ReduceOp.SUM) / counts
    return share


def in_ddp(chunks: Sequence[GPTModel]) -> list[DistributedDataParallel]:
    """The chunks in megatron-core's DistributedDataParallel, which sums gradients in fp32."""
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]


def accumulate(
    wrapped: Sequence[DistributedDataParallel],
    shard_map: ShardMap,
    tokens_BS: torch.Tensor,
    loss: Loss,
    micro_batch: int = 1,
    mask_BS: torch.Tensor | None = None,
) -> None:
    """Put the gradient of the mean of `loss` over microbatches into `main_grad`, reduced over ranks that share it.

    Multi-token prediction layers add their own loss, as in `gradients`: of predictions of tokens where `mask_BS` is
    True, or of all. `loss` is called on the ranks of the last stage. Raises ValueError as `gradients` does.
    """

    def of_rows(logits_BSV: torch.Tensor, number: int, at_S: torch.Tensor) -> torch.Tensor:
        return loss(logits_BSV, range(number * micro_batch, (number + 1) * micro_batch), at_S)

    chunks = [one.module for one in wrapped]
    _accumulate(wrapped, shard_map, rows(chunks, shard_map.layout, tokens_BS, micro_batch, mask_BS), of_rows)


def _accumulate(
    wrapped: Sequence[DistributedDataParallel],
    shard_map: ShardMap,
    microbatches: Sequence[batches.Microbatch],
    loss: _Summed,
    bias_rate: float = 0.0,
) -> None:
    """As `accumulate`; `loss` gets logits, the number of the microbatch, and the positions of this rank's part."""
    layout, model, (size, length) = shard_map.layout, shard_map.model, microbatches[0].tokens_BS.shape
    if layout.vpp > 1 and len(microbatches) % layout.pp:
        number = f"{len(microbatches)} microbatches are no multiple of pp={layout.pp}"
        raise ValueError(f"{number}, which the interleaved schedule needs")
    chunks = [one.module for one in wrapped]
    forward, cp_rank = forward_of(chunks, layout, length), parallel_state.get_context_parallel_rank()
    if model.mtp_layers:
        mtp.check(chunks[0].config, microbatches, bias_rate)
    shares = [_share(chunks, microbatches, ahead) for ahead in range(1, model.mtp_layers + 1)]
    layers = mtp.Losses(model.vocab, chunks[0].config, shares)

    def step(numbers: Iterator[int], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        at_S = microbatches[number].part(layout, cp_rank)

        def scaled(local_BSV: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            # Megatron's vocabulary-parallel cross entropy includes the padding, whose size depends on TP.
            full_BSV = tensor_parallel.gather_from_tensor_model_parallel_region(local_BSV)
            logits_BSV = full_BSV[..., : model.vocab].float()
            # The schedule multiplies by CP and divides by the number of microbatches; DDP averages over DP and CP.
            return loss(logits_BSV, number, at_S) + layers.added, {}

        return forward(microbatches[number], chunk, layers.labels(microbatches[number], at_S)), scaled

    for chunk in wrapped:
        chunk.train()
        chunk.zero_grad_buffer()
    # With a rate above 0, finalize_model_grads also updates the routers' expert bias.
    settings = {"finalize_model_grads_func": finalize_model_grads, "moe_router_bias_update_rate": bias_rate}
    with _set(chunks[0].config, **settings), layers.in_place(chunks), padding_mask.left_out_of_bias(chunks):
        run_schedule(step, range(len(microbatches)), wrapped, length, micro_batch_size=size)


@contextmanager
def _set(config: Any, **values: Any) -> Iterator[None]:
    """Set fields of a config inside the `with` block. All chunks share this config."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)
