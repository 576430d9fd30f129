"""Reads routes in the formats that engines and frameworks send. moeref's own format is in `payload`.

| format | sent by |
|---|---|
| base64 of a `.npy` file | vLLM over HTTP |
| base64 of flat int32 | SGLang |
| `{"data": base64 or bytes, "shape": …}`, with or without `"dtype"` and `"start"` | ms-swift, prime-rl |
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
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from moeref.replay import payload
from moeref.replay.routes import RouteError, Routes, routes

_NEMO = re.compile(r"nrlre1:(\w+):(\d{1,15})x(\d{1,15})x(\d{1,15}):")
_DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "u1", "u2", "i4")
#: Dtypes by the bytes of a number, for data that names no dtype.
_UNNAMED = {1: "u1", 2: "<u2", 4: "<i4"}
_NPY = b"\x93NUMPY"


class _Model(Protocol):
    """What `Spec.of` reads of a `moeref.families` model."""

    @property
    def moe_layers(self) -> tuple[bool, ...]: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


@dataclass(frozen=True)
class Spec:
    """What has to be known of a model to read its routes: which decoder layers are MoE, its experts and its top-k."""

    moe_layers: tuple[bool, ...]
    experts: int
    top_k: int

    @classmethod
    def of(cls, model: _Model) -> Spec:
        """The spec of a `moeref.families` model."""
        return cls(tuple(model.moe_layers), model.experts, model.top_k)

    @property
    def layers(self) -> tuple[int, ...]:
        """The global numbers of the MoE layers."""
        return tuple(i for i, moe in enumerate(self.moe_layers) if moe)


def from_engine(
    data: Any,
    spec: Spec,
    *,
    tokens: int | None = None,
    version: int = 0,
    start: int | None = None,
    asked: int = 0,
    zeros: bool = False,
    limit: int = payload.LIMIT,
) -> Routes:
    """The routes of one sample over the MoE layers, from `data` in any format of the table above.

    Data with a row for every decoder layer must hold 0 or -1 in dense layers, as vLLM sends; data with fewer layers
    must have exactly the MoE layers. -1 is a hole, and in all layers of a row makes it MISSING.
    tokens: expected rows; flat data may need it to tell these two cases apart, and its type.
    version: of the weights, for formats that carry none; moeref's payload has its own.
    start: position of the first row; by default that in the data, else `asked`, the prompt start of the request.
    zeros: take a route of zeros for a hole instead of refusing it, as `routes` does. `Trace` bounds the holes.

    Raises RouteError for None and empty data (the engine was not asked to return routes, or made no token), for another
    start than the data's, for any other format, for more than `limit` bytes, and for everything `routes` refuses.
    """
    if _is_payload(data):
        sent = payload.read(data, limit=limit)
        _check_model(sent, spec)
        _check_rows(sent.tokens, tokens)
        _start(sent.start, start)
        return replace(sent, depth=len(spec.moe_layers))
    if isinstance(data, Mapping):
        start = _start(_start_of(data), start)
    idx_TLK, layers = _moe_only(_shaped(_array(data, limit, spec, tokens), spec, tokens), spec)
    _check_rows(len(idx_TLK), tokens)
    start = asked if start is None else start
    checked = routes(idx_TLK, layers=layers, experts=spec.experts, version=version, start=start, zeros=zeros)
    return replace(checked, depth=len(spec.moe_layers))


def says_start(data: Any) -> bool:
    """Whether the data says at which token its first row is."""
    return _is_payload(data) or (isinstance(data, Mapping) and _start_of(data) is not None)


def _is_payload(data: Any) -> bool:
    is_bytes = isinstance(data, bytes | bytearray | memoryview)
    return is_bytes and bytes(data[: len(payload.MAGIC)]) == payload.MAGIC


def _start(sent: int | None, expected: int | None) -> int | None:
    if sent is not None and expected is not None and sent != expected:
        raise RouteError(f"rows begin at token {sent} by the data, at {expected} by start=")
    return expected if sent is None else sent


def _check_rows(rows: int, tokens: int | None) -> None:
    if tokens is not None and rows != tokens:
        raise RouteError(f"{rows} rows of routes, expected {tokens}")


def _check_model(sent: Routes, spec: Spec) -> None:
    """Raise RouteError if a payload was written for another model."""
    if (sent.layers, sent.experts, sent.top_k) != (spec.layers, spec.experts, spec.top_k):
        raise RouteError(
            f"the payload has layers {list(sent.layers)}, {sent.experts} experts, top-{sent.top_k}; the model "
            f"has {list(spec.layers)}, {spec.experts}, top-{spec.top_k}"
        )


def _array(data: Any, limit: int, spec: Spec, tokens: int | None) -> npt.NDArray[Any]:
    if data is None:
        raise RouteError("no routes came; was the engine started with enable_return_routed_experts?")
    if isinstance(data, str | bytes | list | tuple) and not len(data):
        raise RouteError(f"empty routes ({data!r}); leave out a turn that made no token")
    if isinstance(data, str):
        return _text(data, limit, spec, tokens)
    if isinstance(data, bytes | bytearray | memoryview):
        return _npy(bytes(data), limit)
    if isinstance(data, Mapping):
        return _described(data, limit)
    if hasattr(data, "detach"):
        return _tensor(data)
    if isinstance(data, np.ndarray):
        return data
    if isinstance(data, list | tuple):
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise RouteError(f"nested lists of unequal length: {error}") from None
        return array if array.size else array.astype(np.int64)
    raise RouteError(
        f"routes came as {type(data).__name__}; see moeref.replay.engine_formats for the forms that are read"
    )


def _tensor(data: Any) -> npt.NDArray[Any]:
    """A torch tensor, perhaps on a GPU and part of an autograd graph."""
    if data.is_nested:
        raise RouteError("a nested tensor holds several samples; read each of its unbind()")
    if data.is_floating_point() or data.is_complex():
        raise RouteError(f"routes are integers, not {data.dtype}")
    array: npt.NDArray[Any] = data.detach().cpu().numpy()
    return array


def _text(text: str, limit: int, spec: Spec, tokens: int | None) -> npt.NDArray[Any]:
    if match := _NEMO.match(text):
        dtype, *shape = match.groups()
        return _raw(_base64(text[match.end() :], limit), dtype, [int(n) for n in shape])
    content = _base64(text, limit)
    if content.startswith(_NPY):
        return _npy(content, limit)
    return _flat(content, spec, tokens)


def _flat(content: bytes, spec: Spec, tokens: int | None) -> npt.NDArray[Any]:
    """Numbers whose dtype nothing names: the one with which `tokens` rows fit, else int32, as SGLang sends."""
    rows = (tokens or 0) * spec.top_k
    fits = {size for size in _UNNAMED if any(rows * depth * size == len(content) for depth in _depths(spec))}
    if len(fits) > 1:
        raise RouteError(f"{len(content)} bytes of flat routes fit numbers of {sorted(fits)} bytes; name their type")
    size = fits.pop() if fits else 4
    if len(content) % size:
        raise RouteError(f"{len(content)} bytes after base64 are neither a .npy file nor flat int32")
    numbers = np.frombuffer(content, _UNNAMED[size])
    if numbers.size and int(numbers.max()) >= spec.experts:
        raise RouteError(
            f"flat routes read as {_UNNAMED[size]} hold expert {int(numbers.max())} of {spec.experts}; say tokens= for "
            f"another type, or send one that names it"
        )
    return numbers


def _base64(text: str, limit: int) -> bytes:
    if len(text) > limit * 4 // 3 + 4:
        raise RouteError(f"{len(text)} characters of base64 are over the limit of {limit} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RouteError(f"routes are text, but not base64: {error}") from None


def _described(data: Mapping[str, Any], limit: int) -> npt.NDArray[Any]:
    if not {"data", "shape"} <= data.keys() <= {"data", "shape", "dtype", "start"}:
        raise RouteError(
            f"a dictionary of routes has data, shape and dtype, and may have start; this one {sorted(map(str, data))}"
        )
    shape, content = data["shape"], data["data"]
    if not isinstance(shape, list | tuple) or not all(map(_is_count, shape)):
        raise RouteError(f"shape of the routes: {shape!r:.60}; it is a list of whole numbers from 0")
    if not isinstance(content, str | bytes | bytearray):
        raise RouteError(f"data of the routes is base64 or bytes, not {type(content).__name__}")
    raw = _base64(content, limit) if isinstance(content, str) else _within(bytes(content), limit)
    return _raw(raw, str(data["dtype"]) if "dtype" in data else _type_of(len(raw), shape), shape)


def _type_of(size: int, shape: Sequence[int]) -> str:
    """The dtype of `size` bytes in `shape`, if nothing names it: uint8, uint16 or int32."""
    numbers = math.prod(shape)
    each = size // numbers if numbers else 1
    if each not in _UNNAMED or each * numbers != size:
        raise RouteError(f"{size} bytes of routes without dtype, but {list(shape)} are {numbers} numbers")
    return _UNNAMED[each].removeprefix("<")


def _start_of(data: Mapping[str, Any]) -> int | None:
    start = data.get("start")
    if start is not None and not _is_count(start):
        raise RouteError(f"start of the routes: {start!r:.60}; it is a whole number from 0")
    return start


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _within(content: bytes, limit: int) -> bytes:
    if len(content) > limit:
        raise RouteError(f"{len(content)} bytes of routes are over the limit of {limit}")
    return content


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
    stream = io.BytesIO(_within(content, limit))
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


def _depths(spec: Spec) -> list[int]:
    return sorted({len(spec.moe_layers), sum(spec.moe_layers)})


def _shaped(array: npt.NDArray[Any], spec: Spec, tokens: int | None) -> npt.NDArray[Any]:
    """`array` as [T, L, K]; it may be flat, or [T, L·K]."""
    top_k = spec.top_k
    if array.ndim == 3:
        if array.shape[2] != top_k:
            raise RouteError(f"routes {list(array.shape)} are of top-{array.shape[2]}, the model's is {top_k}")
        return array
    if array.ndim not in (1, 2):
        raise RouteError(f"routes of shape {list(array.shape)}; expected [tokens, layers, {top_k}]")
    depths = _depths(spec)
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


def _moe_only(array: npt.NDArray[Any], spec: Spec) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """The MoE layers of [T, L, K], and their numbers. RouteError if a dense layer has routes."""
    numbers, moe_layers = spec.layers, spec.moe_layers
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
    return array[:, list(numbers)], numbers
