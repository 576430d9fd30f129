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

from moeref.bridge import VOCAB_DIVISIBLE_BY, ShardMap, padded_vocab
from moeref.config import ConfigError, EffectiveSettings, MoEConfig, Setting, read_back, resolve
from moeref.config.settings import ATTRIBUTES
from moeref.families import Model, SpecNames
from moeref.layout import Layout
from moeref.megatron import device as on
from moeref.megatron import dispatch, gated_delta_net, te_layers
from moeref.megatron import norms as norms_of_torch
from moeref.megatron import precision as recipes
from moeref.megatron.expert_bias_patch import patch_expert_biases
from moeref.megatron.grouped_names import with_grouped_names
from moeref.megatron.spec import layer_spec, mtp_name, mtp_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Built:
    """One rank's model: its chunks (one per virtual stage), their config, and the map of its shards."""

    chunks: list[GPTModel]
    config: TransformerConfig
    record: EffectiveSettings
    shard_map: ShardMap

    @property
    def settings(self) -> dict[str, Setting]:
        """Every value that `config` holds, with its origin."""
        return self.record.by_name


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
    # Off on every device. On a GPU the masked softmax and the accumulation of gradients are apex's kernels, the others
    # compile or fuse what is to be the same arithmetic as on a CPU.
    off = ("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion")
    values |= dict.fromkeys((*off, "gradient_accumulation_fusion", "deallocate_pipeline_outputs"), False)
    # Else megatron-core allocates on the current CUDA device.
    values |= {"use_cpu_initialization": device == "cpu"}
    return {k: Setting(v, "default") for k, v in values.items()}


def settings_of(
    model: Model,
    layout: Layout,
    asked: MoEConfig | None = None,
    *,
    device: str = "cpu",
    kernels: str = "torch",
    experts: str = "sequential",
    precision: str = "",
    overrides: Mapping[str, Any] | None = None,
) -> EffectiveSettings:
    """What `build` is about to give to Megatron, resolved against the installed TransformerConfig.

    Raises ConfigError for what cannot be asked for.
    """
    if kernels not in ("torch", "te"):
        raise ConfigError(f"kernels={kernels!r} is neither 'torch' nor 'te'")
    kind = MLATransformerConfig if model.mla else TransformerConfig
    more = _torch_settings(model, device, interleaved=layout.vpp > 1)
    if model.gated_delta_net and gated_delta_net.without_fla():
        more["deterministic_mode"] = Setting(True, "default", "GatedDeltaNet without kernels for GPUs")
    if kernels == "te":
        more["moe_grouped_gemm"] = Setting(experts == "grouped", "default", f"experts={experts!r}")
    asked = recipes.asked(precision, (asked or MoEConfig()).with_kwargs(**(overrides or {})))
    record = resolve(model, layout, asked, provider=kind, more=more)
    if record["fp8"] and kernels != "te":
        raise ConfigError(
            f"{model.family}: fp8={record['fp8']!r} with kernels={kernels!r} would be computed in {model.param_dtype}, "
            "since only Transformer Engine's layers quantise; give kernels='te'"
        )
    return record


def transformer_config(record: EffectiveSettings) -> tuple[TransformerConfig, EffectiveSettings]:
    """The real TransformerConfig, and the record of all that it holds, read back from it.

    Raises ConfigError where a value did not arrive, and whatever the config itself refuses.
    """
    kind = MLATransformerConfig if record["multi_latent_attention"] else TransformerConfig
    given = {name: s.value for name, s in record.by_name.items() if s.origin != "provider default"}
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
    kernels: str = "torch",
    norms: str = "separate",
    experts: str = "sequential",
    precision: str = "",
    asked: MoEConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
    divisible_by: int = VOCAB_DIVISIBLE_BY,
) -> Built:
    """Build this rank's chunks; `groups.initialise(layout)` comes first.

    device: "cpu" or the current CUDA device. kernels: "torch" for plain torch modules, or "te" for Transformer
    Engine's in megatron-core's own spec. norms: "separate" as in megatron-core's local layer spec, or "fused" into the
    linears as in Transformer Engine's. experts: "sequential", or "grouped" for Transformer Engine's grouped linears
    ("torch": under their names). precision: "" for what the checkpoint's dtype says, or an FP8 recipe, "delayed",
    "tensorwise", "blockwise" or "mxfp8", which needs "te".
    `asked` and `overrides` (further pass-through settings, which win) are what is asked of Megatron.
    The weights are unset until `bridge.load`. Raises ConfigError for what cannot be asked for, and DispatcherError for
    a flex dispatcher whose kernels are not here.
    """
    where = on.checked(device)
    record = settings_of(
        model,
        layout,
        asked,
        device=where.type,
        kernels=kernels,
        experts=experts,
        precision=precision,
        overrides=overrides,
    )
    if kernels == "te":
        te_layers.check(model, record, norms=norms, experts=experts)
    elif record["moe_grouped_gemm"] and experts != "grouped":
        raise ConfigError(
            f"moe_grouped_gemm=True, but experts={experts!r} builds modules without it; give experts='grouped'"
        )
    dispatch.check(model, layout, record, gpu=where.type == "cuda")
    config, record = transformer_config(record)
    names = SpecNames(
        norms="fused" if norms == "fused" else "separate",
        experts="grouped" if experts == "grouped" else "sequential",
        mtp=mtp_name(),
    )
    shard_map = ShardMap(model, layout, names, divisible_by=divisible_by)
    recipes.check_widths(shard_map, rank, config)
    dispatch.let_router_run()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    at = layout.coords(rank)
    chunks: list[GPTModel] = []
    for vp in range(layout.vpp):
        vp_stage = vp if layout.vpp > 1 else None
        block, mtp = _specs(shard_map, config, at.pp, vp, kernels)
        chunk = GPTModel(
            config=config,
            mtp_block_spec=mtp,
            transformer_layer_spec=block,
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
        chunk.to(where)  # what plain torch modules hold is on the host until now
        _of_the_expert_grid(chunk)
        if model.linear_bias:
            patch_expert_biases(chunk)
        by_name = kernels == "torch" and names.experts == "grouped"
        chunks.append(with_grouped_names(chunk) if by_name else chunk)
    return Built(chunks, config, record, shard_map)


def _specs(shard_map: ShardMap, config: TransformerConfig, pp: int, vp: int, kernels: str) -> tuple[Any, Any]:
    """The specs of one stage: of its block, and of the MTP block if it has that too."""
    model, layout, layers = shard_map.model, shard_map.layout, shard_map.stages.layers[pp, vp]
    vp_stage = vp if layout.vpp > 1 else None
    with_mtp, moe = shard_map.stages.mtp == (pp, vp), model.moe_layers
    nets = [model.gated_delta_net.layers[i] for i in layers] if model.gated_delta_net else []
    block = get_gpt_decoder_block_spec(
        gated_delta_net.attention_only(config),
        use_transformer_engine=kernels == "te",
        normalization="RMSNorm",
        vp_stage=vp_stage,
        **_pp_rank(pp),
    )
    if kernels == "te":
        if nets:
            block.layer_specs = te_layers.nets(block.layer_specs, nets)
        mla = model.mla is not None
        return block, te_layers.mtp_spec(config, moe=moe[-1], mla=mla, vp_stage=vp_stage) if with_mtp else None
    fused = shard_map.names.norms == "fused"
    kind = {"mla": model.mla is not None, "fused": fused, "cp": layout.cp > 1}
    block.layer_norm = norms_of_torch.TorchNorm
    block.layer_specs = [
        layer_spec(local, moe=moe[i], **kind) for i, local in zip(layers, block.layer_specs, strict=True)
    ]
    if nets:
        block.layer_specs = gated_delta_net.adapted(block.layer_specs, nets, fused=fused)
        block.layer_norm = gated_delta_net.ZeroCenteredNorm
    return block, mtp_spec(config, moe=moe[-1], vp_stage=vp_stage, **kind) if with_mtp else None


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
