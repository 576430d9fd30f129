"""What a judge says: findings, or how closely a rule was met."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with all that is known of where. `layer` and `expert` are global numbers."""

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


@dataclass(frozen=True)
class Outcome:
    """What one rule says of one cell: findings (none is good), how closely it was met, or why it cannot be judged."""

    findings: tuple[Finding, ...] = ()
    met: str = "exact"
    untested: str = ""
