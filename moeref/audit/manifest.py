"""What is kept of each tensor: dtype, shape, a hash of all of its bytes, and statistics. Every element is read once."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from moeref.bridge.named import Named
from moeref.bridge.named import named as without_none
from moeref.torch_dtypes import bits_of, dtype_name

FORMAT = "moeref-manifest-1"
#: Elements that are hashed and measured at once, so that they are in the cache for both.
BLOCK = 1 << 17
#: Floating-point dtypes whose numbers are ordered as their bits, NaN last. In others 0x80 is NaN, or there is no sign.
_ORDERED = {torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}
#: Groups of tensors, by their names; the first that fits.
_GROUPS = (
    ("embedding", r"embed"),
    ("head", r"lm_head"),
    ("norm", r"norm"),
    ("expert", r"\.experts\."),
    ("shared expert", r"shared_expert"),
    ("router", r"(gate|router)(\.|$)|correction_bias"),
    ("attention", r"attn|attention"),
    ("MLP", r"(gate|up|down|gate_up)_proj"),
)


class AuditError(ValueError):
    """A model cannot be audited: there is no such folder, a file is no manifest, or a name comes twice."""


class Fingerprint(NamedTuple):
    """One tensor. least, greatest: of its finite elements and infinities; None for an empty tensor or NaN alone."""

    dtype: str
    shape: tuple[int, ...]
    hash: str  # XXH3 of its bytes, 128 bits, hexadecimal
    least: float | None
    greatest: float | None
    nans: int

    @property
    def zero(self) -> bool:
        """Whether all elements are 0."""
        return self.least == self.greatest == 0 and not self.nans

    @property
    def content(self) -> tuple[str, tuple[int, ...], str]:
        """Dtype, shape and hash, in which two tensors agree that are equal bit for bit."""
        return self[:3]


class Place(NamedTuple):
    """Where a tensor belongs, by its name; None: in no layer, no expert. `rest` is the name without numbers."""

    layer: int | None
    expert: int | None
    rest: str


@dataclass(frozen=True)
class Manifest:
    """The fingerprints of a model by Hugging Face name. It is small: `save` it and compare with it later."""

    tensors: Mapping[str, Fingerprint]

    @classmethod
    def of(cls, stream: Iterable[Named]) -> Manifest:
        """The manifest of a stream; tensors that are None are left out. AuditError for a name that comes twice."""
        return cls(dict(fingerprints(stream)))

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        plain = {
            name: [p.dtype, list(p.shape), p.hash, finite(p.least), finite(p.greatest), p.nans]
            for name, p in self.tensors.items()
        }
        text = json.dumps({"format": FORMAT, "tensors": plain}, indent=0)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """The manifest that `save` wrote. Raises AuditError for any other file."""
        try:
            plain = json.loads(Path(path).read_text(encoding="utf-8"))
            if plain["format"] != FORMAT:
                raise AuditError(f"{path}: of format {plain['format']!r:.40}, expected {FORMAT}")
            return cls({name: _read(*fields) for name, fields in plain["tensors"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, AuditError):
                raise
            raise AuditError(f"{path}: not a manifest that `moeref audit --save` wrote: {error}") from None


def _read(dtype: Any, shape: Any, digest: Any, least: Any, greatest: Any, nans: Any) -> Fingerprint:
    if not (isinstance(dtype, str) and isinstance(digest, str) and type(nans) is int):
        raise TypeError(f"a tensor of dtype {dtype!r:.40} and hash {digest!r:.40}")
    if not all(type(n) is int for n in shape):
        raise TypeError(f"a tensor of shape {shape!r:.40}")
    low, high = (None if end is None else float(end) for end in (least, greatest))
    return Fingerprint(dtype, tuple(shape), digest, low, high, nans)


def finite(value: float | None) -> float | str | None:
    """The value for JSON, which has no infinity: `inf` and `-inf` become text."""
    return value if value is None or math.isfinite(value) else str(value)


def fingerprints(stream: Iterable[Named]) -> Iterator[tuple[str, Fingerprint]]:
    """(name, fingerprint) of each tensor of a stream. Raises AuditError for a name that comes twice."""
    for name, tensor in named(stream):
        try:
            yield name, fingerprint(tensor)
        except TypeError as error:
            raise AuditError(f"{name}: {error}") from None


def named(stream: Iterable[Named]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) without those that are None. Raises AuditError for a name that comes twice."""
    seen: set[str] = set()
    for name, tensor in without_none(stream):
        if name in seen:
            raise AuditError(f"{name} comes twice in the stream")
        seen.add(name)
        yield name, tensor


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Hash and statistics of one tensor. Raises TypeError if its elements cannot be compared."""
    bits, digest = bits_of(tensor), xxhash.xxh3_128()
    extremes: set[int] = set()
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        digest.update(block)
        if tensor.dtype in _ORDERED:
            extremes |= _float_extremes(block)
    values = [_value(tensor.dtype, one) for one in extremes]
    if tensor.dtype in _ORDERED and not any(map(math.isnan, values)):
        statistics = min(values, default=None), max(values, default=None), 0
    else:
        statistics = _statistics(tensor)
    return Fingerprint(dtype_name(tensor.dtype), tuple(tensor.shape), digest.hexdigest(), *statistics)


def _float_extremes(block: npt.NDArray[Any]) -> set[int]:
    """Bits of the greatest and the least element, and, if NaN is among them, of a NaN.

    Bits of positive numbers ascend with them, and those of NaN come last; of negative ones the magnitude does.
    """
    unsigned = block.view(f"u{block.itemsize}")
    high, low = int(block.max()), int(unsigned.max())
    # All of one sign: the smallest magnitude is the other extreme.
    return {high if high >= 0 else int(unsigned.min()), low if low >> (8 * block.itemsize - 1) else int(block.min())}


@functools.lru_cache(maxsize=1 << 16)
def _value(dtype: torch.dtype, bits: int) -> float:
    """The number of these bits."""
    raw = np.array([bits & (1 << 8 * dtype.itemsize) - 1], f"u{dtype.itemsize}").view(f"i{dtype.itemsize}")
    return float(torch.from_numpy(raw).view(dtype).to(torch.float64))


def _statistics(tensor: torch.Tensor) -> tuple[float | None, float | None, int]:
    """The least and the greatest element, and how many are NaN, from the numbers themselves."""
    exact = torch.float64 if tensor.dtype.itemsize == 8 else torch.float32
    values = tensor.detach().cpu().to(exact if tensor.dtype.is_floating_point else torch.int64)
    usual = values[~values.isnan()]
    if not usual.numel():
        return None, None, values.numel()
    return float(usual.min()), float(usual.max()), values.numel() - usual.numel()


def place(name: str) -> Place:
    """Layer and expert of a tensor, and its name without their numbers."""
    layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    rest = re.sub(r"\.experts\.\d+\.", ".experts.*.", re.sub(r"\.(layers|h|blocks)\.\d+\.", r".\1.*.", name, count=1))
    return Place(int(layer[1]) if layer else None, int(expert[1]) if expert else None, rest)


def group(name: str) -> str:
    """The kind of tensor: `embedding`, `head`, `norm`, `expert`, `shared expert`, `router`, `attention`, `MLP`."""
    return next((kind for kind, pattern in _GROUPS if re.search(pattern, name)), "other")
