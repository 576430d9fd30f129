"""What a judge returns: findings, how closely a rule was met, or why it could not be judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from moeref_conformance.contract.texts import fit


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and where. Its texts are made `fit`.

    `stage` is the step whose record shows it, or a phase of it; `layer` and `expert` are global numbers; `index` is the
    first element that differs, or where numbers are compared the one that is furthest off.

    It may stand for others of its pattern, `count` in all: on these `ranks`, of so many tensors by `kinds`.
    """

    stage: str
    message: str
    rank: int | None = None
    coords: str = ""
    hf_name: str = ""
    local_name: str = ""
    global_name: str = ""
    layer: int | None = None
    expert: int | None = None
    index: tuple[int, ...] | None = None
    expected: str = ""
    got: str = ""
    diagnosis: str = ""
    count: int = 1
    ranks: tuple[int, ...] = ()
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def tensor(self) -> str:
        """The name of the tensor that it is about, if it is about one."""
        return self.hf_name or self.global_name or self.local_name

    @property
    def text(self) -> str:
        """Message and diagnosis, by which a known failure is told from another one."""
        return ": ".join(filter(None, (self.message, self.diagnosis)))

    @property
    def pattern(self) -> tuple[str, str]:
        """What findings of one cause share: the stage, and diagnosis or else message, without names and numbers."""
        text = self.diagnosis or self.message
        for name in filter(None, (self.hf_name, self.global_name, self.local_name)):
            text = text.replace(name, "")
        return self.stage, re.sub(r"\d+", "", text)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            object.__setattr__(self, name, fit(getattr(self, name)))


_TEXTS = tuple(field.name for field in fields(Finding) if field.type == "str")


def merged(findings: Sequence[Finding]) -> Finding:
    """The first of several findings of one pattern, which then stands for all of them."""
    if len(findings) == 1:
        return findings[0]
    tensors = {finding.tensor for finding in findings if finding.tensor}
    ranks = tuple(sorted({finding.rank for finding in findings if finding.rank is not None}))
    return replace(findings[0], count=len(findings), ranks=ranks, kinds=dict(Counter(map(kind_of, sorted(tensors)))))


def kind_of(tensor: str) -> str:
    """`gate_proj` of a full name."""
    head, _, last = tensor.rpartition(".")
    kind = re.sub(r"\d+$", "", last)
    return kind if kind not in ("weight", "bias") or not head else head.rpartition(".")[2] + ".bias" * (kind == "bias")


@dataclass(frozen=True)
class Outcome:
    """The result of one rule in one cell. Without findings and without `untested` it passes.

    `met` says how closely, where numbers are compared: "exact" is bit for bit.
    """

    findings: tuple[Finding, ...] = ()
    met: str = ""
    untested: str = ""
