"""The real GPTModel chunks of one rank, built from a Hugging Face config under a layout."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from moeref.bridge import VOCAB_DIVISIBLE_BY, Table, padded_vocab
from moeref.config import Setting, transformer_settings
from moeref.families import Model, Spelling
from moeref.layout import Layout
from moeref.megatron.grouped import with_grouped_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """One rank's model: its chunks (one per virtual stage), their config, and the table that describes them."""

    chunks: list[GPTModel]
    config: TransformerConfig
    settings: dict[str, Setting]
    table: Table


def _torch_settings(dtype: str, device: str) -> dict[str, Setting]:
    """Settings whose values are torch objects or follow from the device."""
    torch_dtype = DTYPES[dtype]
    values: dict[str, Any] = {
        "activation_func": torch.nn.functional.silu,  # every family refuses another hidden_act
        "params_dtype": torch_dtype,
        "bf16": torch_dtype is torch.bfloat16,
        "pipeline_dtype": torch_dtype,
        "autocast_dtype": torch_dtype,
        # NCCL and gloo agree on the chunk order only with overlapped, unbatched point-to-point calls; the batched form
        # computes PP2·VPP2 wrongly without a word.
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }
    if device == "cpu":
        # CUDA kernels and fusions without a CPU form.
        off = ("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion")
        values |= dict.fromkeys((*off, "gradient_accumulation_fusion", "deallocate_pipeline_outputs"), False)
        values |= {"use_cpu_initialization": True}
    return {k: Setting(v, "derived") for k, v in values.items()}


def transformer_config(settings: Mapping[str, Setting]) -> TransformerConfig:
    """The real TransformerConfig. Raises ValueError for a setting that the installed version does not have."""
    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    for name in settings.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"TransformerConfig has no field {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return TransformerConfig(**{name: setting.value for name, setting in settings.items()})


def build(
    model: Model,
    layout: Layout,
    rank: int,
    *,
    device: str = "cpu",
    experts: str = "sequential",
    overrides: Mapping[str, Any] | None = None,
    divisible_by: int = VOCAB_DIVISIBLE_BY,
) -> Built:
    """Build this rank's chunks with megatron-core's local layer spec; `groups.initialise(layout)` comes first.

    device: "cpu" or a CUDA device. experts: "sequential", or "grouped" for Transformer Engine's grouped names.
    The weights are unset until `bridge.load`. Raises ValueError for an override that TransformerConfig does not have.
    """
    settings = {
        **transformer_settings(model, layout),
        **_torch_settings(model.param_dtype, device),
        **{k: Setting(v, "override") for k, v in (overrides or {}).items()},
    }
    if layout.pp == 1 or (layout.vpp == 1):
        settings["overlap_p2p_comm"] = Setting(False, "derived")
    config = transformer_config(settings)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    at = layout.coords(rank)
    chunks: list[GPTModel] = []
    for vp in range(layout.vpp):
        vp_stage = vp if layout.vpp > 1 else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage, **_pp_rank(at.pp)
        )
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocab(model, layout.tp, divisible_by),
            max_sequence_length=model.max_positions,
            pre_process=layout.has_embedding(at.pp, vp),
            post_process=layout.has_head(at.pp, vp),
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="rope",
            rotary_percent=model.rotary_percent,
            rotary_base=int(model.rope_theta),
            vp_stage=vp_stage,
        )
        for parameter in chunk.parameters():
            # torch's norm ignores params_dtype. Parameters only: the router's expert_bias is a buffer and stays fp32,
            # where Float16Module's module.bfloat16() would round it until the first forward.
            parameter.data = parameter.data.to(DTYPES[model.param_dtype])
        chunks.append(with_grouped_names(chunk) if experts == "grouped" else chunk)
    spelling = Spelling(experts="grouped" if experts == "grouped" else "sequential")
    return Built(chunks, config, settings, Table(model, layout, spelling, divisible_by))


def _pp_rank(pp: int) -> dict[str, int]:
    """0.16.1 reads the pipeline rank from its globals; later versions also take it."""
    return {"pp_rank": pp} if "pp_rank" in inspect.signature(get_gpt_decoder_block_spec).parameters else {}
