"""Bitwise comparison of two tensors: NaN equals the same NaN, and -0.0 is not 0.0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Difference:
    """How `got` differs from `expected`. `kind` is shape, dtype or bytes; the rest is filled for bytes.

    `flat` and `index` are the first differing element; `count` of `total` elements differ.
    """

    kind: str
    expected: str
    got: str
    flat: int | None = None
    index: tuple[int, ...] | None = None
    count: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        """One sentence without the names."""
        if self.kind != "bytes":
            return f"{self.kind} is {self.got}, expected {self.expected}"
        return f"{self.count} of {self.total} elements differ, first at {list(self.index or ())}"

    @property
    def told(self) -> dict[str, Any]:
        """What a finding says of it."""
        return {"index": self.index, "expected": self.expected, "got": self.got}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, `[numel, itemsize]` uint8, in row-major order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, `[numel]`."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return raw(tensor).view(kinds[tensor.element_size()]).reshape(-1)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def value_text(tensor: torch.Tensor, flat: int) -> str:
    """An element as a number and as its bits: `0.15625 (0x3e200000)`."""
    octets = raw(tensor.detach().reshape(-1)[flat].reshape(1)).flatten().tolist()
    bits = "".join(f"{octet:02x}" for octet in reversed(octets))
    return f"{tensor.detach().reshape(-1)[flat].item()!r} (0x{bits})"


def compare(expected: torch.Tensor, got: torch.Tensor, rows: int | None = None) -> Difference | None:
    """The difference of two tensors, or None if shape, dtype and bytes agree.

    `rows` limits the comparison of bytes to the first rows; those after them are padding.
    """
    if expected.shape != got.shape:
        return Difference("shape", str(list(expected.shape)), str(list(got.shape)))
    if expected.dtype != got.dtype:
        return Difference("dtype", dtype_name(expected.dtype), dtype_name(got.dtype))
    if rows is not None:
        expected, got = expected[:rows], got[:rows]
    want_bytes, got_bytes = raw(expected), raw(got)
    if torch.equal(want_bytes, got_bytes):
        return None
    differs = (want_bytes != got_bytes).any(dim=1)
    count = int(differs.sum())
    flat = int(differs.to(torch.uint8).argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    return Difference("bytes", value_text(expected, flat), value_text(got, flat), flat, where, count, expected.numel())
