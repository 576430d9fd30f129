"""The real GPTModel chunks of one rank, built from a Hugging Face config under a layout."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from moeref.bridge import VOCAB_DIVISIBLE_BY, Table, padded_vocab
from moeref.config import ConfigError, MoEConfig, Record, Setting, read_back, resolve
from moeref.config.settings import ATTRIBUTES
from moeref.families import Model, Spelling
from moeref.layout import Layout
from moeref.megatron import delta
from moeref.megatron.biased import let_biases_be_added
from moeref.megatron.grouped import with_grouped_names
from moeref.megatron.spec import layer_spec, mtp_name, mtp_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """One rank's model: its chunks (one per virtual stage), their config, and the table that describes them."""

    chunks: list[GPTModel]
    config: TransformerConfig
    record: Record
    table: Table

    @property
    def settings(self) -> dict[str, Setting]:
        """Every value that `config` holds, with its origin."""
        return self.record.settings


def _torch_settings(model: Model, device: str, interleaved: bool) -> dict[str, Setting]:
    """Settings whose values are torch objects or follow from the device."""
    torch_dtype = DTYPES[model.param_dtype]
    values: dict[str, Any] = {
        "activation_func": quick_gelu if model.clamp else torch.nn.functional.silu,
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
    return {k: Setting(v, "default") for k, v in values.items()}


def settings_of(
    model: Model,
    layout: Layout,
    asked: MoEConfig | None = None,
    *,
    device: str = "cpu",
    overrides: Mapping[str, Any] | None = None,
) -> Record:
    """What `build` is about to give to Megatron, resolved against the installed TransformerConfig.

    Raises ConfigError for what cannot be asked for.
    """
    kind = MLATransformerConfig if model.mla else TransformerConfig
    more = _torch_settings(model, device, interleaved=layout.vpp > 1)
    if model.delta and delta.without_fla():
        more["deterministic_mode"] = Setting(True, "default", "GatedDeltaNet without kernels for GPUs")
    asked = (asked or MoEConfig()).with_kwargs(**(overrides or {}))
    return resolve(model, layout, asked, provider=kind, more=more)


def transformer_config(record: Record) -> tuple[TransformerConfig, Record]:
    """The real TransformerConfig, and the record of all that it holds, read back from it.

    Raises ConfigError where a value did not arrive, and whatever the config itself refuses.
    """
    kind = MLATransformerConfig if record["multi_latent_attention"] else TransformerConfig
    given = {name: s.value for name, s in record.settings.items() if s.origin != "provider default"}
    config = kind(**{name: value for name, value in given.items() if name not in ATTRIBUTES})
    for name in ATTRIBUTES & given.keys():
        setattr(config, name, given[name])
    return config, read_back(record, config)


def build(
    model: Model,
    layout: Layout,
    rank: int,
    *,
    device: str = "cpu",
    norms: str = "apart",
    experts: str = "sequential",
    asked: MoEConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
    divisible_by: int = VOCAB_DIVISIBLE_BY,
) -> Built:
    """Build this rank's chunks with plain torch modules; `groups.initialise(layout)` comes first.

    device: "cpu" or a CUDA device. norms: "apart" as in megatron-core's local layer spec, or "fused" into the linears
    as in Transformer Engine's. experts: "sequential", or "grouped" for Transformer Engine's grouped names.
    `asked` and `overrides` (further pass-through settings, which win) are what is asked of Megatron.
    The weights are unset until `bridge.load`. Raises ConfigError for what cannot be asked for.
    """
    record = settings_of(model, layout, asked, device=device, overrides=overrides)
    if record["moe_grouped_gemm"] and experts != "grouped":
        raise ConfigError(
            f"moe_grouped_gemm=True, but experts={experts!r} builds modules without it; give experts='grouped'"
        )
    config, record = transformer_config(record)
    spelling = Spelling(
        norms="fused" if norms == "fused" else "apart",
        experts="grouped" if experts == "grouped" else "sequential",
        mtp=mtp_name(),
    )
    table = Table(model, layout, spelling, divisible_by)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    at = layout.coords(rank)
    kind = {"mla": model.mla is not None, "fused": spelling.norms == "fused", "cp": layout.cp > 1}
    chunks: list[GPTModel] = []
    for vp in range(layout.vpp):
        vp_stage = vp if layout.vpp > 1 else None
        spec = get_gpt_decoder_block_spec(
            delta.attention_only(config),
            use_transformer_engine=False,
            normalization="RMSNorm",
            vp_stage=vp_stage,
            **_pp_rank(at.pp),
        )
        spec.layer_specs = [
            layer_spec(local, moe=model.moe_layers[i], **kind)
            for i, local in zip(table.stages.layers[at.pp, vp], spec.layer_specs, strict=True)
        ]
        if model.delta:
            nets = [model.delta.layers[i] for i in table.stages.layers[at.pp, vp]]
            spec.layer_specs = delta.adapted(spec.layer_specs, nets, fused=spelling.norms == "fused")
            spec.layer_norm = delta.ZeroCenteredNorm
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
            position_embedding_type="yarn" if model.yarn else "rope",
            rotary_percent=model.rotary_percent,
            rotary_base=int(model.rope_theta),
            vp_stage=vp_stage,
        )
        for parameter in chunk.parameters():
            # torch's norm ignores params_dtype. Parameters only: the router's expert_bias is a buffer and stays fp32,
            # where Float16Module's module.bfloat16() would round it until the first forward.
            parameter.data = parameter.data.to(DTYPES[model.param_dtype])
        _of_the_expert_grid(chunk)
        if model.linear_bias:
            let_biases_be_added(chunk)
        chunks.append(with_grouped_names(chunk) if spelling.experts == "grouped" else chunk)
    return Built(chunks, config, record, table)


def _of_the_expert_grid(chunk: torch.nn.Module) -> None:
    """Mark experts for DistributedDataParallel: their gradients are reduced over the expert grid's replicas.

    0.16.1 marks them only at EP > 1, and with ETP other than TP reduces the others over the dense grid's. Both versions
    mark biases behind a row-parallel linear to be summed over TP, which experts' replicas have done by then.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010 -- a mark torch does not know
            setattr(parameter, "sequence_parallel", False)  # noqa: B010


def _pp_rank(pp: int) -> dict[str, int]:
    """0.16.1 reads the pipeline rank from its globals; later versions also take it."""
    return {"pp_rank": pp} if "pp_rank" in inspect.signature(get_gpt_decoder_block_spec).parameters else {}
