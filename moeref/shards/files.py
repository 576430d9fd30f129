"""Files of safetensors that are written tensor by tensor, and folders that appear once they are whole.

u64     bytes of the header, little-endian
header  JSON: by name dtype, shape and [begin, end) in the data; spaces up to a multiple of 8 bytes
data    the tensors, in the header's order
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moeref.bridge.checkpoint import DTYPES
from moeref.bridge.shard_map import HFTensor
from moeref.torch_dtypes import TORCH, bits_of

_NAMES = {name: code for code, name in DTYPES.items()}


class ShardError(ValueError):
    """A folder of shards that cannot be written or read; the message names the file or tensor."""


def nbytes(tensor: HFTensor) -> int:
    """Bytes of a described tensor."""
    return math.prod(tensor.shape) * TORCH[tensor.dtype].itemsize


def write_file(path: Path, described: Iterable[HFTensor], data: Iterable[torch.Tensor]) -> None:
    """A file of safetensors with these tensors; `data` has them in the same order, one in memory at a time.

    It has its name once all bytes are on disk. Raises ShardError for data unlike what is described.
    """
    listed = list(described)
    half = path.with_name(f"{path.name}.tmp")
    with half.open("wb") as file:
        file.write(_header(listed))
        for tensor, values in zip(listed, data, strict=True):
            if (tuple(values.shape), values.dtype) != (tensor.shape, TORCH[tensor.dtype]):
                found = f"{list(values.shape)} {values.dtype}"
                raise ShardError(f"{path.name}: {tensor.name} is {found}, expected {[*tensor.shape]} {tensor.dtype}")
            file.write(bits_of(values).data)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    sync(path.parent)


def _header(tensors: Iterable[HFTensor]) -> bytes:
    described: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + nbytes(tensor)
        described[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, on disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


#: In a folder that is being written: what it is written from.
SOURCE = "source.json"


@contextmanager
def staged(target: Path, source: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to write to, which becomes `target` at the end.

    What an interrupted run has left there is kept, if it was of the same `source`: files with their own names are
    whole. Raises ShardError if `target` exists, or if what is left is of another source.
    """
    if os.path.lexists(target):
        raise ShardError(f"{target} exists; remove it, or write elsewhere")
    part = begin(target, source)
    yield part
    publish(part, target)


def part_of(target: Path) -> Path:
    """Where `target` is written until it is whole."""
    return target.with_name(f"{target.name}.part")


def begin(target: Path, source: Mapping[str, Any]) -> Path:
    """Make or find the folder in which `target` is written."""
    part = part_of(target)
    part.mkdir(parents=True, exist_ok=True)
    marker = part / SOURCE
    wanted = json.loads(json.dumps(source))
    try:
        left = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else None
    except ValueError:  # the run ended before its marker was whole, and so before any file
        left = None
    if left not in (None, wanted):
        raise ShardError(f"{part} was begun from another source or with other options; remove it")
    if left is None:
        if any(file != marker for file in part.iterdir()):
            raise ShardError(f"{part} has files, and does not say of which source; remove it")
        write_json(marker, source)
        sync(part)
    for half in part.glob("*.tmp"):
        half.unlink()
    return part


def publish(part: Path, target: Path) -> None:
    """Give a whole folder its name."""
    (part / SOURCE).unlink(missing_ok=True)
    sync(part)
    part.rename(target)
    sync(target.parent)
