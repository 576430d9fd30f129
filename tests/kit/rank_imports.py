"""Rank entry: all steps, which modules they imported, and under which scheduling policy the rank runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.steps.run import run_rank


def run(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    there = set(sys.modules)
    run_rank(target, cell, world, inputs, folder)
    (folder / "imported.json").write_text(json.dumps(sorted(sys.modules.keys() - there)))
    (folder / "policy.json").write_text(json.dumps(os.sched_getscheduler(0)))
