"""A toy target, world and judges for tests of the kit's runner and reports: real records, no processes, no model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, Info, World
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.facts import as_plain
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import EVENTS, rank_dir
from moeref_conformance.contract.results import Results
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.judges import Case
from moeref_conformance.plan import matrix
from moeref_conformance.plan.machine import Machine
from moeref_conformance.plan.plan import RunPlan, Settings, prepare
from moeref_conformance.resolve import resolve
from moeref_conformance.run import runner
from moeref_conformance.run.machinery import Machinery

MATRIX = """
schema = 1
name = "toy"
[layouts]
one = {}
tp2 = { tp = 2 }
pp2-vpp2 = { pp = 2, vpp = 2 }
[[grid]]
tags = ["real"]
backend = ["gloo"]
family = ["qwen3_moe"]
layout = ["one", "tp2", "pp2-vpp2"]
[[grid]]
backend = ["gloo"]
family = ["glm4_moe"]
layout = ["tp2"]
"""


class Target:
    """Claims qwen3_moe, not glm4_moe, and no forward."""

    info = Info(name="toy", version="1")
    claims = Claims(
        facets=frozenset({"names", "export"}), families=frozenset({"qwen3_moe"}), backends=frozenset({"gloo", "static"})
    )

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        yield SimpleNamespace(names=SimpleNamespace(table=lambda rank: []), export=None, forward=None)


target = Target()


class ToyWorld:
    """Writes one record a rank; `trouble` may raise, or answer the outcome itself."""

    def __init__(self, trouble: Callable[[Cell], RunOutcome | None] = lambda cell: None) -> None:
        self.trouble = trouble
        self.ran: list[str] = []

    def __enter__(self) -> ToyWorld:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, cell: Cell, cell_dir: Path, inputs: Mapping[str, str], claims: Claims) -> RunOutcome:
        self.ran.append(cell.id)
        if outcome := self.trouble(cell):
            return outcome
        for rank in range(cell.layout.world):
            rank_dir(cell_dir, rank).mkdir(parents=True)
            event = {"step": "load", "phase": "ok", "at": 0.0, "seconds": 0.0, "value": cell.id}
            (rank_dir(cell_dir, rank) / EVENTS).write_text(json.dumps(event) + "\n")
        exits = tuple(RankExit(r, 0, None, False, "load", "", "", finished=True) for r in range(cell.layout.world))
        return RunOutcome(exits, 0.5)


class Resolved(ToyWorld):
    """Stands for the first world of a run: the target says what it is and claims in this process."""

    backend = "gloo"

    def __init__(self, spec: str, **_: Any) -> None:
        super().__init__()
        self.target_spec = spec

    def start(self) -> dict[str, Any]:
        return as_plain(resolve(self.target_spec))


def machinery(world: ToyWorld, **judges: Callable[[Case], Outcome]) -> Machinery:
    """Judges pass unless given, by id with `_` for the dash."""
    all_judges = dict.fromkeys(load_rules(), lambda case: Outcome())
    return Machinery(
        worlds={"gloo": lambda plan: world},
        expect=lambda cell, folder: SimpleNamespace(inputs={"hf_config": str(folder)}),
        judges=all_judges | {name.replace("_", "-"): judge for name, judge in judges.items()},
    )


def prepared(here: Machine | None = None, **settings: Any) -> RunPlan:
    """A plan with its target resolved, on the machine `here`."""
    return prepare(Settings(**settings), lambda backend: resolve(settings["target"]), here)


def make_plan(folder: Path, **settings: Any) -> RunPlan:
    """A checked plan over `MATRIX`, written to `folder`."""
    sys.modules.setdefault("kit_toy", sys.modules[__name__])
    path = folder / "toy.toml"
    if not path.exists():
        path.write_text(MATRIX)
    return prepared(**({"target": "kit_toy:target", "matrix": str(path), "jobs": 1} | settings))


def run(
    folder: Path, world: ToyWorld | None = None, settings: Mapping[str, Any] | None = None, **judges: Any
) -> Results:
    """A whole run into `folder / "out"`."""
    made = make_plan(folder, **(settings or {}))
    return runner.run(made, folder / "out", lambda *_: None, machinery(world or ToyWorld(), **judges))


def failing(*findings: Finding) -> Callable[[Case], Outcome]:
    """A judge that fails with these findings, or with one that says little."""
    return lambda case: Outcome(findings=findings or (Finding(stage="export", message="differs"),))


def cells(text: str, folder: Path) -> matrix.Matrix:
    """The matrix of a TOML text."""
    path = folder / "given.toml"
    path.write_text(text)
    return matrix.load(str(path))
