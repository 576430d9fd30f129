"""The scripts of docs/examples/defects: each shows its defect, and fails where the defect is mended.

A session of a peer names itself in MOEREF_PEER. What it is known to have is what matrices/known/<peer>.toml names. A
peer `<name>-main` also runs those of the release `<name>`: a defect that its own file does not name has to be gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from moeref_conformance.report.table import SCRIPTS

ROOT = Path(__file__).parents[2]
PEER = os.environ.get("MOEREF_PEER", "")
TOLD = tomllib.loads((ROOT / "conformance/moeref_conformance/targets/peers/defects.toml").read_text(encoding="utf-8"))


def named(peer: str) -> set[str]:
    """Defects with a script that a peer is known to have."""
    file = ROOT / "matrices" / "known" / f"{peer}.toml"
    known = tomllib.loads(file.read_text(encoding="utf-8"))["known"]
    return {entry["defect"] for entry in known if "script" in TOLD[entry["defect"]]}


KNOWN = named(PEER) if PEER else set()
OF_RELEASE = named(PEER.removesuffix("-main")) if PEER.endswith("-main") else set()


@pytest.mark.ranks
@pytest.mark.skipif(not PEER, reason="the session of each peer runs the scripts of its own defects")
@pytest.mark.parametrize("defect", sorted(KNOWN | OF_RELEASE) if PEER else ["of a peer"])
def test_a_script_shows_its_defect_until_that_is_mended(defect: str) -> None:
    file, *words = TOLD[defect]["script"].split()
    script = [sys.executable, str(ROOT / SCRIPTS / file), *words]
    run = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False)
    if defect in KNOWN:
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.splitlines()[-1].startswith("shown: ")
    else:
        assert run.returncode == 1, run.stdout + run.stderr
        assert "mended: " in run.stdout
