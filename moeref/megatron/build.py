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
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from moeref.bridge import VOCAB_DIVISIBLE_BY, Table, padded_vocab
from moeref.config import Setting, transformer_settings
from moeref.families import Model, Spelling
from moeref.layout import Layout
from moeref.megatron.grouped import with_grouped_names
from moeref.megatron.spec import layer_spec, mtp_name, mtp_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """One rank's model: its chunks (one per virtual stage), their config, and the table that describes them."""

    chunks: list[GPTModel]
    config: TransformerConfig
    settings: dict[str, Setting]
    table: Table


def _torch_settings(dtype: str, device: str, interleaved: bool) -> dict[str, Setting]:
    """Settings whose values are torch objects or follow from the device."""
    torch_dtype = DTYPES[dtype]
    values: dict[str, Any] = {
        "activation_func": torch.nn.functional.silu,  # every family refuses another hidden_act
        "params_dtype": torch_dtype,
        "bf16": torch_dtype is torch.bfloat16,
        "pipeline_dtype": torch_dtype,
        "autocast_dtype": torch_dtype,
        # Interleaved, NCCL and gloo agree on the chunk order only with overlapped, unbatched point-to-point calls; the
        # batched form computes PP2·VPP2 wrongly without a word.
        "overlap_p2p_comm": interleaved,
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
    kind = MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig
    known = {f.name for f in dataclasses.fields(kind)}
    for name in settings.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ValueError(f"{kind.__name__} has no field {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return kind(**{name: setting.value for name, setting in settings.items()})


def build(
    model: Model,
    layout: Layout,
    rank: int,
    *,
    device: str = "cpu",
    norms: str = "apart",
    experts: str = "sequential",
    overrides: Mapping[str, Any] | None = None,
    divisible_by: int = VOCAB_DIVISIBLE_BY,
) -> Built:
    """Build this rank's chunks with plain torch modules; `groups.initialise(layout)` comes first.

    device: "cpu" or a CUDA device. norms: "apart" as in megatron-core's local layer spec, or "fused" into the linears
    as in Transformer Engine's. experts: "sequential", or "grouped" for Transformer Engine's grouped names.
    The weights are unset until `bridge.load`. Raises ValueError for an override that TransformerConfig does not have.
    """
    settings = {
        **transformer_settings(model, layout),
        **_torch_settings(model.param_dtype, device, interleaved=layout.vpp > 1),
        **{k: Setting(v, "override") for k, v in (overrides or {}).items()},
    }
    config = transformer_config(settings)
    spelling = Spelling(
        norms="fused" if norms == "fused" else "apart",
        experts="grouped" if experts == "grouped" else "sequential",
        mtp=mtp_name(),
    )
    table = Table(model, layout, spelling, divisible_by)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    at = layout.coords(rank)
    kind = {"mla": model.mla is not None, "fused": spelling.norms == "fused"}
    chunks: list[GPTModel] = []
    for vp in range(layout.vpp):
        vp_stage = vp if layout.vpp > 1 else None
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage, **_pp_rank(at.pp)
        )
        spec.layer_specs = [
            layer_spec(local, moe=model.moe_layers[i], **kind)
            for i, local in zip(table.stages.layers[at.pp, vp], spec.layer_specs, strict=True)
        ]
        with_mtp = table.stages.mtp == (at.pp, vp)
        mtp = mtp_spec(config, moe=model.moe_layers[-1], vp_stage=vp_stage, **kind) if with_mtp else None
        chunk = GPTModel(
            config=config,
            mtp_block_spec=mtp,
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
        chunks.append(with_grouped_names(chunk) if spelling.experts == "grouped" else chunk)
    return Built(chunks, config, settings, table)


def _pp_rank(pp: int) -> dict[str, int]:
    """0.16.1 reads the pipeline rank from its globals; later versions also take it."""
    return {"pp_rank": pp} if "pp_rank" in inspect.signature(get_gpt_decoder_block_spec).parameters else {}
