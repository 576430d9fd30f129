"""A how-to page followed to the letter: its file list, and a copy of the kit with its blocks put where they say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[2]
KIT = ROOT / "conformance" / "moeref_conformance"
_BLOCK = re.compile(r"^```\{code-block\} \w+\n:caption: ([^\n]+)\n\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    """The text of a how-to page."""
    return (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")


def listed(text: str) -> list[str]:
    """The files in the page's table."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


def captions(text: str) -> list[str]:
    """The files that the page's blocks change, each once."""
    return list(dict.fromkeys(caption.split(",")[0] for caption, _ in _BLOCK.findall(text)))


def follow(text: str, folder: Path) -> Path:
    """A copy of the kit in `folder` with every block of the page in its place."""
    copy = folder / KIT.name
    shutil.copytree(KIT, copy)  # compiled files too, which saves the compiling
    for caption, block in _BLOCK.findall(text):
        name, _, place = caption.partition(", ")
        file = copy / name
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        file.write_text(_put(before, block, place), encoding="utf-8")
    return copy


def changed(copy: Path) -> set[str]:
    """Files of the copy that are new or other than the kit's."""
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    return {
        name
        for name in files
        if "__pycache__" not in name
        and not ((KIT / name).exists() and (KIT / name).read_bytes() == (copy / name).read_bytes())
    }


def judge(folder: Path, program: str) -> Any:
    """What a program prints as JSON, run with the copied kit and the folder itself on its path."""
    done = warm.run(program, cwd=folder, path=[str(folder), str(ROOT)], forget=[KIT.name])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _put(before: str, block: str, place: str) -> str:
    """`block` at its place in a file: a named one, or the end."""
    marks = {
        "": (len(before), block),
        "before `class Session`": (before.find("class Session("), block),
        "at the end of `class Session`": (before.find("\n\n\n", before.find("class Session(")) + 1, block),
        "in `RANK_BACKENDS`": (before.find("}\n", before.find("RANK_BACKENDS: ")), block),
        "in `[groups]`": (before.find("\n\n", before.find("[groups]")) + 1, block),
    }
    at, text = marks[place]
    assert at > 0 or not before, place
    return before[:at] + text + before[at:]
