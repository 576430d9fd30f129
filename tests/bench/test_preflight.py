"""The preflight on a laptop.

Bars: a trillion parameters on 1024 ranks in under 2 s beyond importing, and `import moeref` under 0.5 s beyond torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from rich.console import Console

pytestmark = pytest.mark.bench
TIMED = """
import time
began = time.perf_counter(); import torch
torch_in = time.perf_counter(); import moeref
moeref_in = time.perf_counter(); from moeref.check import check
check_in = time.perf_counter()
check("kimi-k2", "tp=8,pp=16,ep=64,etp=1,world=1024,first=3,last=2", dispatcher="flex:hybridep", replay="R3")
done = time.perf_counter()
print(torch_in - began, moeref_in - torch_in, check_in - moeref_in, done - check_in)
"""


def test_a_known_model_of_a_trillion_parameters() -> None:
    runs = []
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True)
        runs.append([float(word) for word in run.stdout.split()])
    torch_in, moeref_in, check_in, checked = (min(column) for column in zip(*runs, strict=True))
    Console(width=120).print(
        f"import torch {torch_in:.2f} s, moeref {moeref_in:.3f} s more, moeref.check {check_in:.2f} s more; "
        f"check of kimi-k2 at 1024 ranks {checked:.2f} s"
    )
    assert moeref_in < 0.5
    assert checked < 2
