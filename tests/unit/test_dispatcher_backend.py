"""A toy dispatcher backend, added as docs/how-to/add-a-dispatcher-backend.md says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fenced import ROOT, blocks

from tests import warm

pytestmark = pytest.mark.cpu
PAGE = (ROOT / "docs/how-to/add-a-dispatcher-backend.md").read_text(encoding="utf-8")
USE = """
from moeref.check import check
from moeref.dispatcher import Choice, Environment, Setup, automatic, read, refusals, settings
from moeref.layout import Layout

choice = Choice("flex-ncclep")
assert read(settings(choice)) == choice
assert choice in automatic(Setup(layout=Layout(ep=16), experts=16))
report = check("qwen3-30b-a3b", "tp=2,ep=8,etp=1", dispatcher="flex:ncclep")
assert report.works, report.problems
assert report.needs == ("the package nccl_ep", "a GPU")
assert report.padding.plan.multiple == 2 * 32
assert report.record.dispatcher == choice
setup = Setup(dispatcher="flex", backend="ncclep", layout=Layout(ep=2), equal_rows=False)
assert {r.rule for r in refusals(setup, Environment())} == {"ncclep-package", "equal-rows", "flex-gpu"}
one = {r.rule for r in refusals(Setup(dispatcher="flex", backend="ncclep"), Environment())}
assert "flex-needs-a-group" in one
"""


def test_a_toy_backend_is_one_row(tmp_path: Path) -> None:
    files = re.findall(r"^\| `(moeref/.+?)` \|", PAGE, flags=re.MULTILINE)
    assert len(files) <= 2
    shutil.copytree(ROOT / "moeref", tmp_path / "moeref")  # compiled files too
    (row,) = blocks(PAGE, "py")
    target = tmp_path / files[0]
    text = target.read_text(encoding="utf-8")
    target.write_text(text.replace("\n)\nBY_NAME = ", f"\n{row},\n)\nBY_NAME = "), encoding="utf-8")
    assert target.read_text(encoding="utf-8") != text
    done = warm.run(USE, cwd=tmp_path, path=[str(tmp_path)], forget=["moeref"])
    assert done.returncode == 0, done.stderr
