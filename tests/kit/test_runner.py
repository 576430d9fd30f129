"""Which status a rule gets in a cell, and that every cell and baseline runs once."""

import threading

import pytest
from kit_toy import Target, ToyWorld, failing, machinery, make_plan, run
from moeref_conformance.contract.api import Claims
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.contract.rules import PROFILES
from moeref_conformance.plan.plan import repeat
from moeref_conformance.run.runner import Runner
from moeref_conformance.run.runner import run as run_plan

TP2 = "qwen3_moe/tp2/gloo"


def statuses(results, cell=TP2):
    return {rule: verdict.status for rule, verdict in results.table[cell].items()}


def test_unclaimed_cells_and_facets_say_why(tmp_path):
    world = ToyWorld()
    results = run(tmp_path, world)
    rows = results.table["glm4_moe/tp2/gloo"]
    assert {v.status for v in rows.values()} == {"unclaimed"}
    assert rows["EXP-002"].reason == "family=glm4_moe is not claimed (claimed: qwen3_moe)"
    assert results.table[TP2]["FWD-002"].reason == "the target does not claim forward"
    assert "glm4_moe/tp2/gloo" not in world.ran
    assert results.exit_code == 0


def test_rows_that_require_a_failed_rule_are_untested(tmp_path):
    results = run(tmp_path, EXP_006=failing())
    assert statuses(results)["EXP-006"] == "fail"
    verdict = results.table[TP2]["EXP-012"]
    assert (verdict.status, verdict.reason) == ("untested", "requires EXP-006, which did not pass (fail)")
    assert statuses(results)["EXP-001"] == "pass"
    assert results.exit_code == 1


def test_judge_may_say_that_it_cannot_tell(tmp_path):
    results = run(tmp_path, EXP_007=lambda case: Outcome(untested="no baseline"))
    assert results.table[TP2]["EXP-007"].reason == "no baseline"
    assert results.exit_code == 0


def test_judge_that_raises_is_an_error_of_the_kit(tmp_path):
    def broken(case):
        raise KeyError("plan")

    results = run(tmp_path, EXP_004=broken)
    verdict = results.table[TP2]["EXP-004"]
    assert verdict.status == "error"
    assert "KeyError: 'plan'" in verdict.reason
    assert statuses(results)["EXP-001"] == "pass"
    assert results.exit_code == 2


def test_world_that_breaks_is_an_error_of_the_kit(tmp_path):
    trouble = lambda cell: RunOutcome((), 0.1, error="the fork server died") if cell.layout.tp == 2 else None  # noqa: E731
    results = run(tmp_path, ToyWorld(trouble))
    assert statuses(results)["RUN-001"] == "error"
    assert "the fork server died" in results.table[TP2]["EXP-001"].reason
    assert statuses(results, "qwen3_moe/pp2-vpp2/gloo")["EXP-001"] == "pass"


def test_selection_disables_and_keeps_prerequisites(tmp_path):
    results = run(tmp_path, settings={"rules": ("EXP-012",), "cells": ("*/tp2/*",)})
    judged = {rule for rule, status in statuses(results).items() if status == "pass"}
    assert judged == {"RUN-001", "EXP-006", "EXP-012"}
    assert statuses(results)["EXP-001"] == "disabled"
    assert list(results.table) == [TP2, "glm4_moe/tp2/gloo"]


def test_baseline_runs_first_once_and_is_reused(tmp_path):
    world, seen = ToyWorld(), {}

    def look(case):
        seen[case.cell.id] = (case.baseline, case.observation)
        return Outcome()

    run(tmp_path, world, EXP_007=look)
    assert world.ran == ["qwen3_moe/one/gloo", TP2, "qwen3_moe/pp2-vpp2/gloo"]
    baseline = seen["qwen3_moe/one/gloo"][1]
    assert all(pair[0] is baseline for pair in seen.values())
    assert baseline.ranks[0].value("load") == "qwen3_moe/one/gloo"


def test_baseline_that_is_not_selected_runs_and_is_not_reported(tmp_path):
    world = ToyWorld()
    results = run(tmp_path, world, {"cells": (TP2,)})
    assert world.ran == ["qwen3_moe/one/gloo", TP2]
    assert list(results.table) == [TP2]


def test_rule_that_lacks_the_baseline_says_what_became_of_it(tmp_path):
    died = (RankExit(0, None, 9, False, "load", "killed", "tp0"),)
    trouble = lambda cell: RunOutcome(died, 0.1) if cell.layout.world == 1 else None  # noqa: E731

    def needs_baseline(case):
        return Outcome() if case.baseline else Outcome(untested="there is no one-rank run")

    results = run(tmp_path, ToyWorld(trouble), EXP_007=needs_baseline)
    assert "(the one-rank run qwen3_moe/one/gloo did not finish: load: " in results.table[TP2]["EXP-007"].reason


def test_world_that_this_machine_or_kit_lacks(tmp_path):
    (tmp_path / "toy.toml").write_text(
        'schema = 1\nname = "toy"\nlayouts = { one = {} }\n'
        '[[grid]]\nlayout = ["one"]\nbackend = ["nccl"]\nfamily = ["qwen3_moe"]'
    )
    claims = Claims(facets=frozenset({"export"}), families=frozenset({"qwen3_moe"}), backends=frozenset({"nccl"}))
    wide = Target()
    wide.claims = claims
    import kit_toy

    kit_toy.wide = wide
    results = run(tmp_path, settings={"target": "kit_toy:wide"})
    verdict = results.table["qwen3_moe/one/nccl"]["EXP-002"]
    assert verdict.status == "untested"
    assert "needs a GPU" in verdict.reason or "has no world nccl" in verdict.reason
    assert results.exit_code == 3
    assert results.headline.verdicts == f"undecided on {PROFILES['weights']}"
    untested = [v for v in results.verdicts if v.status == "untested" and results.decides(v.rule)]
    assert (results.headline.passing, results.headline.claimed) == (0, len(untested))


def test_ctrl_c_leaves_a_file_that_says_it_is_incomplete(tmp_path):
    plan = make_plan(tmp_path)

    def progress(event, cell, verdicts):
        if event == "end":
            raise KeyboardInterrupt

    results = run_plan(plan, tmp_path / "out", progress, machinery(ToyWorld()))
    assert not results.complete
    assert results.exit_code == 3
    assert "footer" not in (tmp_path / "out" / "results.jsonl").read_text()


def test_two_jobs_keep_the_order_of_the_matrix(tmp_path):
    held = threading.Event()

    def trouble(cell):
        if cell.id == TP2:
            held.wait(10)
        elif cell.layout.vpp == 2:
            held.set()

    results = run(tmp_path, ToyWorld(trouble), {"jobs": 2})
    assert [v.cell for v in results.verdicts if v.rule == "RUN-001"] == [c["id"] for c in results.header["cells"]]
    assert held.is_set()


def test_cells_run_once_even_when_asked_again(tmp_path):
    plan, world = make_plan(tmp_path), ToyWorld()
    with Runner.opened(plan, machinery(world)) as runner:
        assert runner.cell(plan.cells[1]) == runner.cell(plan.cells[1])
    assert world.ran == ["qwen3_moe/one/gloo", TP2]


def test_repeat_selects_exactly_one_cell_and_the_rule(tmp_path):
    plan = make_plan(tmp_path, deadline=7.0)
    line = repeat(plan.settings, plan.cells[1], plan.rules["EXP-002"])
    assert line.startswith("moeref-conformance run --target kit_toy:target --matrix ")
    assert line.endswith(f"--cell {TP2} --rule EXP-002 --deadline 7")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "kit_toy:nothing"}, "has no 'nothing'"),
        ({"target": "kit_toy:MATRIX"}, "'info' is missing; 'claims' is missing"),
        ({"target": "morf"}, "unknown target 'morf'"),
        ({"deadline": 0.0}, "more than 0"),
        ({"jobs": -1}, "at least 1"),
        ({"cells": ("x*",)}, "no cell or tag matches"),
        ({"rules": ("ZZZ",)}, "no rule starts with"),
    ],
)
def test_bad_input_is_refused_before_work(tmp_path, settings, message):
    with pytest.raises(BadInput, match=message):
        make_plan(tmp_path, **settings)


def test_selection_that_leaves_no_rule_to_judge_is_refused(tmp_path):
    (tmp_path / "toy.toml").write_text(
        'schema = 1\nname = "toy"\nlayouts = { one = {} }\n'
        '[[grid]]\nlayout = ["one"]\nbackend = ["static"]\nfamily = ["qwen3_moe"]'
    )
    with pytest.raises(BadInput, match="can be judged"):
        make_plan(tmp_path, rules=("LOD",))


def test_static_target_that_raises_is_one_red_row_and_the_rest_untested(tmp_path):
    from contextlib import contextmanager, nullcontext
    from types import SimpleNamespace

    import kit_toy
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.run.machinery import Machinery
    from moeref_conformance.worlds.static import StaticWorld

    class Broken(Target):
        @contextmanager
        def open(self, cell, world):
            def table(rank):
                raise IndexError(f"no rank {rank} of {world.size}")

            yield SimpleNamespace(names=SimpleNamespace(table=table), export=None, forward=None)

    (tmp_path / "toy.toml").write_text(
        'schema = 1\nname = "toy"\nlayouts = { big = { tp = 8, ep = 64, etp = 1 } }\n'
        '[[grid]]\nlayout = ["big"]\nbackend = ["static"]\nfamily = ["qwen3_moe"]'
    )
    kit_toy.broken = Broken()
    plan = make_plan(tmp_path, target="kit_toy:broken")
    parts = Machinery(
        worlds={"static": lambda plan: nullcontext(StaticWorld(kit_toy.broken))},
        expect=lambda cell, folder: SimpleNamespace(inputs={"hf_config": str(folder)}),
        judges=JUDGES,
    )
    with Runner.opened(plan, parts) as runner:
        verdicts, _ = runner.cell(plan.cells[0])
    claimed = {v.rule: v for v in verdicts if v.status != "unclaimed"}
    red = claimed.pop("RUN-001")
    assert red.status == "fail"
    assert [f.message for f in red.findings] == ["raised in step names: IndexError: no rank 0 of 64"]
    assert {v.status for v in claimed.values()} == {"untested"}
    assert claimed["NAM-001"].reason == "rank 0 raised in step names"
