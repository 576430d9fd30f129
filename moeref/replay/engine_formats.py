"""Reads routes in the formats that engines and frameworks send. moeref's own format is in `payload`.

| format | sent by |
|---|---|
| base64 of a `.npy` file | vLLM over HTTP |
| base64 of flat int32 | SGLang |
| `{"data": base64, "shape": …, "dtype": …}` | ms-swift |
| `nrlre1:<dtype>:<T>x<L>x<K>:<base64>` | NeMo-RL |
| nested lists | plain JSON |
| a numpy array or a torch tensor | vLLM in the same process |
| bytes of a `.npy` file or of moeref's payload | files |
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moeref.replay import payload
from moeref.replay.routes import RouteError, Routes, check_distinct, routes

_NEMO = re.compile(r"nrlre1:(\w+):(\d{1,15})x(\d{1,15})x(\d{1,15}):")
_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64")
_NPY = b"\x93NUMPY"


def from_engine(
    data: Any,
    *,
    moe_layers: Sequence[bool],
    experts: int,
    top_k: int,
    tokens: int | None = None,
    version: int = 0,
    start: int = 0,
    limit: int = payload.LIMIT,
) -> Routes:
    """The routes of one sample over the MoE layers, from `data` in any format of the table above.

    moe_layers: True for each MoE layer of the decoder, False for a dense one. Data with a row for every decoder layer
    must hold 0 or -1 in dense layers, as vLLM sends; data with fewer layers must have exactly the MoE layers.
    tokens: expected rows; flat data may need it to tell these two cases apart. A row of -1 in all layers is MISSING.
    version, start: for formats that carry none; moeref's payload has its own.

    Raises RouteError for None (the engine was not asked to return routes), for any other format, for more than `limit`
    bytes, and for everything `routes` refuses.
    """
    if isinstance(data, bytes | bytearray | memoryview) and bytes(data[: len(payload.MAGIC)]) == payload.MAGIC:
        sent = payload.read(data, limit=limit)
        _check_model(sent, moe_layers, experts, top_k)
        _check_rows(sent.tokens, tokens)
        check_distinct(sent.idx_TLK, sent.layers, sent.start)
        return sent
    idx_TLK, layers = _moe_only(_shaped(_array(data, limit), moe_layers, top_k, tokens), moe_layers)
    _check_rows(len(idx_TLK), tokens)
    return routes(idx_TLK, layers=layers, experts=experts, version=version, start=start)


def _check_rows(rows: int, tokens: int | None) -> None:
    if tokens is not None and rows != tokens:
        raise RouteError(f"{rows} rows of routes, expected {tokens}")


def _check_model(sent: Routes, moe_layers: Sequence[bool], experts: int, top_k: int) -> None:
    """Raise RouteError if a payload was written for another model."""
    numbers = tuple(i for i, moe in enumerate(moe_layers) if moe)
    if (sent.layers, sent.experts, sent.top_k) != (numbers, experts, top_k):
        raise RouteError(
            f"the payload has layers {list(sent.layers)}, {sent.experts} experts, top-{sent.top_k}; the model "
            f"has {list(numbers)}, {experts}, top-{top_k}"
        )


def _array(data: Any, limit: int) -> npt.NDArray[Any]:
    if data is None:
        raise RouteError("no routes came; was the engine started with enable_return_routed_experts?")
    if isinstance(data, str):
        return _text(data, limit)
    if isinstance(data, bytes | bytearray | memoryview):
        return _npy(bytes(data), limit)
    if isinstance(data, Mapping):
        return _described(data, limit)
    if hasattr(data, "detach"):  # a torch tensor, perhaps on a GPU and part of an autograd graph
        data = data.detach().cpu().numpy()
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, list | tuple):
        try:
            found = np.asarray(data)
        except ValueError as error:
            raise RouteError(f"nested lists of unequal length: {error}") from None
        return found if found.size else found.astype(np.int64)
    raise RouteError(
        f"routes came as {type(data).__name__}; see moeref.replay.engine_formats for the forms that are read"
    )


def _text(text: str, limit: int) -> npt.NDArray[Any]:
    if match := _NEMO.match(text):
        dtype, *shape = match.groups()
        return _raw(_base64(text[match.end() :], limit), dtype, [int(n) for n in shape])
    content = _base64(text, limit)
    if content.startswith(_NPY):
        return _npy(content, limit)
    if len(content) % 4:
        raise RouteError(f"{len(content)} bytes after base64 are neither a .npy file nor flat int32")
    return np.frombuffer(content, "<i4")


def _base64(text: str, limit: int) -> bytes:
    if len(text) > limit * 4 // 3 + 4:
        raise RouteError(f"{len(text)} characters of base64 are over the limit of {limit} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteError(f"routes are text, but not base64: {error}") from None


def _described(data: Mapping[str, Any], limit: int) -> npt.NDArray[Any]:
    if not {"data", "shape", "dtype"} <= data.keys() or not isinstance(data["data"], str):
        raise RouteError(f"a dictionary of routes has data, shape and dtype, this one {sorted(map(str, data))}")
    shape = data["shape"]
    if not isinstance(shape, list | tuple) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise RouteError(f"shape of the routes: {shape!r:.60}")
    return _raw(_base64(data["data"], limit), str(data["dtype"]), shape)


def _raw(content: bytes, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    name = dtype.removeprefix("torch.").removeprefix("<")
    if name not in _DTYPES:
        raise RouteError(f"routes of dtype {dtype!r:.40}; {', '.join(_DTYPES)} are read")
    kind = np.dtype(name).newbyteorder("<")
    if math.prod(shape) * kind.itemsize != len(content):
        raise RouteError(f"{len(content)} bytes of routes, but {list(shape)} of {name} are {math.prod(shape)} numbers")
    return _reshaped(np.frombuffer(content, kind), shape)


def _reshaped(flat: npt.NDArray[Any], shape: Sequence[int], order: Literal["C", "F"] = "C") -> npt.NDArray[Any]:
    """`flat` in `shape`. RouteError if numpy refuses: a shape with a 0 may hold numbers beyond its limits."""
    try:
        return flat.reshape(shape, order=order)
    except (ValueError, OverflowError) as error:
        raise RouteError(f"shape of the routes: {list(shape)!r:.60}: {error}") from None


def _npy(content: bytes, limit: int) -> npt.NDArray[Any]:
    if not content.startswith(_NPY):
        raise RouteError(f"{len(content)} bytes that are neither a .npy file nor moeref's payload: {content[:14]!r}")
    if len(content) > limit:
        raise RouteError(f"{len(content)} bytes of routes are over the limit of {limit}")
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except Exception as error:  # numpy parses the header as Python source, which can fail in many ways
        raise RouteError(f"not a readable .npy file: {error}") from None
    if dtype.kind not in "iu":
        raise RouteError(f"not a readable .npy file: routes of dtype {dtype}")
    rest = len(content) - stream.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise RouteError(f"not a readable .npy file: {list(shape)} of {dtype} declared, {rest} bytes there")
    return _reshaped(np.frombuffer(content, dtype, offset=stream.tell()), shape, "F" if fortran else "C")


def _shaped(array: npt.NDArray[Any], moe_layers: Sequence[bool], top_k: int, tokens: int | None) -> npt.NDArray[Any]:
    """`array` as [T, L, K]; it may be flat, or [T, L·K]."""
    if array.ndim == 3:
        if array.shape[2] != top_k:
            raise RouteError(f"routes {list(array.shape)} are of top-{array.shape[2]}, the model's is {top_k}")
        return array
    if array.ndim not in (1, 2):
        raise RouteError(f"routes of shape {list(array.shape)}; expected [tokens, layers, {top_k}]")
    depths = sorted({len(moe_layers), sum(moe_layers)})
    if array.ndim == 2:
        fits = [d for d in depths if array.shape[1] == d * top_k]
    elif tokens is None:
        fits = [d for d in depths if array.size % (d * top_k) == 0]
    else:
        fits = [d for d in depths if array.size == tokens * d * top_k]
    if len(fits) != 1:
        which = f"fit {' and '.join(map(str, fits))} layers; say tokens=" if fits else f"fit none of {depths} layers"
        raise RouteError(f"flat routes of shape {list(array.shape)} at top-{top_k} {which}")
    return array.reshape(-1, fits[0], top_k)


def _moe_only(array: npt.NDArray[Any], moe_layers: Sequence[bool]) -> tuple[npt.NDArray[Any], list[int]]:
    """The MoE layers of [T, L, K], and their numbers. RouteError if a dense layer has routes."""
    numbers = [i for i, moe in enumerate(moe_layers) if moe]
    if array.shape[1] == len(numbers):
        return array, numbers
    if array.shape[1] != len(moe_layers):
        raise RouteError(
            f"routes of {array.shape[1]} layers; the model has {len(moe_layers)} decoder layers, of which "
            f"{len(numbers)} are MoE"
        )
    dense = [i for i, moe in enumerate(moe_layers) if not moe]
    for layer in dense:
        if ((array[:, layer] != 0) & (array[:, layer] != -1)).any():
            raise RouteError(f"layer {layer} is dense but has routes; do the layers of the two models line up?")
    return array[:, numbers], numbers
