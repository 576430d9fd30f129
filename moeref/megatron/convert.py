"""`moeref convert` to Megatron's distributed checkpoint and back, in one process or in the ranks of torchrun."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_latent_attention
from torch._C._distributed_c10d import HashStore

from moeref.bridge import load
from moeref.check import check
from moeref.exporter import Plan, Stream, export
from moeref.megatron import device, groups, torch_dist
from moeref.megatron.build import Built, build
from moeref.megatron.torch_dist import TorchDistError
from moeref.record import Record, installed_core
from moeref.shards.command import bar, divisible_by, refuse
from moeref.shards.files import nbytes, staged, write_file
from moeref.shards.folder import CONFIG
from moeref.shards.join import checkpoint_files, write_index
from moeref.shards.split import Progress, checked, source_of


def convert(options: Any) -> str:
    """Convert either way; what was done, for the user, and "" on all ranks but 0. Raises ValueError and OSError."""
    source, target = Path(options.source), Path(options.target)
    back = torch_dist.is_torch_dist(source)
    refuse(options, ("norms", "experts"), "a distributed checkpoint has the names of Transformer Engine's modules")
    config = Path(options.config) if options.config else source
    record = _record(config, options.layout or "world=1", divisible_by(options))
    return (_to_hugging_face if back else _to_torch_dist)(source, target, config / CONFIG, record, options.dry_run)


def _to_torch_dist(source: Path, target: Path, config: Path, record: Record, dry_run: bool) -> str:
    with _model(record) as (built, rank):
        if dry_run:
            number, elements, _ = checked(built.shard_map, source).hf_sizes()
            return _on_rank_0(rank, f"would write {number} tensors, {elements} elements, to {target}")
        load(built.shard_map, rank, built.chunks, source)
        shard_map = checked(built.shard_map, source)  # in the expert format of the source
        with bar(shown=rank == 0) as progress:
            torch_dist.save(shard_map, rank, built.chunks, target, config, progress=progress)
        return _on_rank_0(rank, f"written: {target}")


def _to_hugging_face(source: Path, target: Path, config: Path, record: Record, dry_run: bool) -> str:
    torch_dist.check_folder(source)
    with _model(record) as (built, rank):
        shard_map = built.shard_map.in_format(torch_dist.expert_format(source))
        if dry_run:
            number, elements, _ = shard_map.hf_sizes()
            return _on_rank_0(rank, f"would write {number} tensors, {elements} elements, to {target}")
        torch_dist.load(shard_map, rank, built.chunks, source)
        with export(Plan(shard_map), rank, built.chunks) as streamed:
            if rank == 0:
                _write(streamed, source, target, config)
            else:
                for _ in streamed:
                    pass
        return _on_rank_0(rank, f"written: {target}")


def _write(streamed: Stream, source: Path, target: Path, config: Path) -> None:
    """Write what comes as a Hugging Face checkpoint, file by file. Files that are whole are not written again."""
    listed = checkpoint_files(list(streamed.plan.tensors))
    begun = {"source": source_of(source, "*.distcp"), "expert_format": streamed.plan.shard_map.expert_format}
    with staged(target, begun) as part, bar() as progress:
        weights = _counted(streamed, sum(nbytes(t) for tensors in listed.values() for t in tensors), progress)
        for name, tensors in listed.items():
            mine = islice(weights, len(tensors))
            if (part / name).exists():
                deque(mine, maxlen=0)
            else:
                write_file(part / name, tensors, mine)
        write_index(part, listed, config)
        for _ in weights:  # at its end all ranks wait for each other, before the folder has its name
            pass


def _counted(streamed: Stream, total: int, progress: Progress) -> Iterator[torch.Tensor]:
    """The tensors of a stream of which this rank receives all; tells `progress` of their bytes."""
    done = 0
    for tensor, full in streamed:
        if full is not None:
            yield full
            del full
        done += nbytes(tensor)
        progress(done, total)


def _on_rank_0(rank: int, text: str) -> str:
    return text if rank == 0 else ""


def _record(config: Path, layout: str, divisible_by: int) -> Record:
    """How the model is built: with Transformer Engine's names in plain torch, and a dispatcher without CUDA streams."""
    if not (config / CONFIG).is_file():
        raise TorchDistError(f"{config} has no {CONFIG}: give the folder of the model's with --config")
    names: dict[str, Any] = {"kernels": "torch", "norms": "fused", "experts": "sequential", "dispatcher": "allgather"}
    report = check(config, layout, divisible_by=divisible_by, core=installed_core(), verify=False, **names)
    if report.record is None:
        raise TorchDistError(f"{config}: " + "; ".join(problem.text for problem in report.problems))
    if report.record.model.mla and not isinstance(multi_latent_attention.TELinear, type | None):
        raise TorchDistError(
            f"{config}: megatron-core {installed_core()} builds latent attention only where Transformer Engine is "
            "installed; install it, or megatron-core 0.19"
        )
    return report.record


@contextmanager
def _model(record: Record) -> Iterator[tuple[Built, int]]:
    """The model of this process in the layout's ranks, with any weights: it is one of torchrun's ranks, or alone."""
    layout, processes = record.layout, int(os.environ.get("WORLD_SIZE", "1"))
    if processes != layout.world:
        raise TorchDistError(
            f"{layout.text} has {layout.world} ranks, and {processes} run: start them by `torchrun --nproc-per-node "
            f"{layout.world} -m moeref convert …`, or leave out --layout: then one process holds the whole model"
        )
    if processes > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        rank = groups.initialise(layout, tied=record.model.tied)
        with device.host_for_cuda():
            yield build(record, rank, drawn=False), rank
    finally:
        groups.shut_down()
        dist.destroy_process_group()
