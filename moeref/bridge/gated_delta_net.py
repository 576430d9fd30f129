"""Which rows of Hugging Face tensors the fused linears of gated delta nets and gated attention hold, by TP rank.

A run is (number of the Hugging Face tensor, first row, rows); a shard is its runs one below the other. The order
follows the splits in megatron-core's `SelfAttention.get_query_key_value_tensors` and `GatedDeltaNet.forward`, and in
transformers' `Qwen3NextAttention`, `Qwen3NextGatedDeltaNet.fix_query_key_value_ordering` and `Qwen3_5MoeGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeref.families import Model
from moeref.families.model import GatedDeltaNet

Run = tuple[int, int, int]


def gated_qkv(model: Model, groups: range) -> Iterator[Run]:
    """q_proj has [q | gate] per head; Megatron per KV group [its q heads | their gates | k | v]."""
    d, per_group = model.head_dim, model.heads // model.kv_groups
    for group in groups:
        for half in range(2):
            for head in range(group * per_group, (group + 1) * per_group):
                yield 0, (2 * head + half) * d, d
        yield 1, group * d, d
        yield 2, group * d, d


def gdn_in_proj(net: GatedDeltaNet, heads: range) -> Iterator[Run]:
    """in_proj_qkvz has [q | k | v | z] per key head, in_proj_ba [b | a]; Megatron all q, then all k, v, z, b, a."""
    k, v = net.key_dim, net.per_key * net.value_dim
    for source, parts in ((0, (k, k, v, v)), (1, (net.per_key, net.per_key))):
        for i, rows in enumerate(parts):
            for head in heads:
                yield source, head * sum(parts) + sum(parts[:i]), rows


def gdn_in_projs(net: GatedDeltaNet, heads: range) -> Iterator[Run]:
    """in_proj_qkv has [all q | all k | all v], and z, b and a have a tensor each; Megatron the same, of its heads."""
    yield from gdn_conv1d(net, heads)
    for source, rows in ((1, net.per_key * net.value_dim), (2, net.per_key), (3, net.per_key)):
        yield source, heads.start * rows, len(heads) * rows


def gdn_conv1d(net: GatedDeltaNet, heads: range) -> Iterator[Run]:
    """Channels are [all q | all k | all v] on both sides; a rank has its heads of each."""
    start = 0
    for rows in (net.key_dim, net.key_dim, net.per_key * net.value_dim):
        yield 0, start + heads.start * rows, len(heads) * rows
        start += net.key_heads * rows
