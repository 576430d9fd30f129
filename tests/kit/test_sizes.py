"""Published sizes in the kit: its data next to moeref's, its oracle next to saved files, static cells, mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit_toy import cells, prepared
from moeref_conformance.contract.api import Cell, Layout, NameRow
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.published_models import published
from moeref_conformance.oracles import published as oracle
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.run.machinery import machinery
from moeref_conformance.run.runner import Runner
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ForkedWorld
from moeref_conformance.worlds.static import StaticWorld

from moeref import families

#: A few seconds in sum: one of each of MLA, a dense prefix with MTP, and grouped-query attention.
CELLS = (
    "mixtral-8x7b/tp2-pp4-vpp2-ep8-etp1-w64/static",
    "moonlight-16b-a3b/tp4-pp4-ep8-etp1-first6-w64/static",
    "glm-4.7-flash/tp4-pp4-ep8-etp1-embedding-w128/static",
)


def test_both_data_sets_agree_key_by_key() -> None:
    # The kit has no recipe of Qwen3.5 beside its vision model, only of the text model alone.
    ours = {name: families.known(name)["model_type"] for name in families.published()}
    assert {name for name, family in ours.items() if family != "qwen3_5_moe"} == set(published())
    for name, size in published().items():
        known = families.known(name)
        text = known.pop("text_config", {})
        assert known == {key: size.config[key] for key in known}
        assert text == {key: size.config["text_config"][key] for key in text}
        assert families.sources()[name].repository == size.repository


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "glm_moe_dsa"),
        *("deepseek_v32", "minimax_m2"),
    ],
)
@pytest.mark.parametrize("expert_format", ["per_expert", "fused"])
def test_the_oracle_finds_what_transformers_saves(family: str, expert_format: str, tmp_path: Path) -> None:
    mtp = 1 if expert_format == "per_expert" and family in ("glm4_moe", "deepseek_v3", "qwen3_next") else 0
    cell = Cell(family=family, layout_name="one", layout=Layout(), layers=3, mtp=mtp, expert_format=expert_format)
    saved = expected(cell, tmp_path)
    config = {**saved.config, "num_nextn_predict_layers": mtp}
    found = oracle.derived(config, expert_format)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in saved.tensors.items()
    }


def test_a_count_that_is_not_the_published_one_stops_the_kit() -> None:
    size = published()["mixtral-8x7b"]
    found = oracle.tensors("mixtral-8x7b", "per_expert")
    oracle.check_counts(size, found)
    with pytest.raises(RuntimeError, match="mixtral-8x7b: transformers has 995 tensors, published are 996"):
        oracle.check_counts(replace(size, tensors=996), found)


@pytest.fixture(scope="module")
def kept_open() -> Iterator[AbstractContextManager[ForkedWorld]]:
    """One world for the cells of all runs, which none of them closes."""
    with ForkedWorld("moeref") as world:
        yield nullcontext(world)


@pytest.mark.ranks
@pytest.mark.parametrize("cell", CELLS)
def test_moeref_is_green_at_published_sizes(cell: str, kept_open: AbstractContextManager[ForkedWorld]) -> None:
    plan = prepared(target="moeref", matrix="static", cells=(cell,), rules=("NAM", "PLN"))
    with Runner.opened(plan, replace(machinery(), worlds={"gloo": lambda plan: kept_open})) as runner:
        verdicts, _ = runner.cell(plan.cells[0])
    judged = {v.rule: (v.status, v.reason) for v in verdicts if v.status != "disabled"}
    static = ("RUN-001", "NAM-001", "NAM-002", "NAM-003", "NAM-004", "NAM-007", "PLN-001")
    assert judged == dict.fromkeys(static, ("pass", ""))


def test_the_static_matrix_has_every_published_model_and_8192_ranks() -> None:
    found = matrices.load("static").cells
    assert {cell.size for cell in found} == set(published())
    assert max(cell.layout.world for cell in found) == 8192
    kimi = next(cell for cell in found if cell.size == "kimi-k2")
    assert (kimi.family, kimi.layers, kimi.dtype, kimi.mtp, kimi.tied) == ("kimi_k2", 61, "bfloat16", 0, False)
    assert kimi.id.startswith("kimi-k2/tp8")


GRID = """
schema = 1
name = "toy"
layouts = { wide = { tp = 2, pp = 4, ep = 8, etp = 1 } }
[[grid]]
layout = ["wide"]
backend = ["static"]
size = ["mixtral-8x7b"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mixtral-8x7b", "mixtral-8x7", "unknown size 'mixtral-8x7'; did you mean 'mixtral-8x7b'"),
        ('backend = ["static"]', 'backend = ["gloo"]', 'size needs backend = "static"'),
        ("[[grid]]", '[[grid]]\nfamily = ["mixtral"]', "family cannot go with size"),
        ("[[grid]]", "[[grid]]\ntied = true\nmtp = [1]", "tied, mtp cannot go with size"),
        ("etp = 1", "etp = 1, layers = 8", "layers=8 cannot go with size=mixtral-8x7b"),
        ("pp = 4", "pp = 3", "layout wide with mixtral-8x7b: 32 layers do not divide over pp·vpp=3"),
        ('size = ["mixtral-8x7b"]', "", "family"),
    ],
)
def test_mistakes_in_a_grid_of_sizes(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert [cell.id for cell in cells(GRID, tmp_path).cells] == ["mixtral-8x7b/wide/static"]
    with pytest.raises(BadInput, match=message):
        cells(GRID.replace(old, new), tmp_path)


class _Fresh(MoerefTarget):
    """moeref, with a new list for every table that is asked for, emptied when the next one is."""

    @contextmanager
    def open(self, cell: Cell, world: Any) -> Any:
        with super().open(cell, world) as session:
            given: list[NameRow] = []

            def table(rank: int) -> list[NameRow]:
                given.clear()
                given.extend(session.names.table(rank))
                return given

            yield SimpleNamespace(names=SimpleNamespace(table=table), plan=session.plan, seeds=session.seeds)


def test_equal_tables_are_kept_once_because_they_are_equal(tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2, ep=2, etp=1, world=16)
    cell = Cell(family="qwen3_moe", layout_name="many", layout=layout, layers=2, backend="static")
    inputs = expected(cell, tmp_path).inputs
    kept = StaticWorld(_Fresh()).run(cell, tmp_path / "fresh", inputs, _Fresh.claims).events
    tables = [kept[rank][0]["value"] for rank in range(16)]
    same = [[a is b for b in tables] for a in tables]
    assert same == [[a == b for b in tables] for a in tables]
    # pp 2 · (tp, ep) 2: with etp 1 both are the rank's last bit.
    assert len({id(table) for table in tables}) == 4
    shared = StaticWorld(MoerefTarget()).run(cell, tmp_path / "shared", inputs, MoerefTarget.claims).events
    assert [shared[rank][0]["value"] for rank in range(16)] == tables


def test_a_row_that_is_not_plain_is_refused_by_name(tmp_path: Path) -> None:
    import torch

    class Odd(MoerefTarget):
        @contextmanager
        def open(self, cell: Cell, world: Any) -> Any:
            with super().open(cell, world) as session:
                rows = [replace(row, dtype=torch.float32) for row in session.names.table(0)]
                yield SimpleNamespace(names=SimpleNamespace(table=lambda rank: rows), plan=None, seeds=None)

    cell = Cell(family="qwen3_moe", layout_name="one", layout=Layout(), layers=2, backend="static")
    found = StaticWorld(Odd()).run(cell, tmp_path / "odd", expected(cell, tmp_path).inputs, Odd.claims)
    told = "expected a dtype as text, such as 'float32', the target gave torch.float32 in NameRow("
    assert told in found.events[0][0]["error"]["message"]
