"""Shards to Hugging Face: every tensor put together from the shards of its owners, one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moeref.bridge import GlobalParam, ShardMap, hf_tensors
from moeref.bridge.shard_map import HFTensor
from moeref.shards.files import nbytes, staged, write_file, write_json
from moeref.shards.folder import CONFIG, ShardFolder
from moeref.shards.split import Progress, source_of
from moeref.torch_dtypes import TORCH

#: Bytes of a file of safetensors; a larger tensor has a file of its own.
FILE = 5 << 30


def join(
    source: str | Path,
    target: str | Path,
    *,
    file_bytes: int = FILE,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write a folder of shards as a Hugging Face checkpoint to the new folder `target`.

    A run that was interrupted is continued by the same call. Raises ShardError for a folder that is not whole, and if
    `target` exists.
    """
    out = Path(target)
    with ShardFolder(source) as folder:
        listed = checkpoint_files(hf_tensors(folder.shard_map), file_bytes)
        total, done = sum(nbytes(t) for tensors in listed.values() for t in tensors), 0
        holders = _holders(folder.shard_map)
        with staged(out, {"source": source_of(folder.folder), "file_bytes": file_bytes}) as part:
            for name, tensors in listed.items():
                if not (part / name).exists():
                    write_file(part / name, tensors, (_joined(folder, t, holders[t.name]) for t in tensors))
                done += sum(map(nbytes, tensors))
                progress(done, total)
            write_index(part, listed, folder.folder / CONFIG)
    return out


def checkpoint_files(tensors: list[HFTensor], file_bytes: int = FILE) -> dict[str, list[HFTensor]]:
    """The files of a Hugging Face checkpoint, each with its tensors in order."""
    runs = list(_files(tensors, file_bytes))
    return {f"model-{n:05d}-of-{len(runs):05d}.safetensors": run for n, run in enumerate(runs, 1)}


def write_index(part: Path, listed: dict[str, list[HFTensor]], config: Path) -> None:
    """Write the index of a checkpoint's files, and its config, which says nothing of the quantised files it came with:
    these are not."""
    total = sum(nbytes(t) for tensors in listed.values() for t in tensors)
    weight_map = {t.name: name for name, tensors in listed.items() for t in tensors}
    write_json(part / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    given = json.loads(config.read_text(encoding="utf-8"))
    if (plain := _plain(given)) == given:
        shutil.copyfile(config, part / CONFIG)
    else:
        write_json(part / CONFIG, plain)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without `quantization_config`, its own and its text model's."""
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    return kept | {key: _plain(kept[key]) for key in ("text_config",) if isinstance(kept.get(key), Mapping)}


def _files(tensors: list[HFTensor], limit: int) -> Iterator[list[HFTensor]]:
    """The tensors in order, in runs of at most `limit` bytes."""
    run: list[HFTensor] = []
    for tensor in tensors:
        if run and sum(map(nbytes, run)) + nbytes(tensor) > limit:
            yield run
            run = []
        run.append(tensor)
    yield run


def _holders(shard_map: ShardMap) -> dict[str, list[GlobalParam]]:
    """The parameters that hold elements of each Hugging Face tensor."""
    found: dict[str, list[GlobalParam]] = defaultdict(list)
    for param in shard_map.global_params:
        for tensor in param.hf if param.exports else ():
            found[tensor.name].append(param)
    return found


def _joined(folder: ShardFolder, tensor: HFTensor, params: list[GlobalParam]) -> torch.Tensor:
    """A whole tensor."""
    whole = torch.empty(tensor.shape, dtype=TORCH[tensor.dtype])
    for param in params:
        number = next(i for i, t in enumerate(param.hf) if t.name == tensor.name)
        for rank in folder.shard_map.owners(param):
            shard = folder.held(rank)[param.name]
            held = folder.slice(rank, shard)
            for region in shard.regions:
                if region.tensor == number:
                    piece = held[region.shard_index]
                    whole[region.hf_index] = piece.mT if region.transposed else piece
    return whole
