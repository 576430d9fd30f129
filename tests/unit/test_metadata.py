"""What a package index shows: the metadata that hatchling makes of this checkout, built as pip asks for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from fenced import ROOT, blocks
from markdown_it import MarkdownIt
from markdown_it.token import Token

README = (ROOT / "README.md").read_text(encoding="utf-8")
BUILD = "from hatchling.build import prepare_metadata_for_build_wheel as make; make('.')"


@pytest.fixture
def metadata(tmp_path: Path) -> Callable[..., Message]:
    def built(more: str = "") -> Message:
        for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
            shutil.copy(ROOT / name, tmp_path)
        with (tmp_path / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(more)
        subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, check=True)
        (made,) = tmp_path.glob("moeref-*.dist-info/METADATA")
        return Parser().parsestr(made.read_text(encoding="utf-8"))

    return built


def targets(text: str) -> Iterator[str]:
    """Where the links and images of a Markdown text lead."""

    def of(tokens: list[Token]) -> Iterator[str]:
        for token in tokens:
            yield from (str(token.attrs[name]) for name in ("href", "src") if name in token.attrs)
            yield from of(token.children or [])

    return of(MarkdownIt("commonmark").enable("table").parse(text))


def relative(text: str) -> list[str]:
    return [target for target in targets(text) if not target.startswith("https://")]


def test_readme_has_links_and_images_that_only_a_checkout_knows() -> None:
    assert len(relative(README)) > 20
    assert {"docs/status/cpu.svg", "docs/status/cpu.md", "docs/_static/report.png"} <= set(relative(README))


def test_without_an_address_no_link_is_dead(metadata: Callable[..., Message]) -> None:
    built = metadata()
    text = built.get_payload()
    assert built["Description-Content-Type"] == "text/markdown"
    assert built["Project-URL"] is None
    assert relative(text) == []
    assert "by an adapter or a recorded run" in text
    assert [blocks(text, language) for language in ("sh", "python", "text")] == [
        blocks(README, language) for language in ("sh", "python", "text")
    ]


def test_with_an_address_all_links_lead_there(metadata: Callable[..., Message]) -> None:
    home = "https://example.org/moeref/moeref"
    built = metadata(f'\n[project.urls]\nRepository = "{home}"\n')
    assert built["Project-URL"] == f"Repository, {home}"
    expected = []
    for target in relative(README):
        assert (ROOT / target).exists()
        expected.append(f"{home}/{'raw' if target.endswith(('.svg', '.png')) else 'blob'}/HEAD/{target}")
    assert [target for target in targets(built.get_payload()) if target.startswith(home)] == expected
