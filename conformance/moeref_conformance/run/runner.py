"""Cells × rules → verdicts.

A `Runner` runs single cells of a plan, the one-rank baseline of a variant before the others, and applies the rules;
`run` does so for all cells and writes `results.jsonl`.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moeref_conformance.contract.api import Cell, Claims
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation, write_events
from moeref_conformance.contract.results import Results, Verdict, Writer
from moeref_conformance.contract.rules import Rule
from moeref_conformance.judges import Case
from moeref_conformance.plan import known_failures
from moeref_conformance.plan.plan import Plan, header, is_one, repeat
from moeref_conformance.targets.dump import DumpTarget

if TYPE_CHECKING:
    from moeref_conformance.worlds.coordinator import Crew


class RunsCells(Protocol):
    """A world as the runner needs it: entered once, then asked for one cell after another."""

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """Run one cell, leaving records in `cell_dir`."""
        ...


MakeWorld = Callable[[Plan], AbstractContextManager[RunsCells]]


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """What the runner drives, apart from the target: tests of the kit put a toy world and toy judges here."""

    worlds: Mapping[str, MakeWorld]
    expect: Callable[[Cell, Path], Any]  # oracles.checkpoint.expected
    judges: Mapping[str, Callable[[Case], Outcome]]


def machinery(crew: Crew | None = None) -> Machinery:
    """The real worlds, oracle and judges. With a `crew` the ranks are those of torchrun."""
    from moeref_conformance.contract.exits import KINDS
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.oracles.checkpoint import expected
    from moeref_conformance.worlds.dump import DumpWorld
    from moeref_conformance.worlds.forked import ForkedWorld
    from moeref_conformance.worlds.static import StaticWorld
    from moeref_conformance.worlds.torchrun import TorchrunWorld

    @contextmanager
    def forked(kind: str, plan: Plan) -> Iterator[RunsCells]:
        if isinstance(plan.target, DumpTarget):
            yield DumpWorld(plan.target)
            return
        made = (
            TorchrunWorld(crew, kind, deadline=plan.settings.deadline)
            if crew
            else ForkedWorld(plan.settings.target, deadline=plan.settings.deadline, kind=kind)
        )
        with made as world:
            world.start()  # a target that cannot be imported there ends the run here, not cell by cell
            yield world

    return Machinery(
        worlds={"static": lambda plan: StaticWorld(plan.target), **{kind: partial(forked, kind) for kind in KINDS}},
        expect=expected,
        judges=JUDGES,
    )


class Runner(AbstractContextManager["Runner"]):
    """Runs and judges cells of a plan; every cell runs once. Enter it, then call `cell` from one or several threads."""

    def __init__(self, plan: Plan, parts: Machinery | None = None) -> None:
        self.plan = plan
        self._parts = parts or machinery()
        self._stack = ExitStack()
        self._pools: dict[str, queue.LifoQueue[RunsCells]] = {}
        self._expecting = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._baselines: dict[str, tuple[Observation | None, str]] = {}
        self._done: dict[str, tuple[list[Verdict], float]] = {}

    def __enter__(self) -> Runner:
        self._dir = Path(
            self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix="moeref-conformance-", ignore_cleanup_errors=True)
            )
        )
        # Worlds start in this thread, which outlives them; meanwhile the oracle makes the first model: both take long.
        claims = self.plan.target.claims
        cells = [cell for cell in self.plan.cells if claims.why_not(cell) is None and not self._gap(cell)]
        ones = {one.id: one for one in map(self.plan.one, cells)}
        kinds = [cell.backend for cell in cells]
        compared = {one.backend for one in ones.values() if claims.why_not(one) is None and not self._gap(one)}
        kinds += sorted(compared - set(kinds))
        try:
            for cell in cells[:1]:
                self._stack.enter_context(ThreadPoolExecutor(1)).submit(self._expected, cell)
            for kind in sorted(set(kinds)):
                self._pools[kind] = queue.LifoQueue()
                for _ in range(min(self.plan.workers, kinds.count(kind))):
                    self._pools[kind].put(self._stack.enter_context(self._parts.worlds[kind](self.plan)))
        except BaseException:
            self._stack.close()
            raise
        self._locks = {one: threading.Lock() for one in ones}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cell(self, cell: Cell) -> tuple[list[Verdict], float]:
        """Verdicts of all rules that apply in the cell's world, and how many seconds its run took."""
        if cell.id not in self._done:
            self._done[cell.id] = self._cell(cell)
        return self._done[cell.id]

    def _cell(self, cell: Cell) -> tuple[list[Verdict], float]:
        claims, pending = self.plan.target.claims, []
        verdicts: dict[str, Verdict] = {}
        why_not = claims.why_not(cell)
        for rule in self.plan.rules_of(cell):
            missing = [facet for facet in rule.facets if facet not in claims.facets]
            if why_not or missing:
                reason = why_not or f"the target does not claim {' and '.join(missing)}"
                verdicts[rule.id] = Verdict(cell=cell.id, rule=rule.id, status="unclaimed", reason=reason)
            elif unrecorded := self._unrecorded(cell, rule):
                verdicts[rule.id] = Verdict(cell=cell.id, rule=rule.id, status="unclaimed", reason=unrecorded)
            elif not self.plan.enabled(cell, rule):
                reason = (
                    "not in the selection" if rule.id not in self.plan.selected else "not in this grid of the matrix"
                )
                verdicts[rule.id] = Verdict(cell=cell.id, rule=rule.id, status="disabled", reason=reason)
            elif gap := self._gap(cell):
                verdicts[rule.id] = Verdict(cell=cell.id, rule=rule.id, status="untested", reason=gap)
            else:
                pending.append(rule)
        seconds = 0.0
        if pending:
            try:
                case, remark = self._case(cell)
                seconds = case.observation.seconds if case.observation else 0.0
            except Exception as error:  # the kit's own failure: the target is not to blame and the run goes on
                reason = f"{type(error).__name__}: {error}\n{_tail(error)}"
                verdicts |= {r.id: self._verdict(cell, r, "error", reason=reason) for r in pending}
            else:
                for rule in pending:
                    verdicts[rule.id] = self._judge(case, rule, verdicts, remark)
                if not self.plan.settings.keep and not is_one(cell):
                    shutil.rmtree(self._cell_dir(cell), ignore_errors=True)
        return [verdicts[rule.id] for rule in self.plan.rules_of(cell)], seconds

    def _unrecorded(self, cell: Cell, rule: Rule) -> str:
        """What a dump lacks for the rule; nothing is lacking where a target runs."""
        if not isinstance(self.plan.target, DumpTarget):
            return ""
        lacking = [step for step in rule.steps if step not in self.plan.target.steps(cell)]
        return f"the dump has no record of {' and '.join(lacking)}" if lacking else ""

    def _gap(self, cell: Cell) -> str:
        """Why the cell cannot be run here, if so."""
        no_world = "" if cell.backend in self._parts.worlds else f"this kit has no world {cell.backend}"
        return self.plan.lacks(cell) or no_world

    def _case(self, cell: Cell) -> tuple[Case, str]:
        """The run of a cell with its baseline, and a remark for rules that lack the baseline."""
        baseline, remark = None, ""
        if cell.backend != "static":
            baseline, remark = self._baseline(cell)
        expected = self._expected(cell)
        observation = baseline if baseline and baseline.cell == cell else self._observe(cell, expected.inputs)
        case = Case(cell=cell, expected=expected, observation=observation, baseline=baseline, target=self.plan.target)
        if baseline and baseline.crashes:
            crash = baseline.crashes[0]
            case.baseline = None if baseline is not observation else baseline
            remark = f"the one-rank run {baseline.cell.id} did not finish: {crash.step}: {crash.detail}"
        return case, remark

    def _baseline(self, cell: Cell) -> tuple[Observation | None, str]:
        one = self.plan.one(cell)
        with self._locks[one.id]:
            if one.id not in self._baselines:
                if why_not := self.plan.target.claims.why_not(one):
                    self._baselines[one.id] = None, f"the one-rank run is not claimed: {why_not}"
                elif gap := self._gap(one):
                    self._baselines[one.id] = None, f"the one-rank run {gap}"
                else:
                    self._baselines[one.id] = self._observe(one, self._expected(one).inputs), ""
        return self._baselines[one.id]

    def _expected(self, cell: Cell) -> Any:
        with self._expecting:
            return self._parts.expect(cell, self._dir)

    def _observe(self, cell: Cell, inputs: Mapping[str, str]) -> Observation:
        folder = self._cell_dir(cell)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with self._lease(cell.backend) as world:
            outcome = world.run(cell, folder, dict(inputs), self.plan.target.claims)
        if outcome.error:
            raise RuntimeError(f"world {cell.backend}: {outcome.error}")
        if outcome.events and self.plan.settings.keep:
            write_events(folder, outcome.events)
        return Observation.read(cell, folder, outcome.exits, outcome.seconds, outcome.events)

    @contextmanager
    def _lease(self, kind: str) -> Iterator[RunsCells]:
        world = self._pools[kind].get()
        try:
            yield world
        finally:
            self._pools[kind].put(world)

    def _cell_dir(self, cell: Cell) -> Path:
        return (self.plan.settings.keep or self._dir / "cells") / cell.id.replace("/", "__")

    def _judge(self, case: Case, rule: Rule, so_far: Mapping[str, Verdict], remark: str) -> Verdict:
        cell = case.cell
        for needed in rule.requires:
            # A dump may leave a prerequisite unclaimed; what it did record is judged all the same.
            if needed in so_far and so_far[needed].status not in ("pass", "unclaimed"):
                reason = f"requires {needed}, which did not pass ({so_far[needed].status})"
                return self._verdict(cell, rule, "untested", reason=reason)
        judge = self._parts.judges.get(rule.id)
        if judge is None:
            return self._verdict(cell, rule, "error", reason=f"the kit has no judge for {rule.id}")
        began = time.monotonic()
        try:
            outcome = self._crashed(case, rule) or judge(case)
        except Exception as error:  # the kit's own failure, reported as such
            reason = f"the judge raised {type(error).__name__}: {error}\n{_tail(error)}"
            return self._verdict(cell, rule, "error", reason=reason)
        seconds = round(time.monotonic() - began, 3)
        if outcome.untested:
            reason = f"{outcome.untested} ({remark})" if remark and case.baseline is None else outcome.untested
            return self._verdict(cell, rule, "untested", reason=reason, seconds=seconds)
        if outcome.findings:
            verdict = self._verdict(cell, rule, "fail", findings=outcome.findings, seconds=seconds)
        else:
            verdict = self._verdict(cell, rule, "pass", met=outcome.met, seconds=seconds)
        return self._excuse(verdict, cell, rule)

    def _crashed(self, case: Case, rule: Rule) -> Outcome | None:
        """Without RUN-001 in this world (static has no processes), a target that raised fails the rule itself."""
        if (
            case.observation is None
            or not case.observation.crashes
            or self.plan.rules["RUN-001"].applies(case.cell.backend)
        ):
            return None
        return Outcome(
            findings=tuple(
                Finding(stage=crash.step, message=f"the target {crash.kind}: {crash.detail}", rank=crash.rank)
                for crash in case.observation.crashes
            )
        )

    def _excuse(self, verdict: Verdict, cell: Cell, rule: Rule) -> Verdict:
        entry = known_failures.lookup(self.plan.known, cell, rule)
        if entry is None:
            return verdict
        if entry.outcome == "flaky":
            passed = " It passed this time." if verdict.status == "pass" else ""
            return replace(verdict, status="xfail", reason=f"flaky: {entry.text}.{passed}")
        if verdict.status == "pass":
            return replace(verdict, status="xpass", reason=f"passes, but is listed as a known failure: {entry.text}")
        return replace(verdict, status="xfail", reason=entry.text)

    def _verdict(self, cell: Cell, rule: Rule, status: str, **more: Any) -> Verdict:
        return Verdict(cell=cell.id, rule=rule.id, status=status, repeat=repeat(self.plan.settings, cell, rule), **more)


def run(
    plan: Plan, out: Path, progress: Callable[[str, Cell, list[Verdict]], None], parts: Machinery | None = None
) -> Results:
    """Run all cells of a plan, writing `out/results.jsonl` as they finish.

    `progress(event, cell, verdicts)` is called with "begin" and "end", the former from worker threads. After Ctrl-C the
    results so far are returned, without a footer and therefore incomplete.
    """
    with Writer(out / "results.jsonl", header(plan)) as writer:
        try:
            # The runner closes first: on Ctrl-C its worlds end, and with them what the workers wait for.
            with ThreadPoolExecutor(plan.workers) as pool, Runner(plan, parts) as runner:

                def one(cell: Cell) -> tuple[Cell, list[Verdict], float]:
                    progress("begin", cell, [])
                    return cell, *runner.cell(cell)

                futures = [pool.submit(one, cell) for cell in sorted(plan.cells, key=lambda c: not is_one(c))]
                try:
                    for future in as_completed(futures):
                        cell, verdicts, seconds = future.result()
                        writer.cell(cell.id, verdicts, seconds)
                        progress("end", cell, verdicts)
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
            writer.footer()
        except KeyboardInterrupt:
            pass  # without the footer the file says that it is incomplete
        order = {cell.id: number for number, cell in enumerate(plan.cells)}
        writer.results.verdicts.sort(key=lambda v: order[v.cell])
        return writer.results


def _tail(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-3:])
