"""Hugging Face to shards: every file of a layout, one shard in memory at a time, without a process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeref.bridge import ShardMap
from moeref.bridge.checkpoint import Checkpoint, check_headers
from moeref.bridge.loader import read_shard
from moeref.shards.files import nbytes, staged, write_file
from moeref.shards.folder import CONFIG, ShardFile, describe, files, finish, folder_name

#: Called with the bytes that have been written, and all there are.
Progress = Callable[[int, int], object]


def split(
    shard_map: ShardMap, source: str | Path, root: str | Path, *, progress: Progress = lambda done, total: None
) -> Path:
    """Write the shards of a Hugging Face folder to a new folder below `root`; its path.

    Names, shapes and dtypes of the whole checkpoint are checked before the first byte is written. A run that was
    interrupted is continued by the same call. Raises BridgeError as `bridge.load` does, and ShardError if the folder
    exists already or what is left there is of another source.
    """
    target, folder = Path(root) / folder_name(shard_map.layout), Path(source)
    in_format = checked(shard_map, folder)
    listed = files(in_format)
    total, done = sum(map(size, listed)), 0
    started = {**describe(in_format), "source": source_of(folder)}
    with Checkpoint.of_model(folder, shard_map.model) as checkpoint, staged(target, started) as part:
        for file in listed:
            if not (part / file.name).exists():
                data = (read_shard(in_format, checkpoint, shard) for shard in file.shards)
                write_file(part / file.name, file.described(), data)
            done += size(file)
            progress(done, total)
        finish(part, in_format, folder / CONFIG)
    return target


def checked(shard_map: ShardMap, folder: Path) -> ShardMap:
    """The map in the expert format of a Hugging Face folder. Raises BridgeError if that does not fit the model."""
    with Checkpoint.of_model(folder, shard_map.model) as checkpoint:
        found = shard_map.for_checkpoint(checkpoint.names)
        check_headers(checkpoint, found)
    return found


def size(file: ShardFile) -> int:
    """Bytes of the tensors of a file."""
    return sum(map(nbytes, file.described()))


def source_of(folder: Path, pattern: str = "*.safetensors") -> dict[str, Any]:
    """What tells whether a folder has changed: its path, and size and time of each file."""
    stats = {path.name: path.stat() for path in sorted(folder.glob(pattern))}
    return {"path": str(folder.resolve()), "files": {n: [s.st_size, s.st_mtime_ns] for n, s in stats.items()}}
