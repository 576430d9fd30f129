"""What `moeref check` approves is what `megatron.build` builds, for every run file in the docs."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests import warm

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from fenced import blocks  # noqa: E402

pytestmark = pytest.mark.cpu
#: Fields of the record that a loss of each is shown for; `seeds.per_dp` only where there are replicas.
FIELDS = {"model", "layout", "names", "seeds.seed", "seeds.formula", "divisible_by", "core"}


def keys(text: str, language: str) -> set[str]:
    """The top-level keys of a file; none if it is no mapping, or has placeholders."""
    try:
        found: Any = tomllib.loads(text) if language == "toml" else OmegaConf.create(text)
        return {str(key) for key in found}
    except Exception:  # PyYAML's own errors, whose package is not imported here
        return set()


def run_files(folder: Path) -> Iterator[Path]:
    """Every run file of the docs: files of their own, and fenced blocks of pages, written to `folder`."""
    texts = [(path.read_text(encoding="utf-8"), "yaml") for path in sorted(DOCS.rglob("*.y*ml"))]
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        texts += [(block, language) for language in ("yaml", "json", "toml") for block in blocks(text, language)]
    for number, (text, language) in enumerate(texts):
        if keys(text, language) >= {"model", "layout", "policy"}:
            path = folder / f"run{number}.{language}"
            path.write_text(text, encoding="utf-8")
            yield path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, megatron_on_cpu: warm.Prepared) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    files = list(run_files(folder))
    assert len(files) >= 2
    out = folder / "found.jsonl"
    program = f"import built_from_record\nbuilt_from_record.main(*{[str(out), *map(str, files)]})"
    done = megatron_on_cpu.run(program, cwd=folder, path=[str(Path(__file__).parent)])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_nothing_differs_between_what_was_checked_and_what_was_built(found: list[dict[str, Any]]) -> None:
    assert {(one["model"], one["rank"] == 0) for one in found} >= {("policy", True), ("policy", False)}
    assert [one["differences"] for one in found if one["differences"]] == []


def test_a_field_dropped_on_the_way_is_refused_or_found(found: list[dict[str, Any]]) -> None:
    """On one of the ranks at least: rank 0 is seeded alike with and without a seed for each replica."""
    losses: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        assert one["dropped"].keys() >= FIELDS
        assert {"kernels", "replay"} & one["dropped"].keys()
        for name, dropped in one["dropped"].items():
            losses.setdefault((one["file"], one["model"], name), []).extend(dropped["loss"])
            assert any(name.split(".")[0] in text for text in dropped["reverse"]), (name, dropped["reverse"])
    assert [lost for lost, said in losses.items() if not said] == []


def test_a_setting_dropped_on_the_way_is_refused_or_found(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert len(one["settings"]) > 20
        assert [name for name, differences in one["settings"].items() if not differences] == []
        assert set(one["derived"]) <= {"kv_channels", "num_query_groups"}
