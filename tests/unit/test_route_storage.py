"""Routes in files: safetensors, and payloads as a column of bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moeref.dispatcher.padding import pad_experts
from moeref.replay import RouteError, Routes, pad, read, routes, spread_experts, storage, to_tokens, write
from tests.unit.routes import any_routes, random_routes


@given(samples=st.lists(any_routes(), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_is_loaded(samples: list[Routes], tmp_path: Path) -> None:
    made = {f"sample/{i}": pad(to_tokens(s, s.tokens + 1, start=s.start)[0], left=i) for i, s in enumerate(samples)}
    storage.save(tmp_path / "routes.safetensors", made)
    back = storage.load(tmp_path / "routes.safetensors")
    assert list(back) == list(made)
    assert all(back[name].equals(made[name]) for name in made)
    assert all(back[name].idx_TLK.dtype == made[name].idx_TLK.dtype for name in made)


def test_any_reader_of_safetensors_finds_the_experts(tmp_path: Path) -> None:
    made = random_routes(5)
    storage.save(tmp_path / "r.safetensors", {"a": made})
    assert np.array_equal(load_file(tmp_path / "r.safetensors")["a.idx"], made.idx_TLK)


def _changed(tmp_path: Path, about: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A file of one sample `a` of 4 tokens, 3 layers, 11 experts, with some of it replaced; None drops a tensor."""
    path = tmp_path / "r.safetensors"
    storage.save(path, {"a": random_routes(4)})
    found = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    told = {"layers": [1, 2, 4], "experts": 11, "start": 0} | (about or {})
    save_file(found, path, metadata={storage.KEY: json.dumps({"a": told})})
    return path


@pytest.mark.parametrize(
    ("about", "tensors", "says"),
    [
        ({}, {"a.kind": None}, r"\['a.kind'\]"),
        ({}, {"b.idx": np.zeros(1)}, r"\['b.idx'\]"),
        ({}, {"a.idx": np.zeros((4, 3, 3), np.int64)}, "a.idx is int64, expected uint8"),
        ({"experts": 300}, {}, "a.idx is uint8, expected uint16"),
        ({"experts": 3}, {}, "expert"),
        ({"experts": True}, {}, "experts=True"),
        ({"layers": [1, 2]}, {}, r"\[4, 3, 3\] for 2 layers"),
        ({"layers": [2, 1, 4]}, {}, "layers="),
        ({"layers": "124"}, {}, "layers="),
        ({"start": -1}, {}, "start=-1"),
        ({"more": 1}, {}, "has to give"),
        ({}, {"a.kind": np.zeros(5, np.uint8)}, r"4 rows, \[5\] kinds"),
        ({}, {"a.kind": np.full(4, 9, np.uint8)}, "a.kind has 9"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, about: Any, tensors: Any, says: str) -> None:
    with pytest.raises(RouteError, match=says):
        storage.load(_changed(tmp_path, about, **tensors))


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a.idx": np.zeros(3)}, path)
    with pytest.raises(RouteError, match="not routes"):
        storage.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(RouteError, match="not a safetensors file"):
        storage.load(path)
    with pytest.raises(RouteError, match="7 bytes, 3 are allowed"):
        storage.load(path, limit=3)
    with pytest.raises(RouteError, match="no routes to save"):
        storage.save(path, {})
    with pytest.raises(RouteError, match="b: rows of 2 samples in turn"):
        storage.save(path, {"a": routes([[[0, 1]]] * 2, layers=[0], experts=4), "b": _batched()})


def _batched() -> Routes:
    return replace(routes([[[0, 1]]] * 2, layers=[0], experts=4), batch=2)


@given(samples=st.lists(any_routes(), max_size=4), zstd=st.booleans())
def test_a_column_of_payloads_comes_back_row_by_row(samples: list[Routes], zstd: bool) -> None:
    """An Arrow column of binary is one buffer and the offsets of its rows."""
    rows = [write(sample, zstd=zstd) for sample in samples]
    offsets = np.cumsum([0, *map(len, rows)]).tolist()
    column = memoryview(b"".join(rows))
    for i, sample in enumerate(samples):
        assert read(column[offsets[i] : offsets[i + 1]]).equals(sample)


@given(st.integers(0, 60), st.integers(1, 3), st.integers(1, 8), st.integers(0, 40), st.integers(0, 50))
def test_padding_rows_are_those_of_the_padding_plan(rows: int, layers: int, top_k: int, more: int, first: int) -> None:
    experts = top_k + more
    want = [pad_experts(first + row, top_k, experts) for row in range(rows)]
    found = spread_experts(rows, layers, top_k, experts, first)
    assert all((found[:, layer] == np.asarray(want).reshape(rows, top_k)).all() for layer in range(layers))


def test_holes_are_saved(tmp_path: Path) -> None:
    made = routes([[[0, 1], [2, 3]], [[0, 1], [-1, -1]]], layers=[3, 5], experts=4)
    storage.save(tmp_path / "a.safetensors", {"a": made, "b": made.take(slice(0, 1))})
    back = storage.load(tmp_path / "a.safetensors")
    assert back["a"].equals(made)
    assert back["b"].equals(made.take(slice(0, 1)))
    assert back["a"].holes_TL is not None
    wrong = replace(made, holes_TL=back["a"].holes_TL[:1])
    storage.save(tmp_path / "b.safetensors", {"a": wrong})
    with pytest.raises(RouteError, match=r"a.holes is bool \[1, 2\]"):
        storage.load(tmp_path / "b.safetensors")
