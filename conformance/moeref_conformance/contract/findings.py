"""What a judge returns: findings, how closely a rule was met, or why it could not be judged."""

from __future__ import annotations

from dataclasses import dataclass, fields

from moeref_conformance.contract.texts import fit


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and where: `layer` and `expert` are global numbers. Its texts are made `fit`."""

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

    def __post_init__(self) -> None:
        for name in _TEXTS:
            object.__setattr__(self, name, fit(getattr(self, name)))


_TEXTS = tuple(field.name for field in fields(Finding) if field.type == "str")


@dataclass(frozen=True)
class Outcome:
    """The result of one rule in one cell. Without findings and without `untested` it passes; `met` says how closely."""

    findings: tuple[Finding, ...] = ()
    met: str = "exact"
    untested: str = ""
