"""Attention over keys and values gathered from all CP ranks: output and gradients are those of one rank, in float64.

With sinks and a window one rank is megatron-core's own attention, and packed samples are as samples alone.
"""

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
SINKS = """
import dataclasses, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from moeref.layout import sequence
from moeref.megatron.attention import GroupedQueryAttention

torch.cuda.current_device = lambda: "cpu"
parallel_state._set_global_memory_buffer()
rank, cp, heads, width = int(sys.argv[1]), 2, 6, 4
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=cp)
torch.set_default_dtype(torch.float64)
groups = SimpleNamespace(cp=dist.group.WORLD, tp=[dist.new_group([r]) for r in range(cp)][rank])
config = TransformerConfig(
    num_layers=2, hidden_size=heads * width, num_attention_heads=heads, num_query_groups=2, kv_channels=width,
    softmax_type="learnable", window_size=(4, 0), window_attn_skip_freq=[1, 0], params_dtype=torch.float64,
    attention_dropout=0.0, masked_softmax_fusion=False, init_method=torch.nn.init.normal_, context_parallel_size=cp,
)
alone = dataclasses.replace(config, context_parallel_size=1)
config.sequence_parallel = alone.sequence_parallel = True  # else dropout asks for Megatron's generators

def attention(kind, config, layer):
    torch.manual_seed(7)
    more = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "pg_collection": groups}
    return kind(config=config, layer_number=layer, **more)

def gradients(module, leaves, weight, parts=slice(None), **more):
    leaves = [t[parts].clone().requires_grad_() for t in leaves]
    mask = torch.ones(len(leaves[0]), len(leaves[0]), dtype=torch.bool).triu(1)[None, None]
    out = module(*(leaf if not more else leaf[:, 0] for leaf in leaves), mask, **more)
    (out * weight[parts].reshape(out.shape)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)], module.softmax_offset.grad

for layer in (1, 2):  # with and without the window
    generator = torch.Generator().manual_seed(3)
    def normal(length, *shape):
        return torch.randn(length, 1, *shape, generator=generator)
    samples = [[normal(s, heads, width), normal(s, 2, width), normal(s, 2, width)] for s in (12, 8)]
    weights = [normal(len(sample[0]), heads * width) for sample in samples]
    truth = []
    for sample, weight in zip(samples, weights):
        found, offset = gradients(attention(DotProductAttention, alone, layer), sample, weight)
        truth.append((found, offset))
        mine = list(sequence.zigzag(len(weight), cp, rank))
        part, of_mine = gradients(attention(GroupedQueryAttention, config, layer), sample, weight, mine)
        for one, other in zip(found, part, strict=True):
            torch.testing.assert_close(other, one[mine], rtol=1e-12, atol=1e-12)
        dist.all_reduce(of_mine)
        torch.testing.assert_close(of_mine, offset, rtol=1e-12, atol=1e-12)
    whole = [torch.cat(parts) for parts in zip(*samples)]
    ends = torch.tensor([0, 12, 20], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    for config_of, parts in ((alone, list(range(20))), (config, [*sequence.zigzag(12, cp, rank),
                                                               *(12 + i for i in sequence.zigzag(8, cp, rank))])):
        module = attention(GroupedQueryAttention, config_of, layer)
        part, offset = gradients(module, whole, torch.cat(weights), parts, packed_seq_params=packed)
        for number, other in enumerate(part):
            one = torch.cat([found[number] for found, _ in truth])[parts]
            torch.testing.assert_close(other.reshape(one.shape), one, rtol=1e-12, atol=1e-12)
        if config_of is config:
            dist.all_reduce(offset)
        torch.testing.assert_close(offset, truth[0][1] + truth[1][1], rtol=1e-12, atol=1e-12)
dist.barrier()
"""


@pytest.mark.parametrize("program", [RUN, SINKS], ids=["grouped-and-latent", "sinks-and-window"])
def test_output_and_gradients_are_those_of_one_rank(
    program: str, tmp_path: Path, megatron_on_cpu: warm.Prepared
) -> None:
    done = megatron_on_cpu.run_all(warm.of_ranks(program, 2, str(tmp_path / "store")), cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr[-2000:] for rank in done]
