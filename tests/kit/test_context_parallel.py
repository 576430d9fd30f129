"""Attention over keys and values gathered from all CP ranks: output and gradients are those of one rank, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]
RUN = """
import sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from moeref.layout import sequence
from moeref.megatron.attention import CausalAttention

rank, cp, length = int(sys.argv[1]), 2, 12
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=cp)
torch.set_default_dtype(torch.float64)
mine = list(sequence.zigzag(length, cp, rank))
groups = SimpleNamespace(cp=dist.group.WORLD)
# (query heads, key and value heads, width of queries and keys, width of values): grouped-query, and latent attention
for heads, groups_of_kv, width, wide in ((6, 2, 5, 5), (4, 4, 7, 3)):
    generator = torch.Generator().manual_seed(3)
    def normal(*shape):
        return torch.randn(length, 2, *shape, generator=generator)
    full = [normal(heads, width), normal(groups_of_kv, width), normal(groups_of_kv, wide)]
    weight_SBO = normal(heads * wide)
    found = []
    for size, parts in ((1, slice(None)), (cp, mine)):
        config = SimpleNamespace(context_parallel_size=size)
        attention = CausalAttention(config=config, softmax_scale=0.3, pg_collection=groups)
        leaves = [t[parts].clone().requires_grad_() for t in full]
        out = attention(*leaves, None)
        (out * weight_SBO[parts]).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for one, part in zip(*found, strict=True):
        torch.testing.assert_close(part, one[mine], rtol=1e-12, atol=1e-12)
dist.barrier()
"""


def test_output_and_gradients_are_those_of_one_rank(tmp_path: Path, megatron_on_cpu: warm.Prepared) -> None:
    done = megatron_on_cpu.run_all(warm.of_ranks(RUN, 2, str(tmp_path / "store")), cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr[-2000:] for rank in done]
