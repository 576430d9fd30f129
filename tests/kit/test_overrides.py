"""What the caller overrides reaches the real TransformerConfig, also where moeref derives the setting itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RUN = """
import sys
import torch.distributed as dist
from moeref import megatron
from moeref.config import MoEConfig
from moeref.layout import Layout
from moeref.record import Record
from tests.unit.models import model

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
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


def test_overrides_win(tmp_path: Path, megatron_on_cpu: warm.Prepared) -> None:
    (done,) = megatron_on_cpu.run_all(warm.of_ranks(RUN, 1, str(tmp_path / "store")), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
