"""Shards of two targets, compared by hash."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit_toy import Resolved
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.shards import ShardComparison, read, write
from moeref_conformance.plan.known_failures import KnownFailure
from moeref_conformance.plan.matrix import load
from moeref_conformance.run import shards

pytestmark = pytest.mark.cpu


def test_a_hash_says_dtype_shape_and_bytes() -> None:
    zeros = torch.zeros(2, 3)
    others = [
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3).index_fill_(1, torch.tensor(2), 1),
    ]
    assert shards.digest(zeros) == shards.digest(torch.zeros(3, 2).T)
    assert shards.digest(zeros) not in [shards.digest(other) for other in others]


def test_compared() -> None:
    left, right = {"0:0:a": "1", "0:0:b": "2", "1:0:a": "3"}, {"0:0:a": "1", "0:0:b": "9", "1:0:c": "3"}
    found = shards.compare("cell", left, right)
    assert (found.equal, found.unlike, found.single, found.same) == (1, ("0:0:b",), ("1:0:a", "1:0:c"), False)
    assert found.text == "cell: 1 shards equal, 1 differ, 2 held by one only, first 0:0:b"
    assert shards.compare("cell", left, left).same
    assert not shards.compare("cell", {}, {}).same
    assert not ShardComparison("cell", error="rank 0 died").same


def test_known_failures_explain_only_what_they_cover() -> None:
    cell = next(cell for cell in load("smoke").cells if cell.backend == "gloo")

    def entry(rule: str, *patterns: str) -> KnownFailure:
        where, until = {"family": cell.family}, datetime.date(2999, 1, 1)
        return KnownFailure(
            rules=(rule,), where=where, outcome="fail", patterns=patterns, reason="drops it", expires=until
        )

    unlike, equal = shards.compare(cell.id, {"x": "1"}, {"x": "2"}), shards.compare(cell.id, {"x": "1"}, {"x": "1"})
    died = ShardComparison(cell.id, error="rank 0 died")
    assert not shards.explained(unlike, cell, [entry("RUN-001", "x")]).accepted
    assert not shards.explained(died, cell, [entry("LOD-001", "died")]).accepted
    assert shards.explained(died, cell, [entry("RUN-001", "died")]).accepted
    assert not shards.explained(died, cell, [entry("RUN-001", "hung")]).accepted
    assert shards.explained(unlike, cell, [entry("LOD-001", "y", "^x$")]).text.endswith("(known: drops it)")
    assert shards.explained(unlike, cell, [entry("LOD-001", "z"), entry("EXP-002", "y", "^x$")]).accepted
    assert not shards.explained(unlike, cell, [entry("EXP-001", "y", "^x$")]).accepted
    assert shards.explained(equal, cell, [entry("LOD-001", "x")]).known_failure == ""
    assert not shards.explained(died, replace(cell, family="mixtral"), [entry("RUN-001", "died")]).accepted


def test_a_known_failure_explains_all_shards_or_none() -> None:
    cell = next(cell for cell in load("smoke").cells if cell.backend == "gloo")
    known = KnownFailure(
        rules=("LOD-001",),
        where={"family": cell.family},
        outcome="fail",
        patterns=("mtp",),
        reason="drops them",
        expires=datetime.date(2999, 1, 1),
    )
    both = shards.compare(cell.id, {"0:0:mtp.a": "1", "0:0:head": "1"}, {"0:0:head": "2"})
    assert not shards.explained(both, cell, [known]).accepted


def test_written_and_read(tmp_path: Path) -> None:
    found = [shards.compare("a", {"x": "1"}, {"x": "2", "y": "1"}), ShardComparison("b", error="rank 1 hung")]
    write(tmp_path / "deep" / "shards.json", "left", "right", found)
    assert read(tmp_path / "deep" / "shards.json") == found
    assert read(tmp_path / "none.json") == []


def test_no_cell_in_common_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ForkedWorld", Resolved)
    cells = [cell for cell in load("smoke").cells if cell.backend == "static"]
    with pytest.raises(BadInput, match="claim no cell"):
        list(shards.run("moeref", "moeref", load("smoke"), cells))
