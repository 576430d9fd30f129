"""Bytes of weights, gradients and optimizer state on one rank.

megatron-core's DistributedDataParallel has a buffer for each dtype and kind of parameter of a chunk, dense or expert.
The distributed optimizer cuts each buffer over the replicas that hold the same parameters: dp·cp for dense ones, edp
for experts. It then also aligns the buffers, as `param_layout.pad_param_start` and `pad_bucket_end` do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moeref.bridge import LocalShard
from moeref.costs.training import BYTES, Training
from moeref.dtypes import DTYPES
from moeref.layout import Layout

#: Elements to which a parameter's start and a buffer's end are aligned.
_START, _END = 64, 128
#: Buffers in Megatron, without gradient and optimizer state; the number of fp32 vectors that the router has of each.
_NO_PARAMETERS = {"router.expert_bias": 2}


@dataclass(frozen=True)
class States:
    """Bytes on one rank. `step` is allocated during the optimizer's step only, when there are no activations."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    step: int = 0

    @property
    def total(self) -> int:
        """What stays allocated all the time."""
        return self.weights + self.gradients + self.optimizer


def states(shards: Iterable[LocalShard], layout: Layout, training: Training) -> States:
    """The bytes of a rank that holds these `shards`. The rank with the largest part of a buffer counts.

    Indexers are frozen: they have weights alone.

    Not counted: buckets with overlap_grad_reduce (each is aligned on its own), FP8 parameters, offloading to the CPU.
    """
    elements: Counter[tuple[int, bool, str]] = Counter()
    beside = 0
    for shard in shards:
        count, name = math.prod(shard.shape), shard.param.mapping.megatron
        copies = next((number for end, number in _NO_PARAMETERS.items() if name.endswith(end)), 0)
        if shard.param.mapping.where == "indexer":  # frozen
            beside += DTYPES[shard.param.dtype].bytes * count
        elif copies:
            beside += copies * 4 * count
        else:
            aligned = _up(count, _START) if training.trains and training.use_distributed_optimizer else count
            elements[shard.chunk, shard.param.expert is not None, shard.param.dtype] += aligned
    found = [_of_buffer(n, expert, DTYPES[dtype].bytes, layout, training) for (_, expert, dtype), n in elements.items()]
    return States(
        beside + sum(one.weights for one in found),
        sum(one.gradients for one in found),
        sum(one.optimizer for one in found),
        sum(one.step for one in found),
    )


def _of_buffer(elements: int, expert: bool, width: int, layout: Layout, training: Training) -> States:
    """The states of one buffer; `width`: bytes of a parameter."""
    if not training.trains:
        return States(elements * width)
    replicas = layout.edp if expert else layout.dp * layout.cp
    own = elements
    if training.use_distributed_optimizer:
        elements = _up(elements, math.lcm(replicas, _END))
        own = elements // replicas
    in_fp32 = training.grad_reduce_in_fp32 or width == BYTES["fp32"]
    copied = not in_fp32 and not training.use_precision_aware_optimizer
    return States(
        elements * width,
        elements * (BYTES["fp32"] if in_fp32 else width),
        own * (_main(width, training) + BYTES[training.exp_avg_dtype] + BYTES[training.exp_avg_sq_dtype]),
        own * BYTES["fp32"] if copied else 0,
    )


def _main(width: int, training: Training) -> int:
    """Bytes of a master weight: none for fp32 parameters; of a bf16 one its 16 missing bits are enough."""
    if width == BYTES["fp32"]:
        return 0
    in_fp32 = training.main_params_dtype == "fp32"
    if training.use_precision_aware_optimizer and training.store_param_remainders and in_fp32:
        return BYTES["fp32"] - width
    return BYTES[training.main_params_dtype]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
