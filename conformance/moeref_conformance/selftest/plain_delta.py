"""A second design of deltas, correct and small, which faults and benign targets change by a method.

A delta is one message: SHA-256 of the rest, then a file of safetensors with positions and bits of changed elements, or
all bits and no positions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load as opened
from safetensors.torch import save

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Change, Swapped, Tensors

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
#: Header, then positions by tensor, then values by tensor.
Parts = tuple[dict[str, Any], Tensors, Tensors]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as flat integers, which share memory with a contiguous tensor."""
    return tensor.reshape(-1).view(_BITS[tensor.dtype.itemsize])


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(bits(tensor).numpy().tobytes())
    return found.hexdigest()


class Sender:
    """Keeps a copy of the version that was acknowledged, and of those that were made since."""

    def __init__(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self.base = version, self.kept(weights)
        self.made: dict[int, Tensors] = {}

    def kept(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """What is kept of a version's tensors."""
        return {name: tensor.detach().clone() for name, tensor in weights.items()}

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        number, base = self.base
        self.check(base, weights)
        header = {"version": version, "base": number, "before": digest(base), "after": digest(weights)}
        positions, values = {}, {}
        for name in sorted(base.keys() & weights.keys()):
            where, elements = self.changed(base[name], weights[name]), base[name].numel()
            where = torch.arange(elements) if self.whole(where.numel(), elements) else where
            positions[name] = self.positions(where, elements)
            values[name] = self.values(bits(base[name])[where], bits(weights[name])[where])
        self.made[version] = self.kept(weights)
        return self.sealed((header, positions, values))

    def check(self, base: Tensors, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError for weights that are unlike their base."""
        kinds = [{name: (t.dtype, t.shape) for name, t in of.items()} for of in (base, weights)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"unlike the base: {sorted(dict(kinds[0].items() ^ kinds[1].items()))}")

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Positions of the elements that differ."""
        return (bits(old) != bits(new)).nonzero().reshape(-1)

    def whole(self, changed: int, elements: int) -> bool:
        """Whether a tensor is sent whole."""
        return 3 * changed > elements

    def positions(self, where: torch.Tensor, elements: int) -> torch.Tensor:
        """Positions as they are sent: none with a whole tensor."""
        return where[: 0 if where.numel() == elements else None].to(torch.int32)

    def values(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Changed elements as they are sent."""
        return new

    def sealed(self, parts: Parts) -> list[bytes]:
        """The messages of a delta."""
        header, positions, values = parts
        tensors = {f"{kind}:{n}": t for kind, of in (("p", positions), ("v", values)) for n, t in of.items()}
        body = save(tensors, {"delta": json.dumps(header)})
        return [hashlib.sha256(body).digest() + body]

    def acknowledge(self, receipt: int) -> None:
        if receipt != self.base[0]:
            self.base = receipt, self.made.pop(receipt)


class Receiver:
    """Writes into the tensors that it is given."""

    def __init__(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self.version, self.tensors = version, dict(weights)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def apply(self, messages: Sequence[bytes]) -> int:
        header, positions, values = self.unsealed(messages)
        if header["version"] == self.version:
            return self.version
        self.check(header)
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, where in positions.items():
            self.write(bits(self.tensors[name]), everywhere(where, values[name]), values[name])
        if not self.verified(header):
            for name, tensor in before.items():
                self.tensors[name].copy_(tensor)
            raise ValueError(f"version {header['version']} was written, and other bytes are held")
        self.version = header["version"]
        return self.version

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        """The parts of a delta. Raises ValueError for one that is damaged."""
        (message,) = messages
        if hashlib.sha256(message[32:]).digest() != message[:32]:
            raise ValueError("a delta that is damaged")
        return parts_of(message[32:])

    def check(self, header: Mapping[str, Any]) -> None:
        """Raise ValueError for a delta of another base."""
        if header["base"] != self.version:
            raise ValueError(f"a delta of version {header['base']}, held is {self.version}")

    def write(self, held: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
        """Write the changed elements of one tensor."""
        held[where] = values

    def verified(self, header: Mapping[str, Any]) -> bool:
        """Whether what is held now is the new version."""
        return bool(digest(self.tensors) == header["after"])


def everywhere(where: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Positions as they are written: all of them if none came with the values."""
    return where.long() if where.numel() else torch.arange(values.numel())


def parts_of(body: bytes) -> Parts:
    """Header, positions and values of a delta's file of safetensors."""
    length = int.from_bytes(body[:8], "little")
    header = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["delta"])
    tensors = opened(body)
    positions, values = ({n[2:]: t for n, t in tensors.items() if n[0] == kind} for kind in "pv")
    return header, positions, values


class Design:
    """The facet with these two ends."""

    def __init__(self, sender: type[Sender] = Sender, receiver: type[Receiver] = Receiver) -> None:
        self.sender, self.receiver = sender, receiver


def design(sender: type[Sender] = Sender, receiver: type[Receiver] = Receiver) -> Change:
    """A target's `wrap` with these two ends in place of its own."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        return Swapped(session, delta=Design(sender, receiver))

    return wrap
