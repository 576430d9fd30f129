"""Attention in plain torch, where megatron-core needs Transformer Engine.

megatron-core's DotProductAttention takes neither context parallelism nor packed samples nor head sizes that differ
between keys and values. Its local spec of multi-latent attention splits the down projections over TP; with Transformer
Engine they are replicated.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from moeref.megatron import context
from moeref.megatron.marks import mark_sequence_parallel


class CausalAttention(torch.nn.Module):
    """Causal attention over `[S, B, heads, channels]` whose values may have another width, as MLA's have.

    Under context parallelism S is this rank's part, and keys and values are gathered from all CP ranks.
    """

    def __init__(
        self,
        *,
        config: Any,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(width of the queries)
        self.cp_group = _cp_group(config, pg_collection)

    def forward(
        self, query_SBHQ: torch.Tensor, key_SBHQ: torch.Tensor, value_SBHV: torch.Tensor, mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """`[S, B, heads · V]`, or of packed samples `[S, heads · V]`. `mask` is ignored: attention is causal."""
        inputs = query_SBHQ, key_SBHQ, value_SBHV
        return _attend(*inputs, self.softmax_scale, self.cp_group, kwargs.get("packed_seq_params"))


class GroupedQueryAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's own attention, and plain torch's for what that does not take: CP and packed samples."""

    def __init__(self, *, config: Any, pg_collection: ProcessGroupCollection | None = None, **kwargs: Any) -> None:
        whole = copy.copy(config)
        whole.context_parallel_size = 1  # it refuses any other
        super().__init__(config=whole, pg_collection=pg_collection, **kwargs)
        self.config = config
        self.cp_group = _cp_group(config, pg_collection)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As DotProductAttention; under CP and of packed samples as CausalAttention, with sinks and the window."""
        packed = kwargs.get("packed_seq_params")
        if packed is None and self.cp_group is None:
            out: torch.Tensor = super().forward(query, key, value, mask, *args, **kwargs)
            return out
        window = self.scale_mask_softmax.window_size
        extra = {"sinks_H": self.softmax_offset, "before": window[0] if window and window[0] >= 0 else None}
        return _attend(query, key, value, self.softmax_scale, self.cp_group, packed, **extra)


def _cp_group(config: Any, groups: ProcessGroupCollection | None) -> Any:
    """The group of CP ranks; None without context parallelism."""
    if config.context_parallel_size == 1:
        return None
    return (groups or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])).cp


def _attend(
    query_SBHQ: torch.Tensor,
    key_SBHQ: torch.Tensor,
    value_SBHV: torch.Tensor,
    scale: float | None,
    cp_group: Any,
    packed: PackedSeqParams | None,
    *,
    sinks_H: torch.Tensor | None = None,
    before: int | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries `[S, B, heads, Q]` to all keys; packed tensors come without B.

    sinks_H: a score of each head that takes attention and has no value. before: how many keys before its own a query
    sees; None for all. Both count under CP and for packed samples only.
    """
    if packed is not None:
        query_SBHQ, key_SBHQ, value_SBHV = (t.unsqueeze(1) for t in (query_SBHQ, key_SBHQ, value_SBHV))
    if cp_group is not None:
        key_SBHQ, value_SBHV = (context.gather(t, cp_group) for t in (key_SBHQ, value_SBHV))
    seen = None
    if cp_group is not None or packed is not None:
        cp, rank = (cp_group.size(), cp_group.rank()) if cp_group is not None else (1, 0)
        ends = [0, len(key_SBHQ)] if packed is None else packed.cu_seqlens_q.tolist()
        seen = context.causal_mask(ends, cp, rank, query_SBHQ.device, before)
        if sinks_H is not None:
            seen, key_SBHQ, value_SBHV = _with_sinks(seen, key_SBHQ, value_SBHV, sinks_H)
    q_BHSQ, k_BHSQ, v_BHSV = (t.permute(1, 2, 0, 3) for t in (query_SBHQ, key_SBHQ, value_SBHV))
    out_BHSV = torch.nn.functional.scaled_dot_product_attention(
        q_BHSQ,
        k_BHSQ,
        v_BHSV,
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=query_SBHQ.shape[2] != key_SBHQ.shape[2],
    )
    out_SBO = out_BHSV.permute(2, 0, 1, 3).flatten(2).contiguous()
    return out_SBO if packed is None else out_SBO[:, 0]


def _with_sinks(
    seen_QS: torch.Tensor, key_SBHQ: torch.Tensor, value_SBHV: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores to add `[1, H, Q, S + 1]`, keys and values, with a key more: zero, so that its score is the sink alone."""
    hidden_QS = torch.zeros_like(seen_QS, dtype=sinks_H.dtype).masked_fill(~seen_QS, -torch.inf)
    heads, queries = len(sinks_H), len(seen_QS)
    scores_HQS = torch.cat([hidden_QS.expand(heads, -1, -1), sinks_H[:, None, None].expand(-1, queries, 1)], dim=2)
    key_SBHQ, value_SBHV = (torch.cat([t, torch.zeros_like(t[:1])]) for t in (key_SBHQ, value_SBHV))
    return scores_HQS[None].to(key_SBHQ.dtype), key_SBHQ, value_SBHV


class ReplicatedLinear(torch.nn.Module):
    """A linear that is replicated on every TP rank, drawn from the generator that these share."""

    def __init__(self, input_size: int, output_size: int, config: Any, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=like.dtype, device=like.device))
        if config.perform_initialization:
            config.init_method(self.weight)
        mark_sequence_parallel(self.weight, config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(output, None): Megatron's linears return their bias too."""
        return torch.nn.functional.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """MLASelfAttention with replicated down projections and any modules in its spec."""

    def __init__(
        self,
        config: Any,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        # Skips MLASelfAttention.__init__, which accepts only Megatron's and TE's own linear classes.
        super(MLASelfAttention, self).__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(),
            **kwargs,
        )
        hidden, heads = config.hidden_size, config.num_attention_heads
        q_rows, kv_rows = heads * self.q_head_dim, heads * (config.qk_head_dim + config.v_head_dim)
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(submodules.linear_q_proj, hidden, q_rows)
        else:
            self.linear_q_down_proj = self._down(config.q_lora_rank)
            self.linear_q_up_proj = self._up(submodules.linear_q_up_proj, config.q_lora_rank, q_rows)
            self.q_layernorm = self._norm(submodules.q_layernorm, config.q_lora_rank)
        self.linear_kv_down_proj = self._down(config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.linear_kv_up_proj = self._up(submodules.linear_kv_up_proj, config.kv_lora_rank, kv_rows)
        self.kv_layernorm = self._norm(submodules.kv_layernorm, config.kv_lora_rank)

    def _up(self, linear: Any, input_size: int, output_size: int) -> Any:
        return linear(
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )

    def _down(self, output_size: int) -> ReplicatedLinear:
        return ReplicatedLinear(self.config.hidden_size, output_size, self.config, self.linear_proj.weight)

    def _norm(self, norm: Any, size: int) -> Any:
        return norm(hidden_size=size, config=self.config, eps=self.config.layernorm_epsilon)
