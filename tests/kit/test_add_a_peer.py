"""A toy peer, added to a copy of the kit along docs/how-to/add-a-peer.md: an adapter, an entry, nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = Path("conformance/moeref_conformance/targets/peers")
PAGE = (ROOT / "docs/how-to/add-a-peer.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page touches, in a copy of the checkout; and the toy's distribution, installed nearby."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("conformance", "matrices"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("noxfile.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    shutil.copy(ROOT / "docs/examples/toy_peer.py", root / PEERS / "toy_bridge.py")
    entry, _ = re.findall(r"^ *```toml\n(.*?)^ *```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    with (root / PEERS / "peers.toml").open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(line.strip() for line in entry.splitlines()) + "\n")
    installed = root / "site" / "toy_bridge-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-bridge\nVersion: 1.0\n")
    return root


def python(checkout: Path, *arguments: str) -> str:
    path = os.pathsep.join(str(checkout / name) for name in ("conformance", "site"))
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kit_finds_it_and_reads_its_claims_without_the_bridge(checkout: Path) -> None:
    listed = python(checkout, "-m", "moeref_conformance", "list", "--matrix", "peers", "--target", "toy-bridge")
    cells = [line for line in listed.splitlines() if "/gloo" in line]
    claimed = [line for line in cells if "unclaimed" not in line]
    assert claimed
    assert all("qwen3_moe" in line for line in claimed)
    assert [line for line in cells if "family=mixtral is not claimed" in line]


def test_it_has_a_session_of_its_own(checkout: Path) -> None:
    assert "peers(toy-bridge)" in python(checkout, "-m", "nox", "--list", "-s", "peers(toy-bridge)")


def test_the_page_touches_three_files() -> None:
    assert re.findall(r"^\| `(.+?)` \|", PAGE, flags=re.MULTILINE) == [
        "targets/peers/<name>.py",
        "targets/peers/peers.toml",
        "constraints/peers-<name>.txt",
    ]


def test_adapters_are_thin() -> None:
    table = (ROOT / PEERS / "peers.toml").read_text(encoding="utf-8")
    adapters = [name.replace("-", "_") for name in re.findall(r"^\[(.+)\]$", table, flags=re.MULTILINE)]
    assert len(adapters) == 9
    for name in adapters:
        assert len((ROOT / PEERS / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 115
