"""Routes of many samples in one safetensors file, which any framework reads without moeref.

Each sample has three tensors: `<name>.idx` [T, L, K], `<name>.kind` [T] and `<name>.version` [T]. What no tensor can
say (layers, experts, start) is JSON in the file's metadata under `moeref.routes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moeref.replay.payload import LIMIT
from moeref.replay.routes import PAD, RouteError, Routes, index_dtype

KEY = "moeref.routes"
_PARTS = ("idx", "kind", "version")
_FIELDS = {"layers", "experts", "start"}


def save(path: str | Path, samples: Mapping[str, Routes]) -> None:
    """Write routes by name. Raises RouteError for no samples, whose file could not be told from another."""
    if not samples:
        raise RouteError(f"{path}: no routes to save")
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    about = {}
    for name, one in samples.items():
        arrays = (one.idx_TLK, one.kind_T, one.versions_T)
        tensors |= {f"{name}.{part}": np.ascontiguousarray(a) for part, a in zip(_PARTS, arrays, strict=True)}
        about[name] = {"layers": list(one.layers), "experts": one.experts, "start": one.start}
    save_file(tensors, path, metadata={KEY: json.dumps(about)})


def load(path: str | Path, *, limit: int = LIMIT) -> dict[str, Routes]:
    """The routes that `save` wrote, in the order in which they were given.

    Raises RouteError, naming the sample, for a file that is not of safetensors or not of routes, of more than `limit`
    bytes, that lacks tensors or has others, for other dtypes or shapes, and for an expert or a kind that there is not.
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
    wanted = {f"{name}.{part}" for name in about for part in _PARTS}
    if names != wanted:
        raise RouteError(f"{path}: tensors that should not differ: {sorted(names ^ wanted)[:4]}")
    return {name: _routes(f"{path}: {name}", told, tensors, name) for name, told in about.items()}


def _about(path: str | Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    if KEY not in metadata:
        raise RouteError(f"{path}: the metadata has no {KEY}; these are not routes")
    try:
        about = json.loads(metadata[KEY])
    except (ValueError, RecursionError) as error:
        raise RouteError(f"{path}: {KEY} is not JSON: {error}") from None
    if not isinstance(about, dict) or not all(isinstance(t, dict) and t.keys() == _FIELDS for t in about.values()):
        raise RouteError(f"{path}: {KEY} has to give {', '.join(sorted(_FIELDS))} of each sample")
    return about


def _routes(where: str, told: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]], name: str) -> Routes:
    layers, experts, start = told["layers"], told["experts"], told["start"]
    numbers = [experts, start, *layers] if isinstance(layers, list) else [None]
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers) or layers != sorted(set(layers)):
        raise RouteError(f"{where}: layers={layers!r:.60}, experts={experts!r:.20}, start={start!r:.20}")
    idx_TLK, kind_T, versions_T = (tensors[f"{name}.{part}"] for part in _PARTS)
    dtypes = (index_dtype(experts), np.dtype(np.uint8), np.dtype(np.int32))
    for array, part, dtype in zip((idx_TLK, kind_T, versions_T), _PARTS, dtypes, strict=True):
        if array.dtype != dtype:
            raise RouteError(f"{where}.{part} is {array.dtype}, expected {dtype}")
    if idx_TLK.ndim != 3 or idx_TLK.shape[1] != len(layers) or not 1 <= idx_TLK.shape[2] <= experts:
        raise RouteError(f"{where}.idx is {list(idx_TLK.shape)} for {len(layers)} layers and {experts} experts")
    if kind_T.shape != idx_TLK.shape[:1] or versions_T.shape != idx_TLK.shape[:1]:
        raise RouteError(f"{where}: {len(idx_TLK)} rows, {list(kind_T.shape)} kinds, {list(versions_T.shape)} versions")
    if idx_TLK.size and int(idx_TLK.max()) >= experts:
        raise RouteError(f"{where}.idx has expert {int(idx_TLK.max())} of {experts}")
    if kind_T.size and int(kind_T.max()) > PAD:
        raise RouteError(f"{where}.kind has {int(kind_T.max())}; there are 0 to {int(PAD)}")
    return Routes(idx_TLK, tuple(layers), experts, kind_T, versions_T, start)


__all__ = ["KEY", "load", "save"]
