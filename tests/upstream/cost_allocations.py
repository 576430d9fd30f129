"""What megatron-core really allocates: run by test_costs_against_megatron.py, in a process of its own.

`python cost_allocations.py OUT CASE…` builds each case on every pipeline rank in torch's fake process groups with the
kit's CPU substitutions: GPTModel, DistributedDataParallel and the optimizer, one step of it. It writes a JSON line with
the bytes of all tensors that are alive.
"""

from __future__ import annotations

import gc
import json
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from built_from_record import world


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes by address, each storage once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}


def alive() -> dict[int, int]:
    """The storages of every tensor that Python knows."""
    import torch

    gc.collect()
    return storages([one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)])


def measured(config: dict[str, Any], layout: Any, training: dict[str, Any], dtype: str, rank: int) -> dict[str, int]:
    """Bytes on `rank` of weights, gradients, optimizer state, and what the step has besides."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from moeref import families, megatron
    from moeref.config import MoEConfig
    from moeref.record import Options, Record

    record = Record.of(
        families.read(config, dtype), layout, MoEConfig(moe_router_load_balancing_type="none"), Options(precision=None)
    )
    built = megatron.build(record, rank)
    sharded = training.get("use_distributed_optimizer", True)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.get("grad_reduce_in_fp32", True), use_distributed_optimizer=sharded
    )
    chunks = [DistributedDataParallel(built.config, ddp, chunk) for chunk in built.chunks]
    asked = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=dtype == "bfloat16",
        params_dtype=built.config.params_dtype,
        use_distributed_optimizer=sharded,
        clip_grad=0.0,
    )
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = storages([buffer.grad_data for buffer in buffers])
    own = [tensor for chunk in built.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    weights = storages([*own, *(b.param_data for b in buffers if b.param_data is not None)])
    before = alive()  # generators have states too; an address of before could be used again
    with torch.no_grad():
        optimizer = get_megatron_optimizer(asked, chunks, use_gloo_process_groups=False)
        optimizer.step()
        stepped = sum(size for at, size in alive().items() if at not in before)
        optimizer.zero_grad()
    held = sum(size for at, size in alive().items() if at not in before)
    return {
        "weights": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "optimizer": held,
        "step": stepped - held,
    }


def main(out: str, cases: list[dict[str, Any]]) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core

    cpu.install("cpu", "megatron")
    assert megatron.core
    from moeref.layout import Layout

    with Path(out).open("w", encoding="utf-8") as lines:
        for case in cases:
            layout = Layout.parse(case["layout"])
            for pp in range(layout.pp):
                rank = layout.rank_of(tp=0, pp=pp)
                with world(layout, rank):
                    found = measured(case["config"], layout, case["training"], case["dtype"], rank)
                print(json.dumps(found), file=lines)
