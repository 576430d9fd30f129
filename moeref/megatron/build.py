"""Builds the GPTModel chunks of one rank from the record of a run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from moeref import families
from moeref.bridge import ShardMap, padded_vocab
from moeref.config import ConfigError, EffectiveSettings, Setting, read_back
from moeref.config.settings import ATTRIBUTES
from moeref.dispatcher.setup import minor_version
from moeref.megatron import dispatch, gated_delta_net, groups, precision, seeding, sparse_attention, te_layers
from moeref.megatron.device import checked as checked_device
from moeref.megatron.expert_bias_patch import patch_expert_biases
from moeref.megatron.grouped_names import with_grouped_names
from moeref.megatron.marks import mark_sequence_parallel
from moeref.megatron.norms import TorchNorm, ZeroCenteredNorm, over_all_heads
from moeref.megatron.spec import LayerNormColumnParallelLinear, layer_spec, mtp_name, mtp_spec
from moeref.record import Record, installed_core
from moeref.torch_dtypes import TORCH


@dataclass(frozen=True)
class Built:
    """One rank's model: its chunks (one per virtual stage), their config, and the map of its shards.

    `record` is the record it was built from, `settings` has every value of `config` with its origin.
    """

    chunks: list[GPTModel]
    config: TransformerConfig
    record: Record
    settings: EffectiveSettings
    shard_map: ShardMap


def _machine_settings(record: Record, device: str) -> dict[str, Setting]:
    """Settings that are not in the record: torch objects, and what depends on this machine."""
    model, dtype = record.model, TORCH[record.model.param_dtype]
    by_name = record.settings.by_name
    residual = "fp32_residual_connection" in by_name and by_name["fp32_residual_connection"].value
    values: dict[str, Any] = {
        "activation_func": quick_gelu if model.clamp else torch.nn.functional.silu,
        "params_dtype": dtype,
        # Stages send what the residual connection holds.
        "pipeline_dtype": torch.float32 if residual else dtype,
        "autocast_dtype": dtype,
        # If False, megatron-core allocates on the current CUDA device.
        "use_cpu_initialization": device == "cpu",
    }
    found = {name: Setting(value, "default") for name, value in values.items()}
    asked = {name for name, one in by_name.items() if one.asked}
    return {name: one for name, one in found.items() if name not in asked}


def transformer_config(
    record: Record, device: str = "cpu", *, drawn: bool = True
) -> tuple[TransformerConfig, EffectiveSettings]:
    """megatron-core's TransformerConfig for a record on a type of device, and its values, read back from it.

    Raises ConfigError if a value differs from the record's, and the config's own errors.
    """
    kind = MLATransformerConfig if record.model.mla else TransformerConfig
    settings = record.settings.with_settings(_machine_settings(record, device))
    if not drawn:
        settings = settings.with_settings({"perform_initialization": Setting(False, "default", "weights are loaded")})
    given = {name: s.value for name, s in settings.by_name.items() if s.origin != "provider default"}
    if isinstance(given.get("attention_backend"), str):
        given["attention_backend"] = AttnBackend[given["attention_backend"]]
    config = kind(**{name: value for name, value in given.items() if name not in ATTRIBUTES})
    for name in ATTRIBUTES & given.keys():
        setattr(config, name, given[name])
    return config, read_back(settings, config)


def build(record: Record, rank: int, device: str = "cpu", *, drawn: bool = True) -> Built:
    """Seed this rank's generators and build its chunks. Call `groups.initialise(record.layout)` first.

    device: "cpu" or the current CUDA device.
    drawn: the weights are drawn as megatron-core draws them, until `bridge.load`. If not, they hold anything, and no
    generator is seeded, for which megatron-core needs CUDA.

    Raises ConfigError for what cannot be built in this process, DispatcherError for a flex dispatcher whose kernels are
    missing, LayoutError for process groups of another layout, and SeedError for refused seeds.
    """
    where = checked_device(device)
    _check_here(record, where)
    config, settings = transformer_config(record, where.type, drawn=drawn)
    shard_map = ShardMap(record.model, record.layout, record.names, divisible_by=record.divisible_by)
    precision.check_widths(shard_map, rank, config)
    dispatch.let_router_run()
    if drawn:
        seeding.seed_rank(record.layout, record.seeds.seed, per_dp=record.seeds.per_dp, formula=record.seeds.formula)
    pp = record.layout.coords(rank).pp
    chunks = [_chunk(record, shard_map, config, pp, vp, where) for vp in range(record.layout.vpp)]
    return Built(chunks, config, record, settings, shard_map)


def _check_here(record: Record, where: torch.device) -> None:
    """Raise the error that `build` documents if this process cannot build the record."""
    installed = installed_core()
    if minor_version(record.core) != minor_version(installed):
        raise ConfigError(f"the record is of megatron-core {record.core}, and {installed} is installed; check for that")
    if record.names.mtp != mtp_name():
        raise ConfigError(f"the record names MTP layers {record.names.mtp}, this megatron-core {mtp_name()}")
    if record.kernels == "te":
        te_layers.check(record)
    dispatch.check(record, gpu=where.type == "cuda")
    model = record.model
    groups.check(record.layout, shared=model.tied or bool(model.mtp_layers), tied=model.tied)


def arguments(record: Record) -> dict[str, Any]:
    """Arguments of GPTModel that are not fields of its config, the same in every chunk."""
    model = record.model
    return {
        "vocab_size": padded_vocab(model, record.layout.tp, record.divisible_by),
        "max_sequence_length": model.max_positions,
        "share_embeddings_and_output_weights": model.tied,
        "position_embedding_type": "yarn" if model.yarn else "rope",
        "rotary_percent": model.rotary_percent,
        "rotary_base": int(model.rope_theta),
    }


def _chunk(
    record: Record, shard_map: ShardMap, config: TransformerConfig, pp: int, vp: int, where: torch.device
) -> GPTModel:
    """One virtual stage on its device, with the dtypes and parameter attributes that training needs."""
    model, layout = record.model, record.layout
    block, mtp = _specs(shard_map, config, pp, vp, record.kernels)
    if model.one_qk_norm:
        block.layer_specs = [over_all_heads(local) for local in block.layer_specs]
    chunk = GPTModel(
        config=config,
        mtp_block_spec=mtp,
        transformer_layer_spec=block,
        pre_process=layout.has_embedding(pp, vp),
        post_process=layout.has_head(pp, vp),
        vp_stage=vp if layout.vpp > 1 else None,
        **arguments(record),
    )
    kept = {mapping.megatron.rpartition("}")[2]: mapping.dtype for mapping in families.mappings(model) if mapping.dtype}
    for name, parameter in chunk.named_parameters():
        # torch's norm ignores params_dtype. Only parameters are cast: the router's expert_bias is a buffer and stays
        # fp32. Float16Module's module.bfloat16() would round it.
        dtype = next((dtype for end, dtype in kept.items() if name.endswith(end)), model.param_dtype)
        parameter.data = parameter.data.to(TORCH[dtype])
    chunk.to(where)  # plain torch modules were created on the host
    _mark_experts(chunk, whole=layout.etp == 1)
    if model.sinks:
        _mark_sinks(chunk)
    if model.indexer and not config.dsa_indexer_loss_coeff:
        sparse_attention.freeze_indexers(chunk)
    if model.linear_bias:
        patch_expert_biases(chunk)
    by_name = record.kernels == "torch" and record.names.experts == "grouped"
    return with_grouped_names(chunk) if by_name else chunk


def _specs(shard_map: ShardMap, config: TransformerConfig, pp: int, vp: int, kernels: str) -> tuple[Any, Any]:
    """The spec of a stage's block, and of its MTP block (None if it has none)."""
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
    norm = ZeroCenteredNorm if model.zero_centered else TorchNorm
    kind: dict[str, Any] = {
        "mla": model.mla is not None,
        "fused": fused,
        "norm": norm,
        "dsa": model.indexer is not None,
    }
    block.layer_norm = norm
    block.layer_specs = [
        layer_spec(local, moe=moe[i], **kind) for i, local in zip(layers, block.layer_specs, strict=True)
    ]
    if nets:
        linears = LayerNormColumnParallelLinear if fused else ColumnParallelLinear, RowParallelLinear
        block.layer_specs = gated_delta_net.in_place_of_attention(block.layer_specs, nets, *linears)
    return block, mtp_spec(config, moe=moe[-1], vp_stage=vp_stage, **kind) if with_mtp else None


def _mark_experts(chunk: torch.nn.Module, whole: bool) -> None:
    """Mark experts for DistributedDataParallel, which then reduces their gradients over the expert grid's replicas.

    megatron-core 0.16.1 marks them only at EP > 1; unmarked experts are reduced over the dense grid's replicas, which
    is wrong if ETP differs from TP. Both versions also mark the biases of row-parallel linears to be summed over TP.
    For experts that would sum twice, so the mark is removed.

    whole: no ETP rank has a replica of an expert's parameter. Then all count in the norm of the gradient; 0.16.1 counts
    biases on the first TP rank alone (Megatron-LM#5916).
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010 -- a mark torch does not know
            mark_sequence_parallel(parameter, False)
            if whole:
                setattr(parameter, "tensor_model_parallel", True)  # noqa: B010


def _mark_sinks(chunk: torch.nn.Module) -> None:
    """Mark attention sinks as cut over TP: those of the first TP rank alone would count in the norm of the gradient.

    megatron-core cuts them by heads, and marks them in neither version (Megatron-LM#7452).
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(".softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def _pp_rank(pp: int) -> dict[str, int]:
    """The argument `pp_rank` for versions of megatron-core that have it; 0.16.1 reads the rank from its globals."""
    return {"pp_rank": pp} if "pp_rank" in inspect.signature(get_gpt_decoder_block_spec).parameters else {}
