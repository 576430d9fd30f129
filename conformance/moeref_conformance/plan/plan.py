"""What the user asked for, resolved and checked before any work: target, cells, rules, known failures, and the header.

A `Plan` is all that a run is made of. Its header goes first into `results.jsonl` and repeats every setting that counts.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeref_conformance import resolve as targets
from moeref_conformance.contract.api import Target, to_plain
from moeref_conformance.contract.cells import ANY_GPU, GPU_BACKENDS, Cell, Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.published_models import TINY_SEED
from moeref_conformance.contract.results import version_of, versions
from moeref_conformance.contract.rules import GROUPS, Rule, load_rules, revision, select
from moeref_conformance.plan import known_failures
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.plan.known_failures import Known
from moeref_conformance.plan.machine import Machine, concerned, detect, started
from moeref_conformance.plan.matrix import Matrix
from moeref_conformance.targets.dump import DumpTarget

DEADLINE = 120.0
ONE = Layout()
#: What `--backend` takes: the machine's choice, or one world for all cells with ranks.
ASKED = ("auto", "gloo", *GPU_BACKENDS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. `cells` are ids, globs or tags, `rules` prefixes; empty means all."""

    target: str
    matrix: str = "cpu"
    cells: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    backend: str = "auto"  # one of ASKED
    known: Path | None = None
    deadline: float = DEADLINE  # seconds a cell may take
    jobs: int = 0  # worlds side by side; 0 leaves it to `Plan.workers`
    strict: bool = False
    keep: Path | None = None  # records of all cells are kept here


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings, resolved and checked.

    `machine` is None where nothing depends on it, `ranks` the number of processes that torchrun started, or 0.
    """

    settings: Settings
    target: Target
    matrix: Matrix
    cells: tuple[Cell, ...]
    rules: Mapping[str, Rule]
    selected: frozenset[str]
    known: tuple[Known, ...]
    known_file: Path | None
    machine: Machine | None = None
    ranks: int = 0

    @property
    def workers(self) -> int:
        """Number of worlds side by side: `jobs`, or two given the cores and enough cells to be worth a start.

        Under torchrun there is one, since its processes serve one cell after the other.
        """
        if self.ranks:
            return 1
        many = sum(cell.backend != "static" for cell in self.cells) > 24
        return self.settings.jobs or min(2 if many else 1, os.cpu_count() or 1)

    def rules_of(self, cell: Cell) -> list[Rule]:
        """The rules that can be judged in the cell's world, prerequisites first."""
        return [rule for rule in self.rules.values() if rule.applies(cell.backend, cell.replay)]

    def lacks(self, cell: Cell) -> str:
        """What the cell needs and is not there to run it, as a reason for the report; empty if it can run."""
        if isinstance(self.target, DumpTarget):
            return ""
        if self.machine is not None and (reason := self.machine.lacks(cell)):
            return reason
        if self.ranks and cell.backend != "static" and cell.layout.world > self.ranks:
            return f"has {cell.layout.world} ranks, and torchrun started {self.ranks}"
        return ""

    def one(self, cell: Cell) -> Cell:
        """The one-rank cell that `cell` is compared with: the matrix's own if it has one.

        On GPUs it is the run over NCCL in both worlds: one rank sends nothing, so that only kernels count, and they are
        the same; and it is the run that is judged against transformers on the CPU.
        """
        # DeepEP refuses a group of one. Who carries the rows changes nothing that is computed from them.
        carrier = "alltoall" if cell.dispatcher.startswith("flex-") else cell.dispatcher
        one = replace(
            cell, layout_name="one", layout=ONE, dispatcher=carrier, needs=(), gpus=0, gradients=True, tags=()
        )
        if cell.backend == "gloo-cuda" and self.settings.backend == "auto":
            over_nccl = replace(one, backend="nccl")
            if not self.lacks(over_nccl) and self.target.claims.why_not(over_nccl) is None:
                one = over_nccl
        same = (one.variant, one.backend)
        listed = (c for c in self.matrix.cells if is_one(c) and (c.variant, c.backend) == same)
        return replace(next(listed, one), gradients=True)

    def enabled(self, cell: Cell, rule: Rule) -> bool:
        """Whether the selection and the cell's grid include the rule."""
        return rule.id in self.selected and rule.id in self.matrix.rules[cell.id]


def is_one(cell: Cell) -> bool:
    """Whether the cell is a one-rank run."""
    return cell.layout == ONE


def prepare(settings: Settings, machine: Machine | None = None) -> Plan:
    """Resolve target, matrix, selection and known failures. Raises `BadInput`, and does no work.

    `machine` stands for this one, which is looked at only where something depends on it.
    """
    if settings.deadline <= 0:
        raise BadInput(f"deadline={settings.deadline} must be more than 0 seconds")
    if settings.jobs < 0:
        raise BadInput(f"jobs={settings.jobs} must be at least 1, or 0 to choose by cores")
    if settings.backend not in ASKED:
        raise BadInput(f"backend={settings.backend!r} is none of {', '.join(ASKED)}")
    matrix = matrices.load(settings.matrix)
    target = targets.resolve(settings.target)
    if settings.backend in GPU_BACKENDS or any(concerned(cell) for cell in matrix.cells):
        machine = machine or detect()
    if settings.backend != "auto" or any(cell.backend == ANY_GPU for cell in matrix.cells):
        matrix = matrix.on(machine or Machine(), settings.backend)
    cells, rules, selected = matrix.select(settings.cells), load_rules(), select(settings.rules)
    known_file = settings.known or known_failures.find(matrix, target.info.name)
    plan = Plan(
        settings=settings,
        target=target,
        matrix=matrix,
        cells=cells,
        rules=rules,
        selected=selected,
        known=known_failures.load(known_file, matrix) if known_file else (),
        known_file=known_file,
        machine=machine,
        ranks=started(),
    )
    kept = tuple(cell for cell in cells if any(plan.enabled(cell, rule) for rule in plan.rules_of(cell)))
    if not kept:
        raise BadInput(f"none of the selected rules ({', '.join(settings.rules)}) can be judged in the selected cells")
    return replace(plan, cells=kept)


def header(plan: Plan) -> dict[str, Any]:
    """The first line of `results.jsonl`: who is judged, by which kit, rules and matrix, and under which settings."""
    settings, claims = plan.settings, plan.target.claims
    cells = []
    for cell in plan.cells:
        plain = {"id": cell.id, "variant": cell.variant, "text": cell.layout.text, **to_plain(cell)}
        cells.append({**plain, "claimed": claims.why_not(cell) is None})
    rules = sorted(plan.rules.values(), key=lambda rule: (list(GROUPS).index(rule.group), rule.id))
    return {
        "kit": version_of("moeref") or "from source",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "versions": versions() | dict(plan.machine.versions if plan.machine else {}),
        "target": {"spec": settings.target, **to_plain(plan.target.info), "claims": to_plain(claims)},
        "matrix": {"name": plan.matrix.name, "hash": plan.matrix.hash, "cells": len(plan.matrix.cells)},
        "seed": TINY_SEED,
        "settings": {
            "cells": list(settings.cells),
            "rules": list(settings.rules),
            "backend": settings.backend,
            "known": plan.known_file.name if plan.known_file else "",
            "known entries": len(plan.known),
            "deadline": settings.deadline,
            "jobs": plan.workers,
            "strict": settings.strict,
        },
        "rules": {"hash": revision(plan.rules), "list": [asdict(rule) for rule in rules]},
        "cells": cells,
        "excluded": [{"cell": cell_id, "reason": reason} for cell_id, reason in plan.matrix.excluded],
    }


def repeat(settings: Settings, cell: Cell, rule: Rule) -> str:
    """The one line that judges this rule in this cell again."""
    words = ["run", "--target", settings.target, "--matrix", settings.matrix, "--cell", cell.id, "--rule", rule.id]
    if settings.backend != "auto":
        words += ["--backend", settings.backend]
    if settings.deadline != DEADLINE:
        words += ["--deadline", f"{settings.deadline:g}"]
    if settings.known:
        words += ["--known", str(settings.known)]
    return shlex.join(["moeref-conformance", *words])
