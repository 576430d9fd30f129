"""Weights that the facet `quantised` sends in FP8 blocks or INT4 groups, and the config that asks for it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from moeref_conformance.contract.requests import int4

Block = tuple[int, int]
#: The end of the name of a weight's scales.
SCALES = "_scale_inv"
#: Rows and columns of a block by family: square, as published ones. Qwen's tiny linears are no whole blocks; DeepSeek's
#: are, but for the `kv_a_proj_with_mqa`, which ends in fewer rows as the real one does, and the `kv_b_proj`. In
#: Qwen3.5's `in_proj_qkv` neither queries nor keys nor values end where a block does, nor key heads in Qwen3-Next's
#: `in_proj_qkvz`. Qwen3-Next's hidden size is one block, so that scales of its linears have one column or one row.
BLOCKS: dict[str, Block] = {
    "deepseek_v3": (8, 8),
    "deepseek_v32": (8, 8),
    "qwen3_5_moe_text": (24, 24),
    "minimax_m2": (16, 16),
    "qwen3_moe": (16, 16),
    "qwen3_next": (40, 40),
}
#: By what the blocks of a weight are multiplied, in turn.
FACTORS = (1.0, 2.0**-6, 2.0**6)
#: A linear of Qwen3 that stays as it is, besides what its published files keep so.
KEPT = "model.layers.0.self_attn.o_proj"
#: What published files of Qwen3.5 keep of gated delta nets, in_proj_ba among it, as which engines join b and a; and of
#: Qwen3-Next, whose files have in_proj_ba.
_OF_DELTA_NETS = ("A_log", "conv1d", "dt_bias", "in_proj_a", "in_proj_b", "in_proj_ba", "norm")
#: What they keep of layers with gated delta nets.
_HYBRID = (
    "input_layernorm",
    *(f"linear_attn.{part}" for part in _OF_DELTA_NETS),
    *("mlp.gate", "mlp.shared_expert_gate", "post_attention_layernorm", "self_attn.k_norm", "self_attn.q_norm"),
)
#: Modules of each layer that published files keep as they are.
_LISTED = {
    "deepseek_v3": ("mlp.gate",),
    "deepseek_v32": ("mlp.gate", "self_attn.indexer.weights_proj"),
    "minimax_m2": (),
    "qwen3_moe": ("input_layernorm", "mlp.gate", "post_attention_layernorm"),
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_next": _HYBRID,
}
#: Other modules that stay as they are: a linear, which published files quantise, the embedding of Qwen3.5, and linears
#: of Qwen3-Next's MTP layer, which is listed whether a model has it or not.
_OTHERS = {
    "minimax_m2": ("gate", "e_score_correction_bias"),  # of every layer
    "qwen3_moe": (KEPT,),
    "qwen3_5_moe_text": ("model.embed_tokens", "model.layers.0.linear_attn.out_proj"),
    "qwen3_next": ("mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"),
}


def asked(family: str, model: Mapping[str, Any], listed: bool = True) -> dict[str, Any]:
    """The config of a model in the form that its family is sent in; `listed`: FP8's names modules that stay."""
    return int4.config(model) if family in int4.FAMILIES else config(model, listed)


def block(family: str) -> Block:
    """Rows and columns that have a scale."""
    return (1, int4.GROUP) if family in int4.FAMILIES else BLOCKS[family]


def config(model: Mapping[str, Any], listed: bool = True, powers: bool = True) -> dict[str, Any]:
    """The config of a model that is published in FP8; `listed`: it names modules that stay as they are.

    Qwen's names head, norms and gates of every layer, those with gated delta nets also what is small in these, in
    layers with attention too. DeepSeek-V3's names none; here it names gates too, those of dense layers among them,
    whose `mlp.gate_proj` begins like one. With `powers` its scales are powers of two, as DeepSeek-V3.1's.
    """
    made: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    family, layers = model["model_type"], range(model["num_hidden_layers"])
    if powers and family in ("deepseek_v3", "deepseek_v32"):
        made["scale_fmt"] = "ue8m0"
    if listed:
        kept = [f"model.layers.{layer}.{part}" for layer in layers for part in _LISTED[family]]
        made["modules_to_not_convert"] = ["lm_head", *kept, *_OTHERS.get(family, ())]
    return {**model, "quantization_config": {**made, "weight_block_size": list(BLOCKS[family])}}


def weights(tensors: Mapping[str, torch.Tensor], block: Block) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in which blocks of each matrix differ a thousandfold, and one is all zero."""
    return {name: _scaled(name, tensor, block) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


def _copied(name: str) -> str:
    """The name of the tensor that a multi-token prediction layer has a copy of, under the copy's name."""
    if name.endswith(".shared_head.head.weight"):
        return "lm_head.weight"
    return "model.embed_tokens.weight" if name.endswith(".embed_tokens.weight") else name


def _scaled(name: str, tensor: torch.Tensor, block: Block) -> torch.Tensor:
    high, wide = (math.ceil(size / of) for size, of in zip(tensor.shape, block, strict=True))
    factors = torch.tensor([FACTORS[number % len(FACTORS)] for number in range(high * wide)])
    factors[zlib.crc32(_copied(name).encode()) % len(factors)] = 0.0
    of_rows = factors.view(high, wide).repeat_interleave(block[0], 0)[: tensor.shape[0]]
    return tensor * of_rows.repeat_interleave(block[1], 1)[:, : tensor.shape[1]].to(tensor.dtype)
