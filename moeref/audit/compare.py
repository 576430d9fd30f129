"""Comparing two models tensor by tensor: all bytes, and for what differs, what happened to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from moeref.audit import trials
from moeref.audit.manifest import Fingerprint, Manifest, place
from moeref.audit.pieces import Cause
from moeref.audit.report import Finding, Report
from moeref.audit.source import KEEP, Given, Source

Trial = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Cause | None]
#: Parts of names whose tensors are tried together.
_TOGETHER: tuple[tuple[tuple[str, ...], Trial], ...] = (
    (("gate_proj", "up_proj"), trials.gate_up),
    (("w1", "w3"), trials.gate_up),
    (("q_proj", "k_proj", "v_proj"), trials.qkv),
)
_PAIRS = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


def compare(expected: Given, found: Given, *, previous: Given | None = None, keep: int = KEEP) -> Report:
    """Whether `found` is `expected`, bit for bit, and what happened to the tensors that are not.

    Each is a safetensors folder, index or file, a saved manifest (a path), a Manifest, a mapping, or a stream of
    (name, tensor), which is read once. previous: an earlier version, by which stale tensors are known. keep: bytes of
    a stream's differing tensors that are held to find out what happened. Manifests and streams that are over have
    hashes and statistics alone, so that some kinds cannot be told; a finding says so.

    Raises AuditError for what cannot be read.
    """
    before = None
    if previous is not None:
        with Source(previous, "previous") as source:
            before = source.manifest
    # A stream is read last, knowing what it should be, so that only what differs is kept.
    if _is_stream(expected) and not _is_stream(found):
        with Source(found, "found") as b, Source(expected, "expected", b.manifest, keep) as a:
            return _Comparison(a, b, before).report()
    with Source(expected, "expected") as a, Source(found, "found", a.manifest, keep) as b:
        return _Comparison(a, b, before).report()


def _is_stream(given: Given) -> bool:
    return not isinstance(given, str | Path | Manifest | Mapping)


class _Comparison:
    """The comparison of two open sources."""

    def __init__(self, expected: Source, found: Source, previous: Manifest | None) -> None:
        self._a, self._b, self._previous = expected, found, previous
        self._causes: dict[str, Cause] = {}
        self._tried: set[str] = set()
        self._owners: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for name, one in expected.manifest.tensors.items():
            self._owners.setdefault(one.content, []).append(name)

    def report(self) -> Report:
        """All findings, in the order of the names."""
        a, b = self._a.manifest.tensors, self._b.manifest.tensors
        findings = [
            Finding(name, *self._finding(name, a.get(name), b.get(name)), a.get(name), b.get(name))
            for name in sorted(a.keys() | b.keys())
            if name not in a or name not in b or a[name].content != b[name].content
        ]
        return Report(self._a.manifest, self._b.manifest, tuple(findings))

    def _finding(self, name: str, expected: Fingerprint | None, found: Fingerprint | None) -> Cause:
        if found is None:
            return "missing", f"missing; expected {_described(expected)}"
        if expected is None:
            owners = [owner for owner in self._owners.get(found.content, []) if owner not in self._b.manifest.tensors]
            if owners:
                return "renamed", f"not expected; it holds the values of {owners[0]}, which is missing"
            return "extra", f"not expected: {_described(found)}"
        return self._plain(name, expected, found) or self._other(name, found) or self._by_trial(name, expected, found)

    def _plain(self, name: str, expected: Fingerprint, found: Fingerprint) -> Cause | None:
        """What happened, by statistics and an earlier version; None if they do not say."""
        if found.zero and not expected.zero:
            return "zero", "all of it is zero"
        if found.nans > expected.nans:
            return "NaN", f"{found.nans} NaN, {expected.nans} expected"
        before = self._previous.tensors.get(name) if self._previous else None
        if before is not None and before.content == found.content:
            return "stale", "stale: it is as in the previous version"
        return None

    def _other(self, name: str, found: Fingerprint) -> Cause | None:
        """What happened, if another expected tensor has these values; the nearest by name if several do."""
        owners = self._owners.get(found.content)
        if not owners or found.zero:
            return None
        mine = place(name)
        kinds = {owner: _relation(name, owner) for owner in owners}
        owner = min(owners, key=lambda one: (_ORDER.index(kinds[one]), _distance(mine.layer, place(one).layer), one))
        kind, there = kinds[owner], place(owner)
        if kind == "expert":
            return kind, f"holds the values of expert {there.expert}"
        if kind == "layer shift" and mine.layer is not None and there.layer is not None:
            return kind, f"holds the values of layer {there.layer}, {there.layer - mine.layer:+d}"
        if kind == "gate and up":
            return kind, f"gate and up are exchanged: it holds the values of {owner}"
        return kind, f"holds the values of {owner}"

    def _by_trial(self, name: str, expected: Fingerprint, found: Fingerprint) -> Cause:
        """What happened, by trials on the tensors themselves."""
        a, b = self._a.read(name), self._b.read(name)
        fallback = "values"
        if expected[:2] != found[:2]:
            fallback = "shape" if expected.shape != found.shape else "dtype"
            differs = f"{_described(found)}, expected {_described(expected)}"
        else:
            differs = "its bytes differ"
        if a is None or b is None:
            side = self._a.label if a is None else self._b.label
            return fallback, f"{differs}; the {side} side has hashes alone, so what happened cannot be tried"
        stacked = re.search(r"\.experts\.\D", name) is not None
        if cause := trials.one(a, b, fused="gate_up_proj" in name, stacked=stacked) or self._together(name):
            return cause
        return fallback, trials.difference(a, b) if fallback == "values" else differs

    def _together(self, name: str) -> Cause | None:
        """What happened to a unit of several tensors; tried once, and noted as the cause for each."""
        for parts, trial in _TOGETHER:
            part = next((one for one in parts if re.search(rf"\.{one}\b", name)), None)
            if part is None:
                continue
            names = [re.sub(rf"\.{part}\b", f".{one}", name) for one in parts]
            if names[0] not in self._tried:
                self._tried.add(names[0])
                sides = [self._both(one) for one in names]
                here, there = ([pair[side] for pair in sides if pair] for side in (0, 1))
                cause = trial(here, there) if all(sides) else None
                self._causes |= dict.fromkeys(names, cause) if cause else {}
            return self._causes.get(name)
        return None

    def _both(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The expected and the found tensor, if both can be read; a stream keeps none that is as expected."""
        one, two = (source.manifest.tensors.get(name) for source in (self._a, self._b))
        a, b = self._a.read(name), self._b.read(name)
        if one and two and one.content == two.content:
            a, b = (b if a is None else a), (a if b is None else b)
        return None if a is None or b is None else (a, b)


#: How a tensor may be related to another whose values it holds, the likeliest first.
_ORDER = ("gate and up", "expert", "layer shift", "other tensor")


def _relation(name: str, owner: str) -> str:
    mine, there = place(name), place(owner)
    if mine.rest == there.rest:
        same_layer, same_expert = mine.layer == there.layer, mine.expert == there.expert
        return "expert" if same_layer else "layer shift" if same_expert else "other tensor"
    for part, pair in _PAIRS.items():
        if re.sub(rf"\.{part}\b", f".{pair}", name) == owner:
            return "gate and up"
    return "other tensor"


def _described(one: Fingerprint | None) -> str:
    return f"{one.dtype} {[*one.shape]}" if one else "nothing"


def _distance(a: int | None, b: int | None) -> int:
    return abs((a or 0) - (b or 0))
