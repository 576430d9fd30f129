"""Attention in plain torch, where megatron-core needs Transformer Engine.

megatron-core's DotProductAttention supports neither context parallelism nor packed samples nor head sizes that differ
between keys and values. Its local spec of multi-latent attention splits the down projections over TP; with Transformer
Engine they are replicated.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from moeref.megatron import context
from moeref.megatron.marks import mark_sequence_parallel


class CausalAttention(torch.nn.Module):
    """Causal attention over `[S, B, heads, channels]`, with grouped queries, values of another width, and CP.

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
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query_SBHQ: torch.Tensor, key_SBHQ: torch.Tensor, value_SBHV: torch.Tensor, mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """`[S, B, heads · V]`, or of packed samples `[S, heads · V]`. `mask` is ignored: attention is causal."""
        return _attend(
            query_SBHQ, key_SBHQ, value_SBHV, self.softmax_scale, self.cp_group, kwargs.get("packed_seq_params")
        )


class DotProductOrPackedAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's own attention, and plain torch's for packed samples, which it does not take."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As DotProductAttention. Raises ValueError for packed samples with attention sinks or a sliding window."""
        packed = kwargs.get("packed_seq_params")
        if packed is None:
            out: torch.Tensor = super().forward(query, key, value, mask, *args, **kwargs)
            return out
        if self.softmax_offset is not None or self.scale_mask_softmax.window_size is not None:
            raise ValueError("packed samples with attention sinks or a sliding window need Transformer Engine")
        return _attend(query, key, value, self.softmax_scale, None, packed)


def _attend(
    query_SBHQ: torch.Tensor,
    key_SBHQ: torch.Tensor,
    value_SBHV: torch.Tensor,
    scale: float | None,
    cp_group: Any,
    packed: PackedSeqParams | None,
) -> torch.Tensor:
    """Causal attention of this rank's queries `[S, B, heads, Q]` to all keys; packed tensors come without B."""
    if packed is not None:
        query_SBHQ, key_SBHQ, value_SBHV = (t.unsqueeze(1) for t in (query_SBHQ, key_SBHQ, value_SBHV))
    if cp_group is not None:
        key_SBHQ, value_SBHV = (context.gather(t, cp_group) for t in (key_SBHQ, value_SBHV))
    allowed_QS = None
    if cp_group is not None or packed is not None:
        cp, rank = (cp_group.size(), cp_group.rank()) if cp_group is not None else (1, 0)
        ends = [0, len(key_SBHQ)] if packed is None else packed.cu_seqlens_q.tolist()
        allowed_QS = context.causal_mask(ends, cp, rank, query_SBHQ.device)
    q_BHSQ, k_BHSQ, v_BHSV = (t.permute(1, 2, 0, 3) for t in (query_SBHQ, key_SBHQ, value_SBHV))
    out_BHSV = torch.nn.functional.scaled_dot_product_attention(
        q_BHSQ,
        k_BHSQ,
        v_BHSV,
        attn_mask=allowed_QS,
        is_causal=allowed_QS is None,
        scale=scale,
        enable_gqa=query_SBHQ.shape[2] != key_SBHQ.shape[2],
    )
    out_SBO = out_BHSV.permute(2, 0, 1, 3).flatten(2).contiguous()
    return out_SBO if packed is None else out_SBO[:, 0]


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
