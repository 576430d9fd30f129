"""What adapters call without a GPU: a process fit for megatron-core, and plain modules for Transformer Engine's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from moeref_conformance.contract.api import Cell, Layout
from moeref_conformance.worlds import cpu
from moeref_conformance.worlds.forked import ForkedWorld
from toy_targets import Toy

from tests import warm

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is not None,
        reason="Transformer Engine is installed, and the stand-in would hide it",
    ),
]
PLAIN = "moeref_conformance.targets.peers.te_modules"
#: One rank of a run outside the kit.
SCRIPT = """
import json
import torch.distributed as dist
from moeref_conformance import authors

names = authors.megatron_on_cpu(plain_te=True)
assert authors.megatron_on_cpu(plain_te=True) == names
import toy_plain_te

assert toy_plain_te.PLAIN
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(json.dumps([names, toy_plain_te.build()]))
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A fresh process: what is imported, and in which order, is what is tested."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)


def check(built: dict[str, str]) -> None:
    """Norms are fused into the linears after them, and all but the router are plain modules."""
    del built["mlp.router.weight"]  # megatron-core's own
    assert {"self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_proj.weight"} <= built.keys()
    assert set(built.values()) == {PLAIN}


def test_a_script_gets_megatron_and_plain_modules_by_one_call() -> None:
    done = python(SCRIPT)
    assert done.returncode == 0, done.stderr
    names, built = json.loads(done.stdout.splitlines()[-1])
    assert names == [entry.name for entry in cpu.SUBSTITUTIONS]
    check(built)


def test_after_megatron_it_is_too_late(tmp_path: Path) -> None:
    late = "import megatron.core\nfrom moeref_conformance import authors\nauthors.megatron_on_cpu()"
    done = warm.run(late, cwd=tmp_path, forget=["megatron", "moeref_conformance"])
    assert "megatron-core is imported already" in done.stderr


@pytest.mark.ranks
def test_an_adapter_says_at_its_top_that_it_needs_plain_modules(tmp_path: Path) -> None:
    with ForkedWorld("toy_plain_te:target", deadline=60, entry="toy_plain_te:writes") as world:
        cell = Cell(family="toy", layout_name="one", layout=Layout())
        outcome = world.run(cell, tmp_path, {"hf_config": str(tmp_path)}, Toy.claims)
    assert outcome.ok, outcome.error or outcome.exits[0].stderr_tail
    check(json.loads((tmp_path / "rank0000" / "built.json").read_text()))
