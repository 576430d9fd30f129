"""What is going to be judged: a target, and what the user asked for as cells, rules and known failures, all checked."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Claims, Info, Recorded
from moeref_conformance.contract.backends import ANY_GPU, GPU_BACKENDS
from moeref_conformance.contract.cells import Cell, Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.facts import Described
from moeref_conformance.contract.rules import Rule, groups_of, load_rules, select
from moeref_conformance.contract.standing import FINISHES
from moeref_conformance.plan import known_failures
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.plan.check_environment import lacks_transformers
from moeref_conformance.plan.known_failures import KnownFailure
from moeref_conformance.plan.machine import Machine, concerned, detect, started
from moeref_conformance.plan.matrix import Matrix

DEADLINE = 120.0
ONE_RANK = Layout()
#: Values of `--backend`: the machine's choice, or one backend for all cells with ranks.
ASKED = ("auto", "gloo", *GPU_BACKENDS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for. `cells` are ids, globs or tags, `rules` prefixes; empty means all."""

    target: str
    matrix: str = "cpu"
    cells: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()  # names; their rules are selected besides
    backend: str = "auto"  # one of ASKED
    known_failures: Path | None = None  # the file; None for the one next to the matrix, if there is one
    deadline: float = DEADLINE  # seconds a cell may take
    jobs: int = 0  # worlds side by side; 0 leaves it to `RunPlan.workers`
    strict: bool = False
    keep: Path | None = None  # records of all cells are kept here

    @classmethod
    def of(
        cls, *, cell: Iterable[str], rule: Iterable[str], profile: Iterable[str], known: Path | None, **others: Any
    ) -> Settings:
        """Settings by the names of their options, on the command line and in pytest."""
        cells, rules, profiles = tuple(cell), tuple(rule), tuple(profile)
        return cls(cells=cells, rules=rules, profiles=profiles, known_failures=known, **others)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Checked settings, what they select, and what the target says of itself; the target itself is elsewhere.

    `recorded` has the records of a dump. `machine` is None where no cell depends on it. `ranks` is the number of
    processes that torchrun started, or 0.
    """

    settings: Settings
    info: Info
    claims: Claims
    recorded: Recorded | None
    matrix: Matrix
    cells: tuple[Cell, ...]
    rules: Mapping[str, Rule]
    selected: frozenset[str]
    known_failures: tuple[KnownFailure, ...]
    known_failures_file: Path | None
    machine: Machine | None = None
    ranks: int = 0

    @property
    def workers(self) -> int:
        """Cells that run side by side: `jobs`, or two if there are cores and enough cells to be worth a second world.

        Under torchrun one: its processes run one cell after the other.
        """
        if self.ranks:
            return 1
        many = sum(cell.backend != "static" for cell in self.cells) > 24
        return self.settings.jobs or min(2 if many else 1, os.cpu_count() or 1)

    def rules_of(self, cell: Cell) -> list[Rule]:
        """The rules that apply to the cell, prerequisites first."""
        return [rule for rule in self.rules.values() if rule.judged_in(cell)]

    def lacks(self, cell: Cell) -> str:
        """What the cell needs and this machine lacks, as a reason for the report; empty if it can run."""
        if reason := lacks_transformers(cell):
            return reason
        if self.recorded is not None:
            return ""
        if self.machine is not None and (reason := self.machine.lacks(cell)):
            return reason
        if self.ranks and cell.backend != "static" and cell.layout.world > self.ranks:
            return f"has {cell.layout.world} ranks, and torchrun started {self.ranks}"
        return ""

    def one_rank(self, cell: Cell) -> Cell:
        """The one-rank cell that `cell` is compared with: the matrix's own if it has one.

        On GPUs it runs over NCCL, also where ranks share a GPU: one rank sends nothing, so only kernels count, and
        they are the same. That run is itself judged against transformers on the CPU.
        """
        # DeepEP refuses a group of one rank, and which dispatcher moves the rows does not change what is computed.
        dispatcher = "alltoall" if cell.dispatcher.startswith("flex-") else cell.dispatcher
        made = replace(cell, layout_name="one", layout=ONE_RANK, dispatcher=dispatcher, needs=(), gpus=0, tags=())
        if cell.backend == "gloo-cuda" and self.settings.backend == "auto":
            over_nccl = replace(made, backend="nccl")
            if not self.lacks(over_nccl) and self.claims.why_not(over_nccl) is None:
                made = over_nccl
        same = (made.variant, made.backend)
        listed = (c for c in self.matrix.cells if is_one_rank(c) and (c.variant, c.backend) == same)
        return next(listed, made)

    def enabled(self, cell: Cell, rule: Rule) -> bool:
        """Whether the selection and the cell's grid include the rule."""
        return rule.id in self.selected and rule.id in self.matrix.rules[cell.id]


def ordered(cell: Cell, order: str) -> Cell:
    """The cell with its ranks in this order. One rank has none."""
    return cell if cell.layout.world == 1 else replace(cell, layout=replace(cell.layout, order=order))


def is_one_rank(cell: Cell) -> bool:
    """Whether the cell is a one-rank run."""
    return cell.layout == ONE_RANK


def prepare(settings: Settings, ask: Callable[[str], Described], machine: Machine | None = None) -> RunPlan:
    """Check settings, and select cells, rules and known failures. Raises `BadInput`, and runs no cell.

    `ask` is called once what does not depend on the target has been checked: with a backend of which cells will run, or
    gloo, for what the target says of itself. `machine` is this one unless given; it is examined only where a cell
    depends on it.
    """
    _check(settings)
    matrix, file = matrices.load(settings.matrix), settings.known_failures
    selected = select([*settings.rules, *groups_of(settings.profiles)])
    if settings.backend in GPU_BACKENDS or any(concerned(cell) for cell in matrix.cells):
        machine = machine or detect()
    if settings.backend != "auto" or any(cell.backend == ANY_GPU for cell in matrix.cells):
        matrix = matrix.on(machine or Machine(), settings.backend)
    # RUN-001 is in every selection, and no reason to run a cell in which nothing else is judged.
    wanted = selected - {FINISHES} or selected
    rules = [rule for rule in load_rules().values() if rule.id in wanted]
    cells = [cell for cell in matrix.select(settings.cells) if _any_applies(rules, matrix, cell)]
    if not cells:
        asked = ", ".join([*settings.rules, *settings.profiles])
        raise BadInput(f"none of the selected rules ({asked}) can be judged in the selected cells")
    known = known_failures.load(file, matrix) if file else None
    target = ask(_first_backend(cells, machine))
    if known is None:
        file = known_failures.find(matrix, target.info.name)
        known = known_failures.load(file, matrix) if file else ()
    return RunPlan(
        settings=settings,
        info=target.info,
        claims=target.claims,
        recorded=target if isinstance(target, Recorded) else None,
        matrix=matrix,
        cells=tuple(ordered(cell, target.claims.order) for cell in cells),
        rules=load_rules(),
        selected=selected,
        known_failures=known,
        known_failures_file=file,
        machine=machine,
        ranks=started(),
    )


def _any_applies(rules: Iterable[Rule], matrix: Matrix, cell: Cell) -> bool:
    listed = (rule for rule in rules if rule.id in matrix.rules[cell.id])
    return any(rule.judged_in(cell) for rule in listed)


def _first_backend(cells: Iterable[Cell], machine: Machine | None) -> str:
    """The backend of the first cell with ranks that can run here, or gloo: static cells run in any world."""
    with_ranks = (cell for cell in cells if cell.backend != "static")
    return next((cell.backend for cell in with_ranks if machine is None or not machine.lacks(cell)), "gloo")


def _check(settings: Settings) -> None:
    if settings.deadline <= 0:
        raise BadInput(f"deadline={settings.deadline} must be more than 0 seconds")
    if settings.jobs < 0:
        raise BadInput(f"jobs={settings.jobs} must be at least 1, or 0 to choose by cores")
    if settings.backend not in ASKED:
        raise BadInput(f"backend={settings.backend!r} is none of {', '.join(ASKED)}")


def repeat(settings: Settings, cell: Cell, rule: Rule) -> str:
    """The command that judges this rule in this cell again."""
    words = ["run", "--target", settings.target, "--matrix", settings.matrix, "--cell", cell.id, "--rule", rule.id]
    if settings.backend != "auto":
        words += ["--backend", settings.backend]
    if settings.deadline != DEADLINE:
        words += ["--deadline", f"{settings.deadline:g}"]
    if settings.known_failures:
        words += ["--known", str(settings.known_failures)]
    return shlex.join(["moeref-conformance", *words])
