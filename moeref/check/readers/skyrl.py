"""Reads SkyRL's overrides, in a script that calls `skyrl.train.entrypoints`, and its trees in YAML.

SkyRL takes Megatron-Bridge's provider and sets in it what `trainer.policy.megatron_config` says. Names and defaults:
SkyRL at a9564572eb8e.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeref.check.readers import provider
from moeref.check.readers.reading import OPTIMIZER, SIZES, STAGES, Reading, under
from moeref.check.readers.tree import (
    Names,
    Tree,
    batch,
    chosen_backend,
    engine_returns_routes,
    only_megatron,
    ranks,
    read_all,
    sequence_parallel,
)
from moeref.check.report import Problem
from moeref.check.value import Value

NAME = "SkyRL"
PROGRAM = r"(?:skyrl|skyrl_train|examples)\.\S+|(?:.*/)?main_\w+\.py"
_POLICY = "trainer.policy."
_MEGATRON = f"{_POLICY}megatron_config."
_KWARGS = f"{_MEGATRON}transformer_config_kwargs."
_RANKS = ("trainer.placement.policy_num_nodes", "trainer.placement.policy_num_gpus_per_node")
#: `train/utils/utils.py validate_batch_sizes` and `dispatch.py` divide the samples of an update.
_BATCH = ("trainer.micro_train_batch_size_per_gpu", "trainer.policy_mini_batch_size", "generator.n_samples_per_prompt")
_TOKENS = "trainer.max_tokens_per_microbatch"  # above 0 it makes the microbatches
_RECOMPUTE = "trainer.gradient_checkpointing"
_MTP, _REPLAY = "trainer.mtp.enabled", f"{_MEGATRON}moe_enable_routing_replay"
#: Its name, and its older one.
_PACKED, _STRATEGY = ("trainer.remove_microbatch_padding", "trainer.use_sample_packing"), "trainer.strategy"
_ROUTES = "generator.inference_engine.enable_return_routed_experts"

#: Settings of `megatron_config` under TransformerConfig's names -> default.
FIELDS: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": True,
    "moe_router_dtype": "fp32",
    "moe_per_layer_logging": False,
}
DEFAULTS: dict[str, Any] = {
    f"{_MEGATRON}tensor_model_parallel_size": 1,
    f"{_MEGATRON}pipeline_model_parallel_size": 1,
    f"{_MEGATRON}context_parallel_size": 1,
    f"{_MEGATRON}expert_model_parallel_size": 1,
    f"{_MEGATRON}expert_tensor_parallel_size": None,
    f"{_MEGATRON}mtp_num_layers": None,
    _REPLAY: False,
    _MTP: False,
    _RECOMPUTE: True,
    f"{_KWARGS}recompute_granularity": "full",
    f"{_KWARGS}recompute_modules": ["core_attn"],
    f"{_KWARGS}recompute_method": "uniform",
    f"{_KWARGS}recompute_num_layers": 1,
    f"{_KWARGS}gradient_accumulation_fusion": False,
    **dict(zip(_BATCH, (1, 256, 5), strict=True)),
    _TOKENS: -1,
    "trainer.seed": 42,
    "trainer.bf16": True,
    "trainer.flash_attn": True,
    "trainer.placement.policy_num_nodes": 1,
    "trainer.placement.policy_num_gpus_per_node": 1,
    **{f"{_MEGATRON}{name}": default for name, default in FIELDS.items()},
}
_VPP = "virtual_pipeline_model_parallel_size"
NAMES = Names(
    layout=under(_MEGATRON, SIZES, _VPP) | under(_KWARGS, STAGES) | {f"{_KWARGS}{_VPP}": "vpp"},
    options={"trainer.seed": "seed"},
    settings=(_KWARGS,),
    fields={
        f"{_MEGATRON}{name}": name for name in (*FIELDS, "moe_router_score_function", "moe_router_enable_expert_bias")
    },
    model=f"{_POLICY}model.path",
    unmapped={
        f"{_POLICY}model.lora.rank": "adapters",
        f"{_POLICY}model.fake_int4_qat.enabled": "weights are rounded to INT4",
        f"{_POLICY}language_model_only": "a part of a multimodal model",
    },
    read=frozenset(
        {
            *(_REPLAY, _MTP, _RECOMPUTE, _TOKENS, *_PACKED, *_BATCH, *_RANKS),
            *("trainer.bf16", "trainer.flash_attn", f"{_MEGATRON}mtp_num_layers"),
        }
    ),
    training={
        **{f"{_MEGATRON}optimizer_config_kwargs.{name}": name for name in OPTIMIZER},
        f"{_MEGATRON}ddp_config.grad_reduce_in_fp32": "grad_reduce_in_fp32",
    },
    elsewhere=(
        *("data.", "generator.", "environment.", "trainer.algorithm.", "trainer.critic.", "trainer.ref."),
        *("trainer.placement.", "trainer.strategy", "trainer.epochs", "trainer.eval", "trainer.update_"),
        *("trainer.mtp.",),
        *("trainer.train_batch", "trainer.policy_mini", "trainer.critic_mini", "trainer.micro_", "trainer.max_"),
        *("trainer.ckpt", "trainer.hf_save", "trainer.logger", "trainer.project", "trainer.run_name", "trainer.resume"),
        *("trainer.export", "trainer.remove_microbatch", "trainer.use_", "trainer.gradient_", "trainer.dump_"),
        *("trainer.fully_async.", "trainer.log", "trainer.sequence_parallel_backend", "trainer.num_", "trainer.torch"),
        *("trainer.override", "trainer.disable_", "trainer.tracker", "trainer.rope_", "trainer.shuffle", "defaults"),
        *(f"{_POLICY}{name}" for name in ("optimizer_config.", "fsdp_config.", "sequence_parallel", "record_memory")),
        *(f"{_POLICY}{name}" for name in ("use_torch_compile", "model.lora.", "torch_profiler", "model.model_config")),
        *(f"{_MEGATRON}{name}" for name in ("ddp_config.", "optimizer_config_kwargs.", "lora_config.", "torch_prof")),
        *(f"{_MEGATRON}{name}" for name in ("hf_export_config.", "empty_cuda_cache", "freeze_moe_router", "mtp_loss")),
        *(f"{_MEGATRON}{name}" for name in ("dist_ckpt", "async_", "model_config_kwargs", "mtp_num")),
    ),
)


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of YAML files and scripts, in order; dotted names in `given` are overrides."""
    reading, tree = read_all(NAME, paths, given, program=PROGRAM, defaults=DEFAULTS, names=NAMES)
    return _finished(reading, tree)


def _finished(reading: Reading, tree: Tree) -> Reading:
    """The reading after what SkyRL derives."""
    at = tree.values
    only_megatron(at.get(_STRATEGY))
    chosen_backend(reading, tree, _STRATEGY, "fsdp")
    _packed(reading, at)
    ranks(reading, at, *_RANKS)
    sequence_parallel(reading)
    batch(reading, at, *_BATCH, by_tokens=type(at[_TOKENS].value) is not int or at[_TOKENS].value > 0)
    if "etp" not in reading.layout and (tp := reading.layout.get("tp")):
        reading.layout["etp"] = Value(tp.name, tp.value, "derived: as TP, where unset")
    _recompute(reading, at[_RECOMPUTE])
    bf16, flash, replay = at["trainer.bf16"], at["trainer.flash_attn"], at[_REPLAY]
    reading.options["precision"] = Value(bf16.name, "bf16" if bf16.value else "fp32", bf16.source)
    if replay.value:
        reading.options["replay"] = Value(replay.name, "R3", replay.source)
        engine_returns_routes(reading, at, replay, _ROUTES)
    mtp = at[f"{_MEGATRON}mtp_num_layers"]
    if not at[_MTP].value:
        reading.settings["mtp_num_layers"] = Value(_MTP, None, at[_MTP].source)
    elif mtp.value is not None:
        reading.settings["mtp_num_layers"] = Value(mtp.name, mtp.value or None, mtp.source)
    backend = Value(flash.name, "flash" if flash.value else "fused", flash.source)
    reading.settings.setdefault("attention_backend", backend)
    own = {"variable_seq_lengths": True, "masked_softmax_fusion": True}
    return provider.build(reading, provider.MEGATRON_BRIDGE, own, NAME)


def _packed(reading: Reading, at: Mapping[str, Value]) -> None:
    """Put in what follows where sequences are padded and not packed: context parallelism is refused."""
    packed = next((at[name] for name in _PACKED if name in at), None)
    if packed is None or (packed.known and packed.value):
        return
    if not packed.known:
        reading.computed["packing"] = packed
        return
    text = f"{packed.name} ({packed.source}) is off, and context parallelism needs it: {NAME} asserts it"
    refused = Problem(NAME, text, f"set {_PACKED[0]}=true")
    reading.by_layout.append(lambda layout: refused if layout.cp > 1 else None)
    reading.elsewhere.append(packed)


def _recompute(reading: Reading, switch: Value) -> None:
    """Without `gradient_checkpointing` SkyRL takes the settings of recomputation away, also those asked for."""
    if not switch.known:
        reading.computed["recompute_granularity"] = switch
    elif not switch.value:
        for name in ("granularity", "method", "num_layers"):
            reading.settings[f"recompute_{name}"] = Value(switch.name, None, switch.source)
