"""Bugs of deltas: what counts as changed, where it is written, of which base it is, and what is checked when."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moeref_conformance.contract.requests.delta import TENSORS
from moeref_conformance.selftest.border import Tensors
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.plain_delta import Parts, Receiver, Sender, bits, design, digest, everywhere, parts_of

#: Of a sender's tensors.
ORDER = tuple(TENSORS)
_CELL = cell("qwen3_moe", "one", backend="static")


class _Unverified(Receiver):
    """Does not look at what it has written."""

    def verified(self, header: Mapping[str, Any]) -> bool:
        return True


class _ComparesValues(Sender):
    """Finds changes with the comparison of floats, for which zeros of both signs are equal."""

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return (old != new).reshape(-1).nonzero().reshape(-1)


class _Absorbed(_Unverified):
    """Takes NaN for the mark of an element that did not change."""

    def write(self, held: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
        kind = torch.bfloat16 if held.dtype == torch.int16 else torch.float32
        numbers = ~values.view(kind).isnan()
        held[where[numbers]] = values[numbers]


class _In16Bits(Sender):
    """Positions in 16 bits."""

    def positions(self, where: torch.Tensor, elements: int) -> torch.Tensor:
        return super().positions(where, elements) % 65_536


class _InPieces(Sender):
    """Compares a tensor in pieces of half a MiB, and counts positions from the beginning of each."""

    def positions(self, where: torch.Tensor, elements: int) -> torch.Tensor:
        return super().positions(where, elements) % 262_144


class _Gaps(Sender):
    """Sends how far each position is from the one before, in 16 bits."""

    def positions(self, where: torch.Tensor, elements: int) -> torch.Tensor:
        gaps = super().positions(where, elements).diff(prepend=torch.zeros(1, dtype=torch.int32))
        return (gaps % 65_536).cumsum(0) if where.numel() < elements else gaps[:0]


class _InOrder(Receiver):
    """Takes the tensors of a delta in the order of its own, whatever their names are."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        header, positions, values = super().unsealed(messages)
        own = dict(zip(ORDER, self.tensors, strict=True))
        placed, given = ({own[name]: tensor for name, tensor in of.items()} for of in (positions, values))
        return header, placed, given


class _ExpertsCounted(Receiver):
    """Takes the tensors of a delta in the order of its own, where expert 2 comes before expert 11."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        header, positions, values = super().unsealed(messages)
        counted = sorted(self.tensors, key=lambda name: [part.rjust(3) for part in name.split(".")])
        own = dict(zip(sorted(values), counted, strict=True))
        placed, given = ({own[name]: tensor for name, tensor in of.items()} for of in (positions, values))
        return header, placed, given


class _PairsByPlace(Sender):
    """Keeps a flat list of tensors, and takes the next version's as they come."""

    def __init__(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(version, weights)
        self.names = list(weights)

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        alike = weights.keys() == set(self.names)
        return super().delta(version, dict(zip(self.names, weights.values(), strict=True)) if alike else weights)


class _OffByOneEnd(Sender):
    """Leaves the last element of a tensor out."""

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        found = super().changed(old, new)
        return found[found < old.numel() - 1] if old.numel() > 1 else found


class _Fp8InPairs(Sender):
    """Compares FP8 as words of bf16's width, and leaves out an element that is over."""

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        found = super().changed(old, new)
        return found[found < old.numel() // 2 * 2] if old.dtype.itemsize == 1 else found


class _IntegersAsFloats(Sender):
    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if old.dtype.is_floating_point:
            return super().changed(old, new)
        return (old.float() != new.float()).nonzero().reshape(-1)


class _Fp8AsNumbers(Sender):
    """Compares FP8, for which torch has no comparison, as fp32."""

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if old.dtype.itemsize > 1:
            return super().changed(old, new)
        return (old.float() != new.float()).reshape(-1).nonzero().reshape(-1)


class _Capped(Sender):
    """Sends at most a tenth of a tensor, and nothing says that the rest is missing."""

    def changed(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return super().changed(old, new)[: max(1, -(-old.numel() // 10))]


class _KeepsReferences(Sender):
    """Keeps the trainer's tensors, which an optimiser changes in place, as the base."""

    def kept(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        return dict(weights)


class _InPlace(Sender):
    """Takes the difference in the trainer's own memory."""

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        messages = super().delta(version, weights)
        for name, old in self.base[1].items():
            if weights[name].is_contiguous():
                bits(weights[name]).bitwise_xor_(bits(old))
        return messages


class _Rounds(Sender):
    """Sends values that went through fp16."""

    def values(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        kind = torch.bfloat16 if new.dtype == torch.int16 else torch.float32
        return new.view(kind).half().to(kind).view(new.dtype)


class _AnyBase(_Unverified):
    """Applies a delta to whatever it holds."""

    def check(self, header: Mapping[str, Any]) -> None:
        pass


class Differences(Sender):
    """Sends the exclusive or of old and new bits."""

    def values(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return old ^ new


class _AppliesDifferences(_Unverified):
    """Applies the exclusive or whenever it comes."""

    def apply(self, messages: Sequence[bytes]) -> int:
        header, positions, values = self.unsealed(messages)
        if header["version"] != self.version:
            self.check(header)
        for name, where in positions.items():
            self.write(bits(self.tensors[name]), everywhere(where, values[name]), values[name])
        self.version = header["version"]
        return self.version

    def write(self, held: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
        held[where] ^= values


class _OfTheLastMade(Sender):
    """Makes each delta of the one made before, which may not have arrived."""

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        messages = super().delta(version, weights)
        self.base = version, self.made[version]
        return messages

    def acknowledge(self, receipt: int) -> None:
        pass


class _Trusting(_Unverified):
    """Reads what it is given, without a checksum."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        return parts_of(messages[0][32:])


class _OfTheFirstKilobyte(_Unverified):
    """Compares a checksum of the beginning of a message."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        (message,) = messages
        body = message[64:]
        if hashlib.sha256(body[:1024]).digest() != message[32:64]:
            raise ValueError("a delta that is damaged")
        return parts_of(body)


class _SealsTheFirstKilobyte(Sender):
    """Adds a checksum of the beginning of a message."""

    def sealed(self, parts: Parts) -> list[bytes]:
        (message,) = super().sealed(parts)
        return [message[:32] + hashlib.sha256(message[32 : 32 + 1024]).digest() + message[32:]]


class _CountsFirst(Receiver):
    """Is of the new version before it has looked whether the delta is whole."""

    def apply(self, messages: Sequence[bytes]) -> int:
        try:
            return super().apply(messages)
        except ValueError:
            self.version += 1
            raise


class _WritesFirst(Receiver):
    """Writes what it can read, then compares the checksum."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        (message,) = messages
        if hashlib.sha256(message[32:]).digest() != message[:32]:
            for tensor in self.tensors.values():
                bits(tensor)[:1] ^= 1
            raise ValueError("a delta that is damaged")
        return super().unsealed(messages)

    def verified(self, header: Mapping[str, Any]) -> bool:
        return True


class _InCommon(Sender):
    """Sends the tensors that both versions have, cut to the shorter, and says nothing of others."""

    def check(self, base: Tensors, weights: Mapping[str, torch.Tensor]) -> None:
        pass


class _NeverWhole(Sender):
    """Sends a position with every value, however many there are."""

    def whole(self, changed: int, elements: int) -> bool:
        return False

    def positions(self, where: torch.Tensor, elements: int) -> torch.Tensor:
        return where.to(torch.int32)


class _OneStagingBuffer(Sender):
    """Puts every delta into the same memory, which a receiver reads when it gets to it."""

    buffer = bytearray()

    def sealed(self, parts: Parts) -> list[Any]:
        (message,) = super().sealed(parts)
        self.buffer = self.buffer or bytearray(2**21)
        self.buffer[: len(message)] = message
        return [memoryview(self.buffer)[: len(message)]]


class _ReadsTheBuffer(Receiver):
    """Takes the bytes out of a sender's memory as they are now."""

    def unsealed(self, messages: Sequence[bytes]) -> Parts:
        return super().unsealed([bytes(message) for message in messages])


class _NothingToSend(Sender):
    """Sends no message where nothing changed, and counts an answer to it."""

    last = 0

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        messages, self.last = super().delta(version, weights), version
        return [] if digest(self.base[1]) == digest(weights) else messages

    def acknowledge(self, receipt: int | None) -> None:
        super().acknowledge(self.last if receipt is None else receipt)


class _NothingToDo(Receiver):
    """Answers an empty list of messages, and stays at its version."""

    def apply(self, messages: Sequence[bytes]) -> Any:
        return super().apply(messages) if messages else None


class _AnyReceipt(Sender):
    """Takes the receipt that came last for the newest."""

    def acknowledge(self, receipt: int) -> None:
        self.made.setdefault(*self.base)
        self.base = receipt, self.made[receipt]


class _ChangedExperts(Sender):
    """Stacks the experts that changed, which a receiver takes for the first ones of the layer."""

    def sealed(self, parts: Parts) -> list[bytes]:
        header, positions, values = parts
        experts = [name for name in sorted(values) if ".experts." in name and name.endswith(".weight")]
        sent = [name for name in experts if values[name].numel()]
        placed = {name: name for name in values.keys() - experts} | dict(zip(sent, experts, strict=False))
        where, sent_values = ({placed[name]: of[name] for name in placed} for of in (positions, values))
        return super().sealed((header, where, sent_values))


class _InParts(Differences):
    """Sends a message of each tensor, in the order of their names."""

    def sealed(self, parts: Parts) -> list[bytes]:
        header, positions, values = parts
        told = {**header, "names": sorted(values)}
        seal = super().sealed
        return [
            seal(({**told, "part": name}, {name: positions[name]}, {name: values[name]}))[0] for name in told["names"]
        ]


class _TakesParts(_Unverified):
    """Looks whether it holds the base, and whether every part is there; then takes the exclusive or of each message."""

    def apply(self, messages: Sequence[bytes]) -> int:
        parts = [self.unsealed([message]) for message in messages]
        header = parts[0][0]
        if {of["version"] for of, _, _ in parts} != {header["version"]} or not self.complete(parts):
            raise ValueError("parts of a delta are missing, or of another one")
        if header["version"] == self.version:
            return self.version
        self.check(header)
        for name, (_, positions, values) in zip(self.names(parts), parts, strict=True):
            (where,), (turned,) = positions.values(), values.values()
            bits(self.tensors[name])[everywhere(where, turned)] ^= turned
        self.version = header["version"]
        return self.version

    def check(self, header: Mapping[str, Any]) -> None:
        super().check(header)
        if digest(self.tensors) != header["before"]:
            raise ValueError("other weights than those of the base are held")

    def complete(self, parts: Sequence[Parts]) -> bool:
        """Whether every part is there."""
        return {of["part"] for of, _, _ in parts} == set(parts[0][0]["names"])

    def names(self, parts: Sequence[Parts]) -> list[str]:
        """The tensors of the parts."""
        return [of["part"] for of, _, _ in parts]


class _TakesPartsByPlace(_TakesParts):
    """Takes the first message for that of the first name, if it has as many bytes."""

    def complete(self, parts: Sequence[Parts]) -> bool:
        return super().complete(parts) and [_kind(self.tensors[of["part"]]) for of, _, _ in parts] == [
            _kind(self.tensors[name]) for name in parts[0][0]["names"]
        ]

    def names(self, parts: Sequence[Parts]) -> list[str]:
        return list(parts[0][0]["names"])


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


class _ReadsARun(Sender):
    """Reads as many elements as a tensor has from where it begins, whatever its strides."""

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        return super().delta(version, self.kept(weights))

    def kept(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        return {name: _run(tensor).clone() for name, tensor in weights.items()}


def _run(tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape, device="meta").stride())


FAULTS = (
    Fault(
        id="delta-compares-values",
        bug="an exporter that compares floats: a zero that changed its sign is not sent",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_ComparesValues, _Unverified),
        says="special values turned changed",
    ),
    Fault(
        id="delta-nan-as-a-mark",
        bug="slime#2209: NaN marks what did not change, and a weight that became NaN, or was one, stays",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(receiver=_Absorbed),
        says="special values changed",
    ),
    Fault(
        id="delta-positions-in-16-bits",
        bug="a tensor of more than 65,536 elements whose positions wrap",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_In16Bits, _Unverified),
        says="model.embed_tokens.weight",
    ),
    Fault(
        id="delta-positions-in-pieces",
        bug="reported nowhere: a tensor is compared in pieces of 2^18 elements, and positions are those in a piece",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_InPieces, _Unverified),
        says="model.embed_tokens.weight",
    ),
    Fault(
        id="delta-gaps-in-16-bits",
        bug="reported nowhere: positions as gaps in 16 bits, and two changes that are farther apart",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_Gaps),
        says="the last element changed: apply version 13, made of 12: refused",
    ),
    Fault(
        id="delta-tensors-by-order",
        bug="W4 in a delta: both ends list their tensors, each in its own order, and the lists are taken together",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(receiver=_InOrder),
        says="refused",
    ),
    Fault(
        id="delta-experts-in-two-orders",
        bug="names sorted as text at one end and by number at the other: experts 11 and 2 are exchanged",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(receiver=_ExpertsCounted),
        says="refused",
    ),
    Fault(
        id="delta-of-tensors-as-they-come",
        bug="W4 in a delta: the trainer pairs tensors of two versions by place, and an export has another order",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_PairsByPlace),
        says="make version 2: refused",
    ),
    Fault(
        id="delta-without-the-last-element",
        bug="a mask that is one element short",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_OffByOneEnd, _Unverified),
        says="first, last and 2^16 changed",
    ),
    Fault(
        id="delta-cut-at-a-cap",
        bug="astraflow's cap on density, where nothing falls back to full tensors",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_Capped, _Unverified),
        says="half changed",
    ),
    Fault(
        id="delta-base-by-reference",
        bug="torchtitan#3867 in a delta: the base is the live weights, so that nothing ever differs",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_KeepsReferences, _Unverified),
        says="those of version 0",
    ),
    Fault(
        id="delta-taken-in-place",
        bug="W15 at the trainer's end: the exclusive or is taken in place to save memory, and training goes on with it",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_InPlace),
        says="of the trainer's weights",
    ),
    Fault(
        id="delta-values-rounded",
        bug="values that pass through another float on their way",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_Rounds, _Unverified),
        says="1 % changed",
    ),
    Fault(
        id="delta-of-any-base",
        bug="W9: a request without its base, and a delta that is applied to whatever is held",
        rules=("DLT-002",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(receiver=_AnyBase),
        says="a receiver that is ahead",
    ),
    Fault(
        id="delta-of-differences",
        bug="W15: the exclusive or of two versions, applied twice, goes back",
        rules=("DLT-003",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(Differences, _AppliesDifferences),
        says="applied twice",
    ),
    Fault(
        id="delta-of-the-last-made",
        bug="a sender whose base is the last delta that it made, whatever became of it",
        rules=("DLT-004",),
        also=("DLT-002",),
        cell=_CELL,
        wrap=design(_OfTheLastMade),
        says="a delta that is lost",
    ),
    Fault(
        id="delta-without-checksum",
        bug="a transport that is trusted: a byte that flipped is a weight",
        rules=("DLT-005",),
        also=("DLT-007", "DLT-008"),
        cell=_CELL,
        wrap=design(receiver=_Trusting),
        says="flipped: taken",
    ),
    Fault(
        id="delta-checksum-of-its-beginning",
        bug="a checksum of the header alone",
        rules=("DLT-005",),
        also=("DLT-007", "DLT-008"),
        cell=_CELL,
        wrap=design(_SealsTheFirstKilobyte, _OfTheFirstKilobyte),
        says="flipped: taken",
    ),
    Fault(
        id="delta-version-before-success",
        bug="TRL#5932: the version is raised although nothing was applied",
        rules=("DLT-006",),
        cell=_CELL,
        wrap=design(receiver=_CountsFirst),
        says="then whole: taken",
    ),
    Fault(
        id="delta-written-before-it-is-checked",
        bug="a receiver that writes message by message and compares the checksum at the end",
        rules=("DLT-007",),
        also=("DLT-006", "DLT-008"),
        cell=_CELL,
        wrap=design(receiver=_WritesFirst),
        says="flipped: refused, and holds",
    ),
    Fault(
        id="delta-checked-on-its-way-alone",
        bug="slime#2209: the checksum of the delta is right, and the weights are not",
        rules=("DLT-008",),
        cell=_CELL,
        wrap=design(receiver=_Unverified),
        says="weights were changed after version 0",
    ),
    Fault(
        id="delta-of-what-is-in-common",
        bug="W16 in a delta: tensors that one side lacks are left out silently",
        rules=("DLT-009",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(_InCommon, _Unverified),
        says="a tensor is new",
    ),
    Fault(
        id="delta-larger-than-the-model",
        bug="verl#6974: half of a dense model changes, and positions are sent with every value",
        rules=("DLT-010",),
        cell=_CELL,
        wrap=design(_NeverWhole),
        says="a delta of",
    ),
    Fault(
        id="delta-fp8-in-pairs",
        bug="SkyRL#1898 in a delta: only the widths of fp32 and bf16 are known, and FP8 is read two elements at a time",
        rules=("DLT-009",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(_Fp8InPairs, _Unverified),
        says="in FP8, the last element: taken",
    ),
    Fault(
        id="delta-fp8-of-another-sign",
        bug="slime#2209 in kind: FP8 is compared as numbers, for which zeros of both signs are equal",
        rules=("DLT-009",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(_Fp8AsNumbers, _Unverified),
        says="in FP8, signs of zeros: taken",
    ),
    Fault(
        id="delta-integers-as-floats",
        bug="mbridge#159 in kind: integers, as INT4 is packed into, are compared as floats, which have fewer digits",
        rules=("DLT-009",),
        also=("DLT-008",),
        cell=_CELL,
        wrap=design(_IntegersAsFloats, _Unverified),
        says="in int32: taken",
    ),
    Fault(
        id="delta-in-one-staging-buffer",
        bug="verl#7083 in a delta: the next one is written over a delta that is still on its way",
        rules=("DLT-004",),
        cell=_CELL,
        wrap=design(_OneStagingBuffer, _ReadsTheBuffer),
        says="a delta that comes after the next was made: apply version 8",
    ),
    Fault(
        id="delta-empty-and-counted",
        bug="TRL#5937: nothing is sent where nothing changed, and the sender counts a version that no receiver has",
        rules=("DLT-004",),
        cell=_CELL,
        wrap=design(_NothingToSend, _NothingToDo),
        says="a step that changes nothing, and the next: apply version 3",
    ),
    Fault(
        id="delta-back-to-an-old-receipt",
        bug="a receipt that is repeated late takes the sender's base back, and no later delta fits",
        rules=("DLT-004",),
        cell=_CELL,
        wrap=design(_AnyReceipt),
        says="a receipt that comes again after the next one: apply version 10",
    ),
    Fault(
        id="delta-reads-views-as-runs",
        bug="prime-rl#3113 in a delta: a strided tensor is read as one run",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_ReadsARun, _Unverified),
        says="apply version 1, made of 0: taken, and holds model.embed_tokens.weight",
    ),
    Fault(
        id="delta-experts-that-changed",
        bug="W4 in a delta: experts that did not change are left out, and the others taken for the first ones",
        rules=("DLT-001",),
        cell=_CELL,
        wrap=design(_ChangedExperts),
        says="some tensors changed: apply version 14",
    ),
    Fault(
        id="delta-message-taken-twice",
        bug="SkyRL#1903 in kind: a message that is sent again is applied again, and its exclusive or goes back",
        rules=("DLT-005",),
        cell=_CELL,
        wrap=design(_InParts, _TakesParts),
        says="message 1 twice: taken",
    ),
    Fault(
        id="delta-messages-by-place",
        bug="W4 in a delta: messages that overtake each other are taken for each other's tensors",
        rules=("DLT-005",),
        cell=_CELL,
        wrap=design(_InParts, _TakesPartsByPlace),
        says="before the one before it: taken",
    ),
)
