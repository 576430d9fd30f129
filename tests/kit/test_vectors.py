"""Vectors as data: the golden copies are what the oracles say now, keep to their schema, and moeref gives the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moeref_conformance import cli
from moeref_conformance.oracles import dispatch
from moeref_conformance.plan.matrix import load
from moeref_conformance.run.vectors import SCHEMA, text, vectors

from moeref import bridge, families, seeds
from moeref.layout import Layout

pytestmark = pytest.mark.cpu
GOLDEN = Path(__file__).parents[1] / "golden" / "vectors"
CELLS = ("qwen3_moe+L8/pp2-vpp2/gloo", "qwen3_moe/tp2-pp2-ep2-etp1/gloo", "qwen3_moe+R3/tp2-ep2/gloo")
FILES = {cell: GOLDEN / f"{cell.replace('/', '__')}.json" for cell in CELLS}


def golden(cell: str) -> dict[str, Any]:
    return dict(json.loads(FILES[cell].read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expected")


def test_every_golden_copy_is_of_a_cell() -> None:
    assert sorted(FILES.values()) == sorted(GOLDEN.glob("*__*.json"))


@pytest.mark.parametrize("cell", CELLS)
def test_golden_copies_are_what_the_oracles_say(cell: str, work: Path) -> None:
    """Where a recipe has changed: `moeref-conformance vectors --cell … --out DIR` writes them anew."""
    (found,) = load("smoke").select([cell])
    assert FILES[cell].read_text(encoding="utf-8") == text(vectors(found, work))


@pytest.mark.parametrize("cell", CELLS)
def test_golden_copies_keep_to_the_schema(cell: str) -> None:
    validator = pytest.importorskip("jsonschema", reason="pip install --group test brings jsonschema").validate
    schema = json.loads((GOLDEN / SCHEMA).read_text(encoding="utf-8"))
    validator(golden(cell), schema)
    assert set(golden(cell)) == set(schema["required"]) == set(schema["properties"])


@pytest.mark.parametrize("cell", CELLS)
def test_moeref_gives_the_same(cell: str) -> None:
    want = golden(cell)
    layout, model = Layout.parse(want["layout"]), families.read(want["config"])
    table = bridge.ShardMap(model, layout)
    stages = layout.stages(model.num_layers).layers
    assert {(s["pp"], s["virtual"]): tuple(s["layers"]) for s in want["stages"]} == dict(stages)
    for rank in want["ranks"]:
        held = table.local_shards(rank["rank"])
        assert sorted({t.name for shard in held if shard.param.exports for t in shard.param.hf}) == rank["tensors"]
        at = layout.coords(rank["rank"])
        assert {name: getattr(at, name) for name in rank["coords"]} == rank["coords"]
        for given in rank["seeds"]:
            made = seeds.rank_seeds(layout, rank["rank"], given["seed"], per_dp=given["per_dp"])
            assert made.generators == {k: v for k, v in given.items() if k not in ("seed", "per_dp")}


@pytest.mark.parametrize("cell", CELLS)
def test_padding_splits_and_nothing_shorter_does(cell: str) -> None:
    want = golden(cell)
    (found,) = load("smoke").select([cell])
    assert {row["precision"] for row in want["padding"]} == set(dispatch.GEMM_ROWS)
    for row in want["padding"]:
        shorter = [dispatch.rank_rows(found.layout, (n,), n) for n in range(row["length"], row["padded"])]
        assert row["rows"] * found.layout.tp == row["padded"]  # no context parallelism here
        assert row["rows"] % dispatch.GEMM_ROWS[row["precision"]] == 0
        assert [rows for rows in shorter if rows is not None and rows % dispatch.GEMM_ROWS[row["precision"]] == 0] == []


def test_routes_are_there_where_an_engine_sends_them() -> None:
    sent = golden("qwen3_moe+R3/tp2-ep2/gloo")["routes"]
    assert [sample["shape"] for sample in sent] == [[15, 4, 3], [15, 4, 3]]
    rows = [row for sample in sent for token in sample["experts"] for row in token]
    assert all(len(set(row)) == 3 or set(row) == {-1} for row in rows)
    assert {-1} in map(set, rows)
    assert golden("qwen3_moe+L8/pp2-vpp2/gloo")["routes"] == []


def test_a_folder_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vectors", "--out", str(tmp_path)]) == 2
    assert "exists; name a folder that does not" in capsys.readouterr().err
