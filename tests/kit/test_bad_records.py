"""Records that are none: an error of their cell, and of no other."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from kit_toy import ToyWorld, run
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.records import EVENTS
from moeref_conformance.resolve import resolve
from moeref_conformance.worlds.dump import DumpWorld

pytestmark = pytest.mark.cpu
TP2, OTHER = "qwen3_moe/tp2/gloo", "qwen3_moe/pp2-vpp2/gloo"


BAD_LINES = {
    "text": "not json",
    "list": "[]",
    "empty": "{}",
    "no phase": '{"step": "load"}',
    "step is a number": '{"step": 1, "phase": "ok"}',
    "no error": '{"step": "load", "phase": "raised"}',
    "deep": "[" * 100_000,
    "number": "9" * 5000,
    "nul": "\x00",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_of_a_rank_is_an_error_of_its_cell(tmp_path, line):
    class Spoilt(ToyWorld):
        def run(self, cell, cell_dir, inputs, claims):
            outcome = super().run(cell, cell_dir, inputs, claims)
            if cell.id == TP2:
                file = cell_dir / "rank0001" / EVENTS
                file.write_text(f"{line}\n{file.read_text()}")
            return outcome

    results = run(tmp_path, Spoilt())
    verdict = results.table[TP2]["RUN-001"]
    assert verdict.status == "error"
    assert "rank0001/events.jsonl:1: not" in verdict.reason
    assert {v.status for v in results.table[OTHER].values()} == {"pass", "unclaimed"}


def record(folder: Path, cell: str, rank: int, *lines: str) -> None:
    where = folder / cell.replace("/", "__") / f"rank{rank:04d}"
    where.mkdir(parents=True)
    (where / EVENTS).write_text("".join(f"{line}\n" for line in lines))


def test_a_bad_line_of_a_dump_is_an_error_of_its_cell(tmp_path):
    told = '{"step": "topology", "phase": "ok", "value": {}}'
    closed = '{"step": "close", "phase": "ok", "value": false}'
    for cell in (TP2, OTHER):
        record(tmp_path / "dump", cell, 0, told, closed)
        record(tmp_path / "dump", cell, 1, *(["{", closed] if cell == TP2 else [told, closed]))
    spec = f"dump:{tmp_path / 'dump'}"
    results = run(tmp_path, nullcontext(DumpWorld(resolve(spec))), {"target": spec})
    assert results.complete
    verdict = results.table[TP2]["RUN-001"]
    assert verdict.status == "error"
    assert verdict.reason.startswith(f"{tmp_path / 'dump'}/qwen3_moe__tp2__gloo/rank0001/events.jsonl:1: not JSON")
    assert results.table[OTHER]["RUN-001"].status == "pass"
    assert results.exit_code == 2


def lacking(case):
    """A judge that reads what the records of a newer version have."""
    return Outcome(met=str([record.value("topology")["newer"] for record in case.observation.ranks]))


def test_a_dump_that_an_older_version_recorded_is_to_be_recorded_again(tmp_path):
    told = '{"step": "topology", "phase": "ok", "value": {}}'
    closed = '{"step": "close", "phase": "ok", "value": false}'
    for rank in (0, 1):
        record(tmp_path / "dump", TP2, rank, told, closed)
    spec = f"dump:{tmp_path / 'dump'}"
    results = run(tmp_path, nullcontext(DumpWorld(resolve(spec))), {"target": spec}, TOP_001=lacking)
    verdict = results.table[TP2]["TOP-001"]
    assert (verdict.status, results.table[TP2]["RUN-001"].status) == ("untested", "pass")
    assert verdict.reason.startswith("the record of topology lacks what TOP-001 reads")
    assert verdict.reason.endswith("(KeyError: 'newer'): record again with this version of the kit")
    assert results.exit_code != 2


def test_a_judge_that_fails_on_a_run_is_an_error_of_the_kit(tmp_path):
    results = run(tmp_path, ToyWorld(), TOP_001=lambda case: {}["newer"])
    assert results.table[TP2]["TOP-001"].status == "error"


def test_cells_are_judged_although_their_one_rank_run_has_an_error(tmp_path):
    trouble = lambda cell: RunOutcome((), 0.1, error="it broke") if cell.layout.world == 1 else None  # noqa: E731

    def needs_baseline(case):
        return Outcome() if case.baseline else Outcome(untested="there is no one-rank run")

    results = run(tmp_path, ToyWorld(trouble), EXP_007=needs_baseline)
    assert results.table["qwen3_moe/one/gloo"]["RUN-001"].status == "error"
    assert results.table[TP2]["RUN-001"].status == "pass"
    assert "the one-rank run qwen3_moe/one/gloo has an error: RuntimeError: world gloo: it broke" in (
        results.table[TP2]["EXP-007"].reason
    )
