"""What the caller overrides reaches the real TransformerConfig, also where moeref derives the setting itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RUN = """
import sys
import torch.distributed as dist
from moeref_conformance.worlds import cpu
cpu.install("cpu", "torch")
import megatron.core
cpu.install("cpu", "megatron")
from moeref import megatron
from moeref.config import MoEConfig
from moeref.layout import Layout
from moeref.record import Record
from tests.unit.models import model

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
rank = megatron.initialise(Layout())
small = model("qwen3_moe", num_hidden_layers=2)
built = megatron.build(Record.of(small, Layout()), rank)
assert built.config.overlap_p2p_comm is False
over = {"overlap_p2p_comm": True, "moe_router_load_balancing_type": "aux_loss", "qk_layernorm": False}
built = megatron.build(Record.of(small, Layout(), MoEConfig(transformer_config_kwargs=over)), rank)
for name, value in over.items():
    assert getattr(built.config, name) == value, name
    assert built.settings.origin(name) == "override", name
try:
    Record.of(small, Layout(), MoEConfig(transformer_config_kwargs={"moe_router_topkk": 2}))
except ValueError as error:
    assert "moe_router_topk" in str(error)
else:
    raise AssertionError("an unknown override was taken")
"""


def test_overrides_win(tmp_path: Path) -> None:
    assert (
        subprocess.run([sys.executable, "-c", RUN, str(tmp_path / "store")], timeout=200, check=False).returncode == 0
    )
