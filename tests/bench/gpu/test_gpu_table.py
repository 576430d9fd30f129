"""Figures: what is close, what a kernel is said to take, what the file and the table hold. No GPU, no Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from moeref_conformance.plan.machine import Machine

from moeref.dispatcher import padding
from tests.bench.gpu import recipes, table
from tests.bench.gpu.figures import Disagreement, Figure, Timing, close, distance, plain, ratio, save, timed
from tests.bench.gpu.needs import about, lacking

MULTIPLES = (1, 2, 4, 8, 16, 32)


def test_distance_is_relative_and_never_passes_what_is_no_number() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert distance(expected, expected) == 0
    assert distance(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert distance(torch.tensor([3.0, float("nan")]), expected) == float("inf")
    assert distance(torch.tensor([3.0]), expected) == float("inf")
    assert close("a", expected, expected, 1e-6, "b").value == 0
    with pytest.raises(Disagreement, match=r"a is 1\.00e-01 away from b"):
        close("a", torch.tensor([3.0, 4.5]), expected, 1e-2, "b")


def test_calls_take_turns() -> None:
    order: list[str] = []
    both = timed(torch.device("cpu"), lambda: order.append("a"), lambda: order.append("b"), rounds=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert all(one.seconds > 0 for one in both)
    assert ratio("a", Timing(2.0, 0.1), Timing(4.0, 0.3), "b").value == 0.5


def taking(multiple: int, wrong: int = 0) -> recipes.Product:
    """A product that refuses rows that are no multiple, and computes those below `wrong` wrongly."""

    def product(rows: int) -> float:
        if rows % multiple:
            raise RuntimeError(f"rows must be divisible by {multiple}\nand more")
        return float("inf") if rows < wrong else 0.5

    return product


def test_the_least_multiple_a_kernel_takes() -> None:
    assert recipes.judged("k", taking(16), 16, MULTIPLES) == Figure("k", 16.0, "rows at least", "table: 16")
    assert recipes.judged("k", taking(4), 16, MULTIPLES).value == 4
    assert recipes.judged("k", taking(4), 16, MULTIPLES).note == "takes less than the table gives"
    assert recipes.judged("k", taking(1, wrong=2), 16, MULTIPLES).value == 2


def test_a_kernel_that_refuses_what_plans_give_is_a_failure() -> None:
    with pytest.raises(Disagreement, match="k refuses multiples of 16, which padding plans give: rows must be"):
        recipes.judged("k", taking(32), 16, MULTIPLES)
    with pytest.raises(Disagreement, match="32 rows are computed wrongly"):
        recipes.judged("k", taking(1, wrong=33), 32, MULTIPLES)


def test_a_kernel_that_is_not_here_is_no_failure() -> None:
    found = recipes.judged("k", taking(10_000), 16, MULTIPLES)
    assert found.value is None
    assert found.note == "cannot be run here: rows must be divisible by 10000"


def test_every_recipe_has_a_kernel_to_try_but_nvfp4() -> None:
    from tests.bench.gpu.models import NARROW

    without = {r for r in padding.RECIPES if not recipes._torch(r, torch.device("cpu"), NARROW)}
    assert without == {"nvfp4"}


def test_the_file_keeps_other_benches(tmp_path: Path) -> None:
    file = tmp_path / "new" / "figures.json"
    save(file, "grouped", {"figures": plain([Figure("a", 1.0)])}, {"GPU": "old"})
    save(file, "layers", {"skipped": "needs Transformer Engine"}, {"GPU": "one"})
    save(file, "grouped", {"figures": plain([Figure("b", 2.0)])}, {"GPU": "one"})
    known = json.loads(file.read_text())
    assert known["about"] == {"GPU": "one"}
    assert [f["what"] for f in known["benches"]["grouped"]["figures"]] == ["b"]
    assert known["benches"]["layers"]["skipped"] == "needs Transformer Engine"


def test_the_table_says_what_was_not_measured() -> None:
    figures = [
        Figure("one | two", 0.12345, "× time", "three", "1 ms against 8 ms"),
        Figure("many", 2321.0, "tensors/s"),
        Figure("refused", 1.0, "yes"),
        Figure("mxfp8", None, note="cannot be run here: no such GPU"),
    ]
    known = {
        "about": {"GPU": "1 × Some GPU", "date": "2026-01-01"},
        "benches": {"grouped": {"figures": plain(figures)}, "layers": {"skipped": "needs Transformer Engine"}},
    }
    text = table.rendered(known, "###")
    assert text.startswith("- GPU: 1 × Some GPU\n- date: 2026-01-01\n\n### Experts")
    assert "| one \\| two | 0.123 × time | three | 1 ms against 8 ms |" in text
    assert "| many | 2321 tensors/s |  |  |" in text
    assert "| refused | yes |  |  |" in text
    assert "| mxfp8 | – |  | cannot be run here: no such GPU |" in text
    assert "### One layer: Transformer Engine and the local spec\n\nNot measured: needs Transformer Engine." in text
    assert text.count("Not measured: not run.") == len(table.TITLES) - 2


def test_what_a_machine_lacks() -> None:
    none = Machine(why_not={"gpu": "no device"})
    one = Machine(gpus=("a",), why_not={"transformer_engine": "which cannot be imported here: no libcudnn"})
    assert lacking("grouped", none) == "needs a CUDA device: no device"
    assert lacking("layers", none) == "needs Transformer Engine and a CUDA device: no device"
    assert lacking("exchange", none) == "needs deep_ep and 2 GPUs: no device"
    assert lacking("grouped", one) == ""
    assert lacking("layers", one) == "needs Transformer Engine"
    assert lacking("exchange", one) == "needs deep_ep and 2 GPUs"


def test_figures_come_with_versions_date_and_command() -> None:
    found = about(Machine(gpus=("a",), versions={"GPU": "1 × a", "driver": "1.2"}))
    assert {"GPU", "driver", "Python", "torch", "megatron-core", "transformers", "date", "command"} == found.keys()
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert found["command"].startswith("`pytest")
