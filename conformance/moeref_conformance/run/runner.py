"""The whole run: every cell of a plan runs once, its rules are judged, and the verdicts are written as they come."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.results import Results, Verdict, Writer
from moeref_conformance.judges import Case
from moeref_conformance.plan.plan import RunPlan, is_one_rank
from moeref_conformance.run.header import header
from moeref_conformance.run.machinery import Machinery, Worlds, machinery
from moeref_conformance.run.verdicts import describe, judged, not_judged
from moeref_conformance.run.verdicts import verdict as make_verdict

#: The one-rank run of a variant, and why there is none.
Baseline = tuple[Observation | None, str]
#: A cell, its verdicts, and how many seconds its run took.
Judged = tuple[Cell, list[Verdict], float]
#: Called with "begin" or "end", the cell, and at the end its verdicts.
Progress = Callable[[str, Cell, list[Verdict]], None]


def run(
    plan: RunPlan,
    out: Path,
    progress: Progress,
    parts: Machinery | None = None,
    interrupted: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Run all cells of a plan, writing `out/results.jsonl` as they finish.

    `progress` is called with "begin" from worker threads. After Ctrl-C `interrupted` is called with the results so far,
    and once the worlds have ended these are returned; their file has no footer and therefore counts as incomplete.
    """
    with (
        Writer(out / "results.jsonl", header(plan)) as writer,
        suppress(KeyboardInterrupt),
        ExitStack() as opened,
    ):
        try:
            futures = opened.enter_context(_judging(plan, progress, parts))
            for future in as_completed(futures):
                cell, verdicts, seconds = future.result()
                writer.cell(cell.id, verdicts, seconds)
                progress("end", cell, verdicts)
            writer.footer()
        except KeyboardInterrupt:
            interrupted(_sorted(writer.results))  # before worlds are closed, which takes seconds
            raise
    return _sorted(writer.results)


def _sorted(results: Results) -> Results:
    order = {cell["id"]: number for number, cell in enumerate(results.header["cells"])}
    results.verdicts.sort(key=lambda verdict: order[verdict.cell])
    return results


@contextmanager
def _judging(plan: RunPlan, progress: Progress, parts: Machinery | None) -> Iterator[list[Future[Judged]]]:
    """Cells under way. One-rank cells, which others wait for, start first."""
    with _threads(plan.workers) as pool, Runner.opened(plan, parts) as runner:

        def judge(cell: Cell) -> Judged:
            progress("begin", cell, [])
            return cell, *runner.cell(cell)

        try:
            yield [pool.submit(judge, cell) for cell in sorted(plan.cells, key=lambda cell: not is_one_rank(cell))]
        except BaseException:  # no cell may begin while worlds end
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _threads(number: int) -> Iterator[Executor]:
    """A pool of threads. After an error nobody waits for them: the oracle computes for seconds."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class Runner:
    """Runs and judges cells of a plan; every cell runs once. Call `cell` from one or several threads."""

    def __init__(self, plan: RunPlan, parts: Machinery, worlds: Worlds, folder: Path) -> None:
        self.plan = plan
        self._parts, self._worlds, self._dir = parts, worlds, folder
        self._expecting = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._baselines: dict[str, Baseline] = {}
        self._done: dict[str, tuple[list[Verdict], float]] = {}
        self._over = False

    @classmethod
    @contextmanager
    def opened(cls, plan: RunPlan, parts: Machinery | None = None) -> Iterator[Runner]:
        """A runner with open worlds."""
        parts = parts or machinery()
        with (
            tempfile.TemporaryDirectory(prefix="moeref-conformance-", ignore_cleanup_errors=True) as folder,
            # Apart from the records and inputs of ranks: nothing that is expected lies in a folder above theirs.
            tempfile.TemporaryDirectory(prefix="moeref-expected-", ignore_cleanup_errors=True) as apart,
            _threads(1) as beside,
            Worlds(plan, parts, Path(folder)) as worlds,
        ):
            runner = cls(plan, parts, worlds, Path(apart))
            try:
                runner._open(beside)
                yield runner
            finally:
                runner._over = True

    def _open(self, beside: Executor) -> None:
        """Open the worlds of the cells that run, and of the one-rank cells they are compared with."""
        cells = [cell for cell in self.plan.cells if self._runs(cell)]
        one_rank = {cell.id: cell for cell in map(self.plan.one_rank, cells)}
        self._locks = {cell_id: threading.Lock() for cell_id in one_rank}
        # Both are slow: the oracle makes the first model while the worlds start in this thread.
        for cell in cells[:1]:
            beside.submit(self._expected, cell)
        backends = {cell.backend for cell in cells}
        more = {cell.backend: cell for cell in one_rank.values() if self._runs(cell)}
        self._worlds.open([*cells, *(cell for backend, cell in more.items() if backend not in backends)])

    def cell(self, cell: Cell) -> tuple[list[Verdict], float]:
        """Verdicts of all rules that apply to the cell's backend, and how many seconds its run took."""
        if cell.id not in self._done:
            self._done[cell.id] = self._judge(cell)
        return self._done[cell.id]

    def _judge(self, cell: Cell) -> tuple[list[Verdict], float]:
        rules = self.plan.rules_of(cell)
        verdicts = not_judged(self.plan, cell, rules, self._gap(cell))
        pending = [rule for rule in rules if rule.id not in verdicts]
        if not pending:
            return list(verdicts.values()), 0.0
        try:
            case, no_baseline = self._case(cell)
        except Exception as error:  # the kit's own failure: the target is not to blame and the run goes on
            reason = describe(error)
            verdicts |= {rule.id: make_verdict(self.plan, cell, rule, "error", reason=reason) for rule in pending}
            return [verdicts[rule.id] for rule in rules], 0.0
        for rule in pending:
            judge = self._parts.judges.get(rule.id)
            verdicts[rule.id] = judged(self.plan, case, rule, judge, verdicts, no_baseline)
        if not is_one_rank(cell):
            self._worlds.forget(cell)
        return [verdicts[rule.id] for rule in rules], case.observation.seconds if case.observation else 0.0

    def _runs(self, cell: Cell) -> bool:
        return self.plan.claims.why_not(cell) is None and not self._gap(cell)

    def _gap(self, cell: Cell) -> str:
        """Why the cell cannot run here; empty if it can."""
        no_world = "" if self._parts.world_of(cell) in self._parts.worlds else f"this kit has no world {cell.backend}"
        return self.plan.lacks(cell) or no_world

    def _case(self, cell: Cell) -> tuple[Case, str]:
        """What judges look at: the run of the cell and its baseline. The text says why there is no baseline."""
        static = cell.backend == "static"
        one_rank, no_baseline = (None, "") if static else self._baseline(self.plan.one_rank(cell))
        expected = self._expected(cell)
        own = one_rank is not None and one_rank.cell == cell
        observation = one_rank if own else self._worlds.observe(cell, expected.inputs)
        case = Case(cell=cell, expected=expected, observation=observation, baseline=one_rank, claims=self.plan.claims)
        if one_rank is None or not one_rank.crashes:
            return case, no_baseline
        case.baseline = one_rank if own else None
        crash = one_rank.crashes[0]
        return case, f"the one-rank run {one_rank.cell.id} did not finish: {crash.step}: {crash.detail}"

    def _baseline(self, one_rank: Cell) -> Baseline:
        with self._locks[one_rank.id]:
            if one_rank.id not in self._baselines:
                self._baselines[one_rank.id] = self._run_baseline(one_rank)
        return self._baselines[one_rank.id]

    def _run_baseline(self, one_rank: Cell) -> Baseline:
        if why_not := self.plan.claims.why_not(one_rank):
            return None, f"the one-rank run is not claimed: {why_not}"
        if gap := self._gap(one_rank):
            return None, f"the one-rank run {gap}"
        try:
            return self._worlds.observe(one_rank, self._expected(one_rank).inputs), ""
        except Exception as error:  # other cells can be judged without it
            return None, f"the one-rank run {one_rank.id} has an error: {describe(error)}"

    def _expected(self, cell: Cell) -> Any:
        with self._expecting:
            if self._over:  # its folder is being deleted
                raise RuntimeError("the run has ended")
            return self._parts.expect(cell, self._dir)
