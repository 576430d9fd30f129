"""Routes of many samples in one safetensors file, readable without moeref.

Each sample has three tensors: `<name>.idx` [T, L, K], `<name>.kind` [T] and `<name>.version` [T], and `<name>.holes`
[T, L] if single layers of a row have no route. Its layers, experts and start are JSON in the file's metadata under
`moeref.routes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moeref.replay.payload import LIMIT
from moeref.replay.routes import PAD, RouteError, Routes, index_dtype

KEY = "moeref.routes"
_PARTS = ("idx", "kind", "version")
_FIELDS = {"layers", "experts", "start"}


def save(path: str | Path, samples: Mapping[str, Routes]) -> None:
    """Write routes by sample name. Raises RouteError for no samples, and for rows of a batch of them."""
    if not samples:
        raise RouteError(f"{path}: no routes to save")
    if joined := [name for name, one in samples.items() if one.batch != 1]:
        number = samples[joined[0]].batch
        raise RouteError(f"{path}: {joined[0]}: rows of {number} samples in turn; save each sample on its own")
    tensors: dict[str, npt.NDArray[Any]] = {}
    about = {}
    for name, one in samples.items():
        arrays = (one.idx_TLK, one.kind_T, one.versions_T)
        tensors |= {f"{name}.{part}": np.ascontiguousarray(a) for part, a in zip(_PARTS, arrays, strict=True)}
        if one.holes_TL is not None:
            tensors[f"{name}.holes"] = np.ascontiguousarray(one.holes_TL)
        about[name] = {"layers": list(one.layers), "experts": one.experts, "start": one.start}
    save_file(tensors, path, metadata={KEY: json.dumps(about)})


def load(path: str | Path, *, limit: int = LIMIT) -> dict[str, Routes]:
    """The routes that `save` wrote, in the same order.

    Raises RouteError, with the sample's name, for a file that is not safetensors, has no routes, is larger than `limit`
    bytes, lacks tensors or has others, and for wrong dtypes, shapes, experts or kinds.
    """
    size = Path(path).stat().st_size
    if size > limit:
        raise RouteError(f"{path}: {size} bytes, {limit} are allowed (limit=)")
    try:
        with safe_open(path, framework="np") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise RouteError(f"{path}: not a safetensors file: {error}") from None
    about = _about(path, metadata)
    expected = {f"{name}.{part}" for name in about for part in _PARTS} | {f"{n}.holes" for n in about} & names
    if names != expected:
        raise RouteError(f"{path}: tensors that are missing or not expected: {sorted(names ^ expected)[:4]}")
    return {
        name: _checked(
            f"{path}: {name}", fields, tensors.get(f"{name}.holes"), *(tensors[f"{name}.{part}"] for part in _PARTS)
        )
        for name, fields in about.items()
    }


def _about(path: str | Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Layers, experts and start by sample, from the file's metadata."""
    if KEY not in metadata:
        raise RouteError(f"{path}: the metadata has no {KEY}; these are not routes")
    try:
        about = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise RouteError(f"{path}: {KEY} is not JSON: {error}") from None
    if not isinstance(about, dict) or not all(
        isinstance(fields, dict) and fields.keys() == _FIELDS for fields in about.values()
    ):
        raise RouteError(f"{path}: {KEY} has to give {', '.join(sorted(_FIELDS))} of each sample")
    return about


def _checked(
    where: str, fields: Mapping[str, Any], holes_TL: npt.NDArray[Any] | None, *arrays: npt.NDArray[Any]
) -> Routes:
    """Routes of one sample. RouteError if its fields or arrays are not as `save` writes them."""
    layers, experts, start = fields["layers"], fields["experts"], fields["start"]
    numbers = [experts, start, *layers] if isinstance(layers, list) else [None]
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers) or layers != sorted(set(layers)):
        given = f"layers={layers!r:.60}, experts={experts!r:.20}, start={start!r:.20}"
        raise RouteError(f"{where}: {given}; all are whole numbers from 0, and layers ascend")
    dtypes = (index_dtype(experts), np.dtype(np.uint8), np.dtype(np.int32))
    for array, part, dtype in zip(arrays, _PARTS, dtypes, strict=True):
        if array.dtype != dtype:
            raise RouteError(f"{where}.{part} is {array.dtype}, expected {dtype}")
    idx_TLK, kind_T, versions_T = arrays
    if idx_TLK.ndim != 3 or idx_TLK.shape[1] != len(layers) or not 1 <= idx_TLK.shape[2] <= experts:
        raise RouteError(f"{where}.idx is {list(idx_TLK.shape)} for {len(layers)} layers and {experts} experts")
    if kind_T.shape != idx_TLK.shape[:1] or versions_T.shape != idx_TLK.shape[:1]:
        raise RouteError(f"{where}: {len(idx_TLK)} rows, {list(kind_T.shape)} kinds, {list(versions_T.shape)} versions")
    if idx_TLK.size and int(idx_TLK.max()) >= experts:
        raise RouteError(f"{where}.idx has expert {int(idx_TLK.max())} of {experts}")
    if kind_T.size and int(kind_T.max()) > PAD:
        raise RouteError(f"{where}.kind has {int(kind_T.max())}; there are 0 to {int(PAD)}")
    if holes_TL is not None and (holes_TL.dtype, holes_TL.shape) != (np.dtype(bool), idx_TLK.shape[:2]):
        raise RouteError(f"{where}.holes is {holes_TL.dtype} {list(holes_TL.shape)}, expected bool [T, L]")
    return Routes(idx_TLK, tuple(layers), experts, kind_T, versions_T, start, holes_TL=holes_TL)


__all__ = ["KEY", "load", "save"]
