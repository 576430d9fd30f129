"""What an audit found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moeref.audit.manifest import Fingerprint, Manifest, finite, group, place

#: Patterns of findings that the page shows; JSON has all.
SHOWN = 30


@dataclass(frozen=True)
class Finding:
    """One tensor that is not as expected. kind: what happened, in a word or two; text: a sentence."""

    name: str
    kind: str
    text: str
    expected: Fingerprint | None  # None: no such tensor
    found: Fingerprint | None

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        where = place(self.name)
        sides = {side: _plain(one) for side, one in (("expected", self.expected), ("found", self.found))}
        return {
            "name": self.name,
            "kind": self.kind,
            "text": self.text,
            "group": group(self.name),
            "layer": where.layer,
            "expert": where.expert,
            **sides,
        }


@dataclass(frozen=True)
class Report:
    """All findings, and the manifests of both sides."""

    expected: Manifest
    found: Manifest
    findings: tuple[Finding, ...]

    @property
    def same(self) -> bool:
        """Whether all tensors are there on both sides, equal bit for bit."""
        return not self.findings

    @property
    def kinds(self) -> Mapping[str, int]:
        """Tensors of each kind of finding."""
        return Counter(finding.kind for finding in self.findings)

    def counts(self, of: str) -> dict[str, tuple[int, int]]:
        """(tensors, how many of them are not as expected), by `layer` or `group`."""
        names = self.expected.tensors.keys() | self.found.tensors.keys()
        every, wrong = Counter(_key(name, of) for name in names), Counter(_key(f.name, of) for f in self.findings)
        return {key: (every[key], wrong[key]) for key in sorted(every, key=lambda k: (len(k), k))}

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "same": self.same,
            "tensors": len(self.expected.tensors),
            "kinds": dict(self.kinds),
            "groups": self.counts("group"),
            "layers": self.counts("layer"),
            "findings": [finding.to_plain() for finding in self.findings],
        }

    def lines(self) -> Iterator[str]:
        """The page: findings of one kind whose names differ only in numbers stand together."""
        wrong = len(self.findings)
        yield f"{len(self.expected.tensors)} tensors expected, {wrong or 'none'} not as expected"
        patterns: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            patterns.setdefault((finding.kind, place(finding.name).rest), []).append(finding)
        for (kind, _), alike in list(patterns.items())[:SHOWN]:
            more = f" (and {len(alike) - 1} like it)" if len(alike) > 1 else ""
            yield f"  {kind}: {alike[0].name}{more}: {alike[0].text}"
        if len(patterns) > SHOWN:
            yield f"  and {len(patterns) - SHOWN} more patterns: --json has all"
        for of in ("group", "layer") if wrong else ():
            counts = [f"{key} {bad} of {every}" for key, (every, bad) in self.counts(of).items() if bad]
            yield f"  by {of}: {', '.join(counts)}"


def _plain(one: Fingerprint | None) -> dict[str, Any] | None:
    return one and {**one._asdict(), "least": finite(one.least), "greatest": finite(one.greatest)}


def _key(name: str, of: str) -> str:
    layer = place(name).layer
    return group(name) if of == "group" else "outside" if layer is None else str(layer)
