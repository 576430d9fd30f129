"""A plain GPTModel of megatron-core under Transformer Engine's names, for converters that bring no model of their own.

Only names and shapes are meant to be right: nothing that the forward pass alone needs, such as θ, is set.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.targets.peers import common

#: Tensors with a row for each token of the vocabulary.
VOCABULARY = {"model.embed_tokens.weight", "lm_head.weight"}


class Wrapped(torch.nn.Module):
    """A chunk under one more `module.`, as training code holds it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config = module, module.config


def build(hf_config: Any, cell: Cell) -> list[Any]:
    """The chunks of this rank, one per virtual stage, with megatron-core's own layer specs."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    dtype, layout = common.torch_dtype(cell), cell.layout
    kind = MLATransformerConfig if getattr(hf_config, "kv_lora_rank", None) else TransformerConfig
    settings = {**common.ON_CPU, **common.parallel_settings(cell), **shapes(hf_config, cell)}
    chunks = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        if vp_stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        config: Any = kind(**settings, params_dtype=dtype, pipeline_dtype=dtype)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage) if cell.mtp else None
        with torch.device("cpu"):
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=padded_vocabulary(hf_config, cell),
                max_sequence_length=hf_config.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
                position_embedding_type="rope",
                mtp_block_spec=mtp,
                vp_stage=vp_stage,
            )
        chunks.append(chunk.to(dtype))
    _mark_whole_weights(chunks)
    return chunks


def _mark_whole_weights(chunks: list[Any]) -> None:
    """Mark weights that TP does not split as slime's patch of Megatron does (its docker/patch)."""
    from megatron.core.extensions.transformer_engine import TELinear

    whole = [module for chunk in chunks for module in chunk.modules() if type(module) is TELinear]
    for parameter in (parameter for module in whole for parameter in module.parameters()):
        parameter.parallel_mode = "duplicated"


def padded_vocabulary(hf_config: Any, cell: Cell) -> int:
    """Rows of the embedding: the vocabulary, up to a multiple of TP."""
    rows = int(hf_config.vocab_size)
    return rows + -rows % cell.layout.tp


def padding(read: Callable[[str], object], rows: int, tp: int) -> Callable[[str], object]:
    """`read` of a folder, for a loader that pads no vocabulary: it reads a copy where TP does not divide the `rows`."""
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    if rows % tp == 0:
        return read

    def call(folder: str) -> None:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True, copy_function=shutil.copyfile)
            for path in Path(copy).glob("*.safetensors"):
                tensors = load_file(path)
                for name in VOCABULARY & tensors.keys():
                    if len(tensors[name]) == rows:
                        tensors[name] = pad(tensors[name], (0, 0, 0, -rows % tp))
                save_file(tensors, path)
            read(copy)

    return call


def shapes(hf_config: Any, cell: Cell) -> dict[str, Any]:
    """Settings of TransformerConfig that decide names and shapes, from a Hugging Face config."""
    layers, kind = int(hf_config.num_hidden_layers), hf_config.model_type
    dense = int(getattr(hf_config, "first_k_dense_replace", 0))
    biased = kind in ("glm4_moe", "deepseek_v3", "glm4_moe_lite")  # routers with a bias per expert
    latent = {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
    plain = {
        "num_query_groups": int(hf_config.num_key_value_heads),
        "kv_channels": getattr(hf_config, "head_dim", None),
    }
    mla = bool(getattr(hf_config, "kv_lora_rank", None))
    return {
        "num_layers": layers,
        "mtp_num_layers": cell.mtp or None,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        **({"multi_latent_attention": True, **{k: getattr(hf_config, v) for k, v in latent.items()}} if mla else plain),
        "qk_layernorm": mla or kind == "qwen3_moe" or bool(getattr(hf_config, "use_qk_norm", False)),
        "add_bias_linear": False,
        "add_qkv_bias": bool(getattr(hf_config, "attention_bias", False)),
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "num_moe_experts": getattr(hf_config, "n_routed_experts", None) or hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf_config.moe_intermediate_size
        * int(getattr(hf_config, "n_shared_experts", None) or 0)
        or None,
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)],
        "moe_router_enable_expert_bias": biased,
        "moe_router_score_function": "sigmoid" if biased else "softmax",
        "moe_grouped_gemm": True,
    }
