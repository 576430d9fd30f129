"""What a package index shows: the metadata that hatchling makes of this checkout, built as pip asks for it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
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


def test_the_wheel_has_all_that_its_modules_import_and_is_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("moeref-*.whl")
    (most,) = re.findall(r"^WHEEL = ([\d_]+)$", (ROOT / "noxfile.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    with zipfile.ZipFile(wheel) as files:
        assert sum(info.compress_size for info in files.infolist() if "/selftest/" not in info.filename) < int(most)
        sources = {name: files.read(name) for name in files.namelist() if name.endswith(".py")}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources}
    modules |= {module.rpartition(".")[0] for module in modules}  # `worlds` has no `__init__.py`
    imported = {module for name, source in sources.items() for module in own_imports(name, source)}
    assert len(imported) > 200
    assert imported - modules == set()


def own_imports(name: str, source: bytes) -> Iterator[str]:
    """The modules of this project from which a file imports."""
    for node in ast.walk(ast.parse(source, name)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, name
            names = [str(node.module)]
        yield from (module for module in names if module.partition(".")[0] in ("moeref", "moeref_conformance"))
