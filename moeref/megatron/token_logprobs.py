"""Log-probabilities of tokens and entropies, from logits that stay on the TP ranks that hold parts of the vocabulary.

Shape suffixes: B rows, S positions, V vocabulary of a TP rank, 2 log-probability and entropy, 3 sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from moeref.bridge import ShardMap
from moeref.megatron import batches
from moeref.megatron.forward import Kept, in_order, on_device, outputs, packing_plan, rows


class Logprobs(NamedTuple):
    """Log-probabilities of the tokens of a row from the second on, and entropies in nats of the distributions that they
    were drawn from, in fp32. Both are `[B, S - 1]`, or `[S - 1]` of a packed sample.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor


def logprobs(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    tokens_BS: torch.Tensor,
    micro_batch: int = 1,
    *,
    temperature: float = 1.0,
) -> Logprobs | None:
    """Log-probabilities and entropies of the decoder's logits divided by `temperature`, over the unpadded vocabulary.

    They have no gradients.

    As `logits`, on ranks of the last stage, and of all positions; but no rank holds more logits than its own. Raises as
    `logits` does, and ValueError for a temperature that is not positive.
    """
    microbatches = rows(chunks, shard_map.layout, tokens_BS, micro_batch)
    found = outputs(chunks, shard_map, microbatches, _kept(shard_map, temperature), in_order)
    return None if found is None else _logprobs(torch.cat(found))


def packed_logprobs(
    chunks: Sequence[GPTModel],
    shard_map: ShardMap,
    packs: Sequence[Sequence[torch.Tensor]],
    *,
    temperature: float = 1.0,
) -> list[list[Logprobs]] | None:
    """As `logprobs`, of samples that are packed as for `packed_logits`; by pack and sample."""
    packed = batches.of_samples(on_device(packs, chunks), packing_plan(chunks, shard_map.layout))
    found = outputs(chunks, shard_map, packed, _kept(shard_map, temperature), in_order)
    if found is None:
        return None
    return [[_logprobs(of_S2) for of_S2 in of.unpacked(whole)] for of, whole in zip(packed, found, strict=True)]


def _logprobs(found_BS2: torch.Tensor) -> Logprobs:
    """The last position predicts no token of its row."""
    return Logprobs(*found_BS2[..., :-1, :].unbind(-1))


def _kept(shard_map: ShardMap, temperature: float) -> Kept:
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} has to be positive")
    return partial(_of_labels, shard_map, temperature)


def _of_labels(
    shard_map: ShardMap, temperature: float, microbatch: batches.Microbatch, local_BSV: torch.Tensor
) -> torch.Tensor:
    """`[B, S/CP, 2]` on each TP rank: the log-probability of each label, and the entropy."""
    at_S = microbatch.part(shard_map.layout, parallel_state.get_context_parallel_rank())
    first = parallel_state.get_tensor_model_parallel_rank() * local_BSV.shape[-1]
    scaled_BSV = local_BSV.float() / temperature
    # What pads the vocabulary adds nothing: its exponential is 0.
    scaled_BSV[..., max(0, shard_map.model.vocab - first) :] = torch.finfo(torch.float32).min
    group = parallel_state.get_tensor_model_parallel_group()
    top_BS = scaled_BSV.amax(-1)
    torch.distributed.all_reduce(top_BS, torch.distributed.ReduceOp.MAX, group=group)
    scaled_BSV -= top_BS[..., None]
    own_BS = microbatch.labels_BS[:, at_S] - first
    inside_BS = (own_BS >= 0) & (own_BS < scaled_BSV.shape[-1])
    label_BS = scaled_BSV.gather(-1, own_BS.where(inside_BS, 0)[..., None])[..., 0].where(inside_BS, 0.0)
    weights_BSV = scaled_BSV.exp()
    sums_BS3 = torch.stack([weights_BSV.sum(-1), (weights_BSV * scaled_BSV).sum(-1), label_BS], -1)
    torch.distributed.all_reduce(sums_BS3, group=group)
    total_BS, weighted_BS, of_label_BS = sums_BS3.unbind(-1)
    return torch.stack([of_label_BS - total_BS.log(), total_BS.log() - weighted_BS / total_BS], -1)
