"""The process that judges imports no target: it gets plain facts and records, and nothing in a target changes it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_static
from moeref_conformance import cli
from moeref_conformance.contract import facts
from moeref_conformance.contract.api import Cell, Claims, Info, Layout
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.records import Observation
from moeref_conformance.contract.results import read
from moeref_conformance.resolve import resolve
from moeref_conformance.worlds import forked
from moeref_conformance.worlds.forked import ForkedWorld
from moeref_conformance.worlds.plain import packed, unpacked

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
MATRIX = """
schema = 1
name = "apart"
layouts = { one = { layers = 2 }, ep4 = { ep = 4, layers = 2 } }
[[grid]]
backend = ["static"]
family = ["qwen3_moe"]
layout = ["ep4"]
[[grid]]
backend = ["gloo"]
family = ["qwen3_moe"]
layout = ["one"]
gradients = false
"""


def test_a_target_that_patches_the_kit_changes_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    start = forked._Server.start
    monkeypatch.setattr(forked._Server, "start", lambda *given: (started.append(given[0]), start(*given))[1])
    (tmp_path / "apart.toml").write_text(MATRIX)
    run = ["run", "--target", "toy_patching:target", "--matrix", str(tmp_path / "apart.toml"), "--jobs", "1"]
    assert cli.main([*run, "--out", str(tmp_path / "out")]) == 1
    assert "toy_patching" not in sys.modules
    assert started == ["toy_patching:target"]  # one process imports it for both worlds
    results = read(tmp_path / "out" / "results.jsonl")
    red = {cell: {v.rule for v in rows.values() if v.status == "fail"} for cell, rows in results.table.items()}
    assert red == {"qwen3_moe+L2/ep4/static": {"PLN-001"}, "qwen3_moe+L2/one/gloo": {"EXP-002", "EXP-004"}}
    assert results.header["target"]["name"] == "faulty:plan-of-local-experts+gate-and-up-swapped"


@pytest.mark.parametrize("spec", ["moeref", "toy_static:target", "benign:all-ranks-receive"])
def test_facts_are_what_the_target_says(spec: str) -> None:
    target = resolve(spec)
    told = facts.Facts.of(facts.as_plain(target))
    assert (told.info, told.claims) == (target.info, target.claims)
    assert unpacked(packed(told.claims)) == told.claims  # no class of the target's is left in it


def test_claims_of_another_class_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clever(Claims):
        def why_not(self, cell: Cell) -> str | None:
            return None

    claims = Clever(facets=frozenset(), families=frozenset(), backends=frozenset())
    with pytest.raises(BadInput, match=r"'clever': its claims are a .*Clever, a subclass of api.Claims.* give an api"):
        facts.as_plain(SimpleNamespace(info=Info(name="clever", version="1"), claims=claims))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtp": True}, "claims.mtp is True, not int"),
        ({"lends": 0}, "claims.lends is 0, not bool"),
        ({"tied": "no"}, "claims.tied is 'no', not bool"),
        ({"limits": {"vpp": 1.0}}, r"claims.limits is {'vpp': 1.0}, not Mapping\[str, int\]"),
        ({"facets": "names"}, r"claims.facets is 'names', not frozenset\[str\]"),
        ({"api": True}, "info.api is True, not int"),
        ({"version": 1.0}, "info.version is 1.0, not str"),
    ],
)
def test_facts_have_the_types_of_their_fields(
    changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {name: value for name, value in changes.items() if name in ("api", "version")}
    claims = {name: value for name, value in changes.items() if name not in info}
    target = SimpleNamespace(
        info=replace(toy_static.Toy.info, **info), claims=replace(toy_static.Toy.claims, **claims), open=print
    )
    monkeypatch.setitem(sys.modules, "toy_typed", SimpleNamespace(target=target))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=f"target 'toy_typed:target': {says}"):
        resolve("toy_typed:target")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"vvp": 1}, "'vvp': unknown field 'vvp'; did you mean 'vpp'\\?"),
        ({"qwen3_mo.cp": 1}, "'qwen3_mo.cp': unknown family 'qwen3_mo'; did you mean 'qwen3_moe'\\?"),
        ({"family": 1}, "'family': unknown field 'family'"),
    ],
)
def test_a_limit_of_nothing_is_refused(limits: dict[str, int], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = replace(toy_static.Toy.claims, families=frozenset({"qwen3_moe"}), limits=limits)
    target = SimpleNamespace(info=toy_static.Toy.info, claims=claims, open=print)
    monkeypatch.setitem(sys.modules, "toy_limited", SimpleNamespace(target=target))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=f"target 'toy_limited:target': claims.limits: {says}"):
        resolve("toy_limited:target")


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("import no_such_module", "cannot import refuses: No module named 'no_such_module'"),
        ("raise OSError('no licence')", "importing refuses raises OSError: no licence, at {folder}/refuses.py:1"),
        ("raise SystemExit(0)", "importing refuses raises SystemExit: 0, at {folder}/refuses.py:1"),
        ("def broken(:", "importing refuses raises SyntaxError: invalid syntax (refuses.py, line 1)"),
        ("one = 1", "refuses has no 'target'; known: one\n"),
    ],
)
def test_what_an_import_raises_is_told_in_one_sentence(
    module: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "refuses.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["smoke", "--target", "refuses:target", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"moeref-conformance: target 'refuses:target': {says.format(folder=tmp_path).rstrip()}\n")
    assert "Traceback" not in told
    assert "of the kit" not in told
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def world() -> Iterator[ForkedWorld]:
    with ForkedWorld("toy_static:target", deadline=3, grace=1) as found:
        yield found


def asked(world: ForkedWorld, folder: Path, behaviour: str) -> tuple[RunOutcome, Observation]:
    cell = Cell(family="toy", layout_name="tp2", layout=Layout(tp=2), backend="static", tags=(behaviour,))
    outcome = world.run(cell, folder, {"hf_config": "."}, toy_static.Toy.claims)
    assert not outcome.error
    return outcome, Observation.read(cell, folder, outcome)


def test_a_static_cell_answers_for_all_ranks(world: ForkedWorld, tmp_path: Path) -> None:
    outcome, seen = asked(world, tmp_path, "plain")
    assert [(end.rank, end.kind) for end in outcome.exits] == [(0, "ok"), (1, "ok")]
    assert [record.value("names") for record in seen.ranks] == [(toy_static.ROW,)] * 2
    assert seen.ranks[0].value("names") is seen.ranks[1].value("names")
    assert (tmp_path / "rank0000" / "stdout.txt").read_text() == "opened\n"
    assert not (tmp_path / "rank0000" / "answer").exists()


def test_values_of_a_targets_own_classes_arrive_plain(world: ForkedWorld, tmp_path: Path) -> None:
    _, seen = asked(world, tmp_path, "odd")
    (row,) = seen.ranks[0].value("names")
    assert row == toy_static.ROW
    assert [type(value) for value in (row.chunk, row.shape, row.shape[0], row.dtype)] == [int, tuple, int, str]


@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        ("foreign", "raised", "a Row of toy_static: expected plain values and data classes of the api"),
        ("hangs", "hung", "waits at toy_static.py:"),
        ("exits", "died", "left with exit code 0 in step names before its work was over"),
        ("crashes", "died", "died in step names: SIGSEGV"),
        ("leaves", "raised", "SystemExit"),
    ],
)
def test_a_static_cell_that_fails_is_a_crash_of_the_target(
    world: ForkedWorld, tmp_path: Path, behaviour: str, kind: str, says: str
) -> None:
    _, seen = asked(world, tmp_path, behaviour)
    (crash,) = seen.crashes
    assert (crash.step, crash.kind) == ("names", kind)
    assert says in crash.detail
    _, seen = asked(world, tmp_path / "next", "plain")
    assert not seen.crashes


def test_a_message_that_names_anything_else_is_not_read() -> None:
    assert unpacked(packed({"a": (1, None, b"x", {"y"})})) == {"a": (1, None, b"x", {"y"})}
    assert unpacked(packed(RankExit(0))) == RankExit(0)
    with pytest.raises(pickle.UnpicklingError, match=r"names toy_static.Row, which is neither plain nor the kit's"):
        unpacked(pickle.dumps(toy_static.Row(**vars(toy_static.ROW))))
    with pytest.raises(pickle.UnpicklingError, match=r"names builtins.eval"):
        unpacked(pickle.dumps(eval))
    with pytest.raises(TypeError, match="a function of builtins: expected plain"):
        packed(cli.main)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "faulty:qkv",
            "unknown fault 'qkv'; did you mean one of .*, qkv-as-q-k-v, .*; docs/reference/faults.md has all",
        ),
        ("faulty:qkv-as-q-k-v+qkv-as-qkv", "unknown fault 'qkv-as-qkv'; did you mean 'qkv-as-q-k-v'"),
        ("faulty:xyzzy", "unknown fault 'xyzzy'; docs/reference/faults.md has all"),
        ("benign:xyzzy", "unknown benign target 'xyzzy'; selftest/benign.py has all"),
    ],
)
def test_an_unknown_id_is_told_those_that_hold_it_or_the_nearest(spec: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        resolve(spec)
