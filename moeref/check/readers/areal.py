"""Reads AReaL's YAML, and overrides in a script that calls a program with it: what `actor` trains with Megatron.

AReaL builds the model with mbridge, to which it passes dispatcher, router dtype and fusions of `actor.megatron`, or
with Megatron-Bridge, which gets none of them. It seeds Megatron's trackers with 0, before it has its own seed; a
check does not know that seed. Names and defaults: AReaL at cbff54d645d2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeref.check.readers import allocation, areal_stages, provider
from moeref.check.readers.reading import Reading
from moeref.check.readers.tree import Names, read_all, sequence_parallel
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value
from moeref.families import Model

NAME = "AReaL"
PROGRAM = r"(?:.*/)?\w+\.py|areal\.\S+"
_ACTOR, _MEGATRON = "actor.", "actor.megatron."
_FP8, _DDP = f"{_MEGATRON}fp8_config.", f"{_MEGATRON}ddp."
_BACKEND, _LEGACY, _VPP = "actor.backend", "allocation_mode", f"{_MEGATRON}virtual_pipeline_parallel_size"
_BRIDGE, _KIND, _TREES = f"{_MEGATRON}bridge_type", "actor.optimizer.type", "actor.enable_tree_training"
_CHECKPOINTING, _SAME = "actor.gradient_checkpointing", f"{_MEGATRON}use_deterministic_algorithms"
_LORA, _DTYPE, _MTP = "actor.use_lora", "actor.dtype", f"{_MEGATRON}enable_mtp"

#: Settings of recomputation -> default. mbridge gets them with `gradient_checkpointing`, Megatron-Bridge always.
RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "recompute_modules": None,
    "distribute_saved_activations": None,
}
#: Settings of `actor.megatron` -> default. mbridge gets them, Megatron-Bridge does not.
MOE: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
    "moe_z_loss_coeff": None,
    "moe_enable_deepep": False,
    "cross_entropy_loss_fusion": False,
}
#: Of these, what is passed on only where it says something.
_IF_TRUE = frozenset({"moe_router_dtype", "moe_z_loss_coeff", "moe_enable_deepep", "cross_entropy_loss_fusion"})
#: Settings of `fp8_config` -> (field of TransformerConfig, default).
FP8: dict[str, tuple[str, Any]] = {
    "mode": ("fp8", "e4m3"),
    "recipe": ("fp8_recipe", "delayed"),
    "param": ("fp8_param", False),
    "margin": ("fp8_margin", 0),
    "amax_history_len": ("fp8_amax_history_len", 1),
    "amax_compute_algo": ("fp8_amax_compute_algo", "most_recent"),
    "wgrad": ("fp8_wgrad", True),
    "dot_product_attention": ("fp8_dot_product_attention", False),
    "multi_head_attention": ("fp8_multi_head_attention", False),
    "tp_only_amax_red": ("tp_only_amax_red", False),
    "first_last_layers_bf16": ("first_last_layers_bf16", False),
    "num_layers_at_start_in_bf16": ("num_layers_at_start_in_bf16", 1),
    "num_layers_at_end_in_bf16": ("num_layers_at_end_in_bf16", 1),
}
#: Settings that AReaL has removed: it raises if one is there.
_REMOVED = ("actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode")
#: Dtypes of the optimizer -> default.
_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DEFAULTS: dict[str, Any] = {
    **{f"{_MEGATRON}{name}": default for name, default in RECOMPUTE.items()},
    **{f"{_MEGATRON}{name}": default for name, default in MOE.items()},
    **{f"{_MEGATRON}{name}": "float32" for name in _STATES},
    f"{_MEGATRON}use_precision_aware_optimizer": False,
    f"{_DDP}use_distributed_optimizer": True,
    f"{_DDP}grad_reduce_in_fp32": True,
    _VPP: 1,
    _BRIDGE: "mbridge",
    _SAME: False,
    _CHECKPOINTING: False,
    _LORA: False,
    _MTP: False,
    _TREES: False,
    _DTYPE: "bfloat16",
    _KIND: "adam",
}
NAMES = Names(
    layout={},
    options={},
    settings=(),
    fields={},
    model="actor.path",
    unmapped={
        "actor.is_critic": "a head of its own",
        f"{_MEGATRON}use_torch_fsdp2": "FSDP2",
        f"{_MEGATRON}use_custom_fsdp": "Megatron-FSDP",
    },
    read=frozenset(
        {
            *(_BACKEND, _LEGACY, *_REMOVED, *DEFAULTS),
            *(f"{_FP8}{name}" for name in FP8),
        }
    ),
    elsewhere=(
        *("experiment_name", "trial_name", "cluster.", "seed", "enable_offload", "total_train_", "tokenizer_path"),
        *("train_dataset", "valid_dataset", "saver.", "evaluator.", "stats_logger.", "perf_tracer", "memory_profiler"),
        *("recover.", "sglang.", "vllm.", "scheduler.", "gconfig.", "eval_gconfig", "rollout.", "ref", "critic"),
        *("teacher", "dynamic_bs", "launcher.", "server_only", "async_training", "weight_update_mode", "defaults"),
        *("profile.", "econfig.", "post_exit_hook"),
        # Of the actor, what it trains on and by which loss.
        *(f"{_ACTOR}{name}" for name in ("experiment_name", "trial_name", "attn_impl", "use_kernels", "init_from")),
        *(
            f"{_ACTOR}{name}"
            for name in ("temperature", "mb_spec.", "pad_to_maximum", "disable_dropout", "grad_reduce")
        ),
        *(f"{_ACTOR}{name}" for name in ("optimizer", "weight_update_mode", "fsdp.", "archon.", "offload", "lora_")),
        *(f"{_ACTOR}{name}" for name in ("target_modules", "peft_type", "scheduling_", "_version", "admin_api_key")),
        *(f"{_ACTOR}{name}" for name in ("log_", "request_timeout", "setup_timeout", "ppo_n_minibatches", "eps_clip")),
        *(f"{_ACTOR}{name}" for name in ("c_clip", "m2_threshold", "reward_", "overlong_", "mask_no_eos", "discount")),
        *(
            f"{_ACTOR}{name}"
            for name in ("gae_lambda", "adv_norm", "kl_", "use_sapo_loss", "sapo_tau_", "recompute_log")
        ),
        *(f"{_ACTOR}{name}" for name in ("use_decoupled_loss", "rejection_sampling", "importance_sampling_level")),
        *(f"{_ACTOR}{name}" for name in ("prox_logp_method", "max_new_tokens", "enable_delta_", "weight_update_")),
        *(f"{_MEGATRON}{name}" for name in ("enable_chunked_logits", "entropy_requires_grad", "lm_head_loss_")),
        *(f"{_MEGATRON}{name}" for name in ("enable_fp32_lm_head", "use_bridge_for_update_weights")),
        *(f"{_MEGATRON}{name}" for name in ("wrap_with_ddp", "overlap_param_gather_with", "main_grads_dtype")),
        *(f"{_MEGATRON}{name}" for name in ("async_save", "use_checkpoint_opt", "use_mbridge_save")),
        *(f"{_DDP}{name}" for name in ("overlap_", "align_param_gather", "check_for_nan", "bucket_size", "average_in")),
        *(f"{_DDP}fp8_param_gather", f"{_FP8}direct_convert"),
    ),
)


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of YAML files and scripts, in order; dotted names in `given` are overrides."""
    reading, tree = read_all(NAME, paths, given, program=PROGRAM, defaults=DEFAULTS, names=NAMES)
    return _finished(reading, tree.values)


def _finished(reading: Reading, at: Mapping[str, Value]) -> Reading:
    """The reading after what AReaL derives."""
    _layout(reading, at)
    kind = _bridge(reading, at)
    if (dtype := at[_DTYPE]).value != "bfloat16" and at[_KIND].value != "adam_bf16":
        raise CheckError(f"{dtype.source}: {dtype.name}={dtype.value}: moeref knows bfloat16 only")
    reading.options["precision"] = Value(dtype.name, "bf16", dtype.source)
    sequence_parallel(reading)
    _recompute(reading, at, kind)
    _optimizer(reading, at)
    _quantised(reading, at)
    for value in (at[path] for path in _REMOVED if path in at):
        text = f"{value.name} ({value.source}) is removed: {NAME} raises ValueError"
        reading.problems.append(Problem(NAME, text, "use actor.rejection_sampling"))
    _moe(reading, at, kind)
    if kind is provider.MEGATRON_BRIDGE:
        _head(reading, at[_MTP])
    if (same := at[_SAME]).value:
        reading.settings["deterministic_mode"] = same
        for name in ("cross_entropy_loss_fusion", "bias_dropout_fusion"):
            reading.settings[name] = Value(same.name, False, same.source)
    own: dict[str, Any] = {"variable_seq_lengths": True}
    if kind is provider.MEGATRON_BRIDGE:
        vpp = reading.layout.get("vpp")
        own |= {"moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False, "overlap_p2p_comm": bool(vpp)}
    return provider.build(reading, kind, own, NAME)


def _layout(reading: Reading, at: Mapping[str, Value]) -> None:
    """The axes and ranks that the backend's text says, and how mbridge's stages are cut."""
    text = at.get(_BACKEND) or at.get(_LEGACY)
    if text is None or not text.value:
        raise CheckError(f"{_BACKEND} is not given: {NAME} needs one such as megatron:d4t2p2")
    if not text.known:
        reading.computed |= dict.fromkeys(("tp", "world"), text)
        return
    backend, axes = allocation.component(str(text.value))
    if backend != "megatron":
        raise CheckError(f"{text.source}: {text.name} {text.value}: moeref knows Megatron only")
    reading.layout |= {axis: Value(text.name, size, text.source) for axis, size in axes.items()}
    if text.name == _LEGACY:
        told = f"{text.name} ({text.source}) is read by {NAME}'s older launchers only; others need {_BACKEND}"
        reading.problems.append(Problem(NAME, told, f"give {_BACKEND}", refused=False))
    vpp = at[_VPP]
    if type(vpp.value) is int and vpp.value > 1:
        reading.layout["vpp"] = vpp
        if axes["pp"] == 1:
            told = f"{vpp.name} {vpp.value} ({vpp.source}) at one pipeline stage: {NAME} raises an error"
            reading.problems.append(Problem(NAME, told, "leave it out"))
    if axes["pp"] > 1 and at[_BRIDGE].value == "mbridge":
        reading.stages = _stages
        reading.by_model.append(_uncut)


def _stages(model: Model, layout: Mapping[str, Value]) -> Value:
    """The stages that AReaL gives mbridge; Megatron-Bridge cuts evenly."""
    number = layout["pp"].value * (layout["vpp"].value if "vpp" in layout else 1)
    made = areal_stages.pattern(model, number, layout["ep"].value)
    return Value("pipeline_model_parallel_layout", made or None, f"derived: {NAME} evens out what it estimates")


def _uncut(model: Model) -> Problem | None:
    """What AReaL's cut of the layers leaves open: the width of latent attention's heads, and MTP layers."""
    if model.mtp_layers:
        text = f"{NAME} cuts the layers into stages without a place for the MTP layers of {model.family}"
    elif model.mla is not None or model.gated_delta_net is not None:
        text = f"{NAME} cuts the layers into stages by its own estimate, unknown for attention of {model.family}"
    else:
        return None
    return Problem(NAME, text, refused=False)


def _bridge(reading: Reading, at: Mapping[str, Value]) -> provider.Provider:
    """The bridge that makes the config, and what it does not take."""
    kind, lora, trees = at[_BRIDGE], at[_LORA], at[_TREES]
    if kind.value not in ("mbridge", "megatron-bridge"):
        raise CheckError(f"{kind.source}: {kind.name}={kind.value} is none of mbridge, megatron-bridge")
    other = kind.value == "megatron-bridge"
    for value, refused, why in ((lora, not other, "adapters"), (trees, other, "attention over trees of its own")):
        if value.value:
            text = f"{value.name} ({value.source}): {why}"
            said = f"{text}, which {NAME} refuses with {kind.name}={kind.value}" if refused else text
            reading.problems.append(Problem(NAME, said, "use the other bridge" if refused else "", refused=refused))
    return provider.MEGATRON_BRIDGE if other else provider.MBRIDGE


def _moe(reading: Reading, at: Mapping[str, Value], kind: provider.Provider) -> None:
    """Put in the settings of experts and fusions that mbridge gets, defaults too; Megatron-Bridge loses them."""
    for name in MOE:
        value = at[f"{_MEGATRON}{name}"]
        if kind is provider.MEGATRON_BRIDGE:
            if value.given:
                reading.lost[name] = value
        elif not value.known:
            reading.computed[name] = value
        elif value.value or name not in _IF_TRUE:
            reading.settings[name] = value


def _head(reading: Reading, mtp: Value) -> None:
    """Without `enable_mtp`, Megatron-Bridge's model has no MTP layers; with it, the model has to have some."""
    if not mtp.known:
        reading.computed["mtp_num_layers"] = mtp
    elif not mtp.value:
        reading.settings["mtp_num_layers"] = Value(mtp.name, None, mtp.source)
    else:
        text = f"{mtp.name} ({mtp.source}): the model's config says no MTP layers, and {NAME} raises ValueError"
        refused = Problem(NAME, text, "leave it out")
        reading.by_model.append(lambda model: None if model.mtp_layers else refused)


def _recompute(reading: Reading, at: Mapping[str, Value], kind: provider.Provider) -> None:
    """mbridge gets the settings of recomputation only with gradient checkpointing."""
    switch = at[_CHECKPOINTING]
    if not switch.known:
        reading.computed["recompute_granularity"] = switch
    elif switch.value or kind is provider.MEGATRON_BRIDGE:
        for name in RECOMPUTE:
            value = at[f"{_MEGATRON}{name}"]
            if value.value is not None or name == "recompute_granularity":
                reading.settings[name] = value
    else:
        reading.settings["recompute_granularity"] = Value(switch.name, None, switch.source)


def _optimizer(reading: Reading, at: Mapping[str, Value]) -> None:
    """What decides memory; `adam_bf16` is Adam with both moments in bf16."""
    kind, aware = at[_KIND], at[f"{_MEGATRON}use_precision_aware_optimizer"]
    if kind.value not in ("adam", "sgd", "adam_bf16"):
        text = f"{kind.name} {kind.value} ({kind.source}): {NAME} asserts adam, sgd or adam_bf16"
        reading.problems.append(Problem(NAME, text, "give one of these"))
    for name in ("use_distributed_optimizer", "grad_reduce_in_fp32"):
        reading.training[name] = at[f"{_DDP}{name}"]
    half = kind.value == "adam_bf16"
    reading.training["use_precision_aware_optimizer"] = Value(kind.name, True, kind.source) if half else aware
    for name in _STATES:
        value = at[f"{_MEGATRON}{name}"]
        if half and name != "main_params_dtype":
            value = Value(kind.name, "bfloat16", kind.source)
        if value.given or (half or aware.value):
            short = _SHORT.get(str(value.value).removeprefix("torch."), value.value)
            reading.training[name] = Value(value.name, short, value.source)
    reading.elsewhere.append(Value("optimizer", kind.value, kind.source))


def _quantised(reading: Reading, at: Mapping[str, Value]) -> None:
    """FP8, where any of its settings is given: AReaL refuses it for files that are not in FP8."""
    given = [at[path] for name in FP8 if (path := f"{_FP8}{name}") in at]
    if not given:
        return
    for name, (field, default) in FP8.items():
        path = f"{_FP8}{name}"
        reading.settings[field] = at.get(path, Value(path, default, f"default of {NAME}"))
    reading.by_model.append(lambda model: _unquantised(given[0], model))


def _unquantised(given: Value, model: Model) -> Problem | None:
    if model.fp8_block is not None:
        return None
    text = f"{given.name} ({given.source}): {NAME} raises RuntimeError, since the files of the model are not in FP8"
    return Problem(NAME, text, "leave fp8_config out, or take a model in FP8")
