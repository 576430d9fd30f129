"""Reads NeMo-RL's YAML with the files that it inherits from, and overrides, also in a script.

NeMo-RL takes Megatron-Bridge's provider and sets in it what `policy.megatron_cfg` says. Names and defaults: NeMo-RL at
7ea279abfbeb, of `examples/configs/grpo_math_1B.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeref.check.readers import provider
from moeref.check.readers.reading import OPTIMIZER, SIZES, Reading, under
from moeref.check.readers.tree import Names, batch, only_megatron, ranks, read_all
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value

NAME = "NeMo-RL"
PROGRAM = r"(?:.*/)?run_\w+\.py"
_POLICY, _MEGATRON = "policy.", "policy.megatron_cfg."
_FP8, _DDP = f"{_MEGATRON}fp8_cfg.", f"{_MEGATRON}distributed_data_parallel_config."
#: `batched_data_dict.py` divides the samples of an update over replicas, and a replica's over microbatches.
_BATCH = (f"{_POLICY}train_micro_batch_size", f"{_POLICY}train_global_batch_size")
_DYNAMIC = (f"{_POLICY}dynamic_batching.enabled", f"{_POLICY}sequence_packing.enabled")
_RANKS = ("cluster.num_nodes", "cluster.gpus_per_node")
#: Whether the engine is on the trainer's ranks, else how many (nodes, GPUs of a node) are the engine's alone.
_COLOCATED = f"{_POLICY}generation.colocated.enabled"
_ENGINE = tuple(f"{_POLICY}generation.colocated.resources.{name}" for name in ("num_nodes", "gpus_per_node"))
_BACKENDS = (f"{_MEGATRON}enabled", f"{_POLICY}dtensor_cfg.enabled")
_TEACHERS = ("on_policy_distillation.enabled", "on_policy_distillation.non_colocated_teachers.enabled")
_REWARDS = "env.reward_model.resources.num_nodes"

#: Settings of `megatron_cfg` under TransformerConfig's names -> default; None has none.
FIELDS: dict[str, Any] = {
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "moe_permute_fusion": True,
    "moe_enable_deepep": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_per_layer_logging": False,
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,
    "gradient_accumulation_fusion": False,
    "use_fused_weighted_squared_relu": False,
    "mtp_num_layers": 0,
    "mtp_loss_scaling_factor": 0.0,
    "mtp_use_repeated_layer": False,
    "mtp_detach_heads": False,
    "sequence_parallel": False,
}
#: Settings that NeMo-RL passes on if they are given.
_OPTIONAL = (
    *("moe_router_num_groups", "moe_router_group_topk", "moe_flex_dispatcher_backend", "moe_grouped_gemm"),
    *("layernorm_epsilon", "attention_backend", "transformer_impl", "cuda_graph_impl", "cuda_graph_modules"),
    *("cuda_graph_warmup_steps",),
)
#: Settings of `megatron_cfg` in published files that nothing reads.
LOST = (
    *("moe_aux_loss_coeff", "moe_router_enable_expert_bias", "calculate_per_token_loss", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
#: Names of its own that NeMo-RL takes in `megatron_cfg`, and refuses in `model_overrides`.
_FIRST_CLASS = frozenset(
    {
        *(*FIELDS, *_OPTIONAL, *SIZES, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        *("recompute_granularity", "recompute_modules", "pipeline_dtype", "moe_hybridep_num_sms"),
        *("fine_grained_activation_offloading", "offload_modules", "moe_pad_experts_for_cuda_graph_inference"),
    }
) - {"layernorm_epsilon", "virtual_pipeline_model_parallel_size"}  # these only where megatron_cfg has them
DEFAULTS: dict[str, Any] = {
    f"{_POLICY}precision": "bfloat16",
    f"{_MEGATRON}tensor_model_parallel_size": 1,
    f"{_MEGATRON}pipeline_model_parallel_size": 1,
    f"{_MEGATRON}context_parallel_size": 1,
    f"{_MEGATRON}expert_model_parallel_size": 1,
    f"{_MEGATRON}expert_tensor_parallel_size": 1,
    f"{_MEGATRON}num_layers_in_first_pipeline_stage": None,
    f"{_MEGATRON}num_layers_in_last_pipeline_stage": None,
    f"{_MEGATRON}activation_checkpointing": False,
    f"{_MEGATRON}recompute_granularity": "full",
    f"{_MEGATRON}recompute_modules": None,
    f"{_FP8}enabled": False,
    f"{_FP8}fp8": "e4m3",
    f"{_FP8}fp8_recipe": "blockwise",
    f"{_FP8}fp8_param": False,
    "policy.router_replay.enabled": False,
    f"{_MEGATRON}optimizer.use_precision_aware_optimizer": True,
    f"{_DDP}grad_reduce_in_fp32": False,
    **dict(zip(_DYNAMIC, (False, True), strict=True)),
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
    _COLOCATED: True,
    **dict.fromkeys(_ENGINE),
    **{f"{_MEGATRON}{name}": default for name, default in FIELDS.items()},
}
NAMES = Names(
    layout={
        **under(_MEGATRON, SIZES, "virtual_pipeline_model_parallel_size"),
        f"{_MEGATRON}num_layers_in_first_pipeline_stage": "first",
        f"{_MEGATRON}num_layers_in_last_pipeline_stage": "last",
    },
    options={},
    settings=(f"{_MEGATRON}model_overrides.",),
    fields={f"{_MEGATRON}{name}": name for name in (*FIELDS, *_OPTIONAL)},
    model="policy.model_name",
    unmapped={
        f"{_MEGATRON}peft.enabled": "adapters",
        "policy.draft.enabled": "a draft model",
        "policy.quant_cfg": "weights are rounded in training",
        f"{_MEGATRON}fine_grained_activation_offloading": "activations are offloaded",
    },
    read=frozenset(
        {
            *(*_RANKS, *_BATCH, *_DYNAMIC, _COLOCATED, *_ENGINE, "defaults"),
            *("policy.precision", "policy.router_replay.enabled", f"{_MEGATRON}enabled"),
            *(f"{_MEGATRON}activation_checkpointing", f"{_MEGATRON}recompute_granularity"),
            *(f"{_MEGATRON}recompute_modules", f"{_MEGATRON}pipeline_dtype"),
            *(f"{_FP8}{name}" for name in ("enabled", "fp8", "fp8_recipe", "fp8_param")),
            *(f"{_MEGATRON}{name}" for name in LOST),
        }
    ),
    training={
        **{f"{_MEGATRON}optimizer.{name}": name for name in OPTIMIZER},
        f"{_DDP}grad_reduce_in_fp32": "grad_reduce_in_fp32",
    },
    elsewhere=(
        *("grpo.", "loss_fn.", "checkpointing.", "logger.", "data.", "env.", "cluster.", "teacher.", "distillation."),
        *("dpo.", "sft.", "ppo.", "data_plane", "async_rl.", "value.", "reward_penalties.", "on_policy_distillation"),
        *(f"{_POLICY}{name}" for name in ("tokenizer.", "train_", "generation", "logprob_", "max_", "dtensor_cfg.")),
        *(f"{_POLICY}{name}" for name in ("dynamic_batching.", "sequence_packing.", "make_", "optimizer", "scheduler")),
        *(f"{_POLICY}{name}" for name in ("refit_", "hf_config_overrides", "offload_", "draft.", "router_replay.")),
        *(f"{_MEGATRON}{name}" for name in ("optimizer.", "scheduler.", "distributed_", "env_vars")),
        *(f"{_MEGATRON}{name}" for name in ("checkpoint.", "peft.", "empty_", "force_", "freeze_", "use_gloo")),
        *(f"{_MEGATRON}{name}" for name in ("use_fused_linear_", "fused_linear_", "offload_modules")),
        *(f"{_MEGATRON}{name}" for name in ("defer_fp32_logits", "train_iters", "model_overrides", "converter_type")),
        *(f"{_MEGATRON}{name}" for name in ("hybridep_", "moe_hybridep_num_sms", "inference_", "clear_memory_")),
        *(f"{_POLICY}{name}" for name in ("quant_", "disable_modelopt_")),
        # In published files, and nothing reads them; the loss is counted by tokens whatever they say.
        *(f"{_MEGATRON}{name}" for name in ("track_moe_metrics", "do_not_average_loss", "cp_normalize", "scale_loss_")),
    ),
)


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of YAML files and scripts, in order; dotted names in `given` are overrides."""
    reading, tree = read_all(NAME, paths, given, program=PROGRAM, defaults=DEFAULTS, names=NAMES, inherits="defaults")
    return _finished(reading, tree.values)


def _finished(reading: Reading, at: Mapping[str, Value]) -> Reading:
    """The reading after what NeMo-RL derives."""
    only_megatron(at.get(_BACKENDS[0]), megatron=True)
    _ranks(reading, at)
    batch(reading, at, *_BATCH, by_tokens=any(at[path].value for path in _DYNAMIC))
    precision = at["policy.precision"]
    if precision.value not in ("bfloat16", "float32"):
        raise CheckError(f"{precision.source}: {precision.name}={precision.value}: moeref knows bfloat16 and float32")
    kind = "bf16" if precision.value == "bfloat16" else "fp32"
    reading.options["precision"] = Value(precision.name, kind, precision.source)
    if (replay := at["policy.router_replay.enabled"]).value:
        reading.options["replay"] = Value(replay.name, "R3", replay.source)
    _recompute(reading, at)
    if at[f"{_FP8}enabled"].value:
        reading.settings |= {name: at[f"{_FP8}{name}"] for name in ("fp8", "fp8_recipe", "fp8_param")}
    mtp = reading.settings.get("mtp_num_layers")
    if mtp and not mtp.value:
        reading.settings["mtp_num_layers"] = Value(mtp.name, None, mtp.source)
    _graphs(reading)
    reading.lost = {name: at[path] for name in LOST if (path := f"{_MEGATRON}{name}") in at}
    _refusals(reading, at)
    return provider.build(reading, provider.MEGATRON_BRIDGE, {"calculate_per_token_loss": True}, NAME)


def _ranks(reading: Reading, at: Mapping[str, Value]) -> None:
    """The trainer's ranks: those of the cluster, less those of an engine that has its own.

    `setup` of `grpo.py`, `ppo.py` and `distillation.py` takes GPUs from a single node, and else whole nodes.
    """
    ranks(reading, at, *_RANKS)
    _other_nodes(reading, at)
    apart = at[_COLOCATED]
    if (apart.known and apart.value is not False) or "world" not in reading.layout:
        return
    if unknown := next((at[path] for path in (_COLOCATED, *_ENGINE) if not at[path].known), None):
        del reading.layout["world"]
        reading.computed["world"] = unknown
    elif wrong := _unfit_engine(at):
        text = f"{apart.name}={apart.value} ({apart.source}): {wrong}: {NAME} asserts it"
        reading.problems.append(Problem(NAME, text, "give the engine ranks of its own that leave some to the trainer"))
    else:
        nodes, gpus = (at[path].value for path in _RANKS)
        taken = at[_ENGINE[1 if nodes == 1 else 0]]
        rest = gpus - taken.value if nodes == 1 else (nodes - taken.value) * gpus
        reading.layout["world"] = Value(f"{', '.join(_RANKS)}, less {taken.name}", rest, taken.source)


def _unfit_engine(at: Mapping[str, Value]) -> str:
    """Why an engine cannot have these ranks for itself; "" if it can."""
    (nodes, gpus), (own_nodes, own) = ([at[path] for path in paths] for paths in (_RANKS, _ENGINE))
    least, most = 1, (gpus if nodes.value == 1 else nodes).value - 1
    taken = own if nodes.value == 1 else own_nodes
    if type(taken.value) is not int or not least <= taken.value <= most:
        return f"{taken.name}={taken.value} ({taken.source}) has to be {least} to {most}"
    if nodes.value == 1 and own_nodes.value not in (None, 1):
        return f"{own_nodes.name}={own_nodes.value} ({own_nodes.source}) has to be 1 or null on one node"
    if nodes.value > 1 and own.value != gpus.value:
        return f"{own.name}={own.value} ({own.source}) has to be {gpus.value}, the GPUs of a node"
    return ""


def _other_nodes(reading: Reading, at: Mapping[str, Value]) -> None:
    """Say which further models take nodes away from the trainer, which are not counted here."""
    asked = {path: value.value for path, value in at.items() if path in (*_TEACHERS, _REWARDS)}
    rewards = "reward_model" in _environments(at)
    for path, there in ((_TEACHERS[1], all(asked.get(each) for each in _TEACHERS)), (_REWARDS, rewards)):
        if there and asked.get(path):
            text = f"{path} ({at[path].source}): a model takes ranks of the cluster, which this reader does not count"
            reading.problems.append(Problem(NAME, text, refused=False))


def _environments(at: Mapping[str, Value]) -> list[Any]:
    """The environments that the data names, each of a mapping or of a list of mappings."""
    found = []
    for path, value in at.items():
        head, _, name = path.rpartition(".")
        if head.startswith("data"):
            each = value.value if isinstance(value.value, list) else [{name: value.value}]
            found += [data.get("env_name") for data in each if isinstance(data, Mapping)]
    return found


def _recompute(reading: Reading, at: Mapping[str, Value]) -> None:
    """`activation_checkpointing` turns recomputation on."""
    switch, granularity = at[f"{_MEGATRON}activation_checkpointing"], at[f"{_MEGATRON}recompute_granularity"]
    if not switch.value:
        return
    reading.settings["recompute_granularity"] = granularity
    if granularity.value == "full":
        for name, value in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
            reading.settings[name] = Value(name, value, f"derived: {NAME} with full recomputation")
    elif (modules := at[f"{_MEGATRON}recompute_modules"]).value is not None:
        reading.settings["recompute_modules"] = modules


def _graphs(reading: Reading) -> None:
    """CUDA graphs draw from Transformer Engine's generators; without them, their other settings have no effect."""
    impl = reading.settings.get("cuda_graph_impl")
    if impl and impl.value != "none":
        own = Value("use_te_rng_tracker", True, f"derived: {NAME} with cuda_graph_impl")
        reading.settings.setdefault("use_te_rng_tracker", own)
        return
    for name in ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps"):
        if value := reading.settings.pop(name, None):
            reading.elsewhere.append(value)


def _refusals(reading: Reading, at: Mapping[str, Value]) -> None:
    """What NeMo-RL's `setup.py` and `lm_policy.py` refuse before they build a model."""
    if all(path in at and at[path].value is True for path in _BACKENDS):
        both = " and ".join(f"{path} ({at[path].source})" for path in _BACKENDS)
        reading.problems.append(Problem(NAME, f"{both}: {NAME} takes one", f"set {_BACKENDS[1]}=false"))
    packing = at[_DYNAMIC[1]]
    if packing.value is False:
        text = f"{packing.name} ({packing.source}) is off, and context parallelism needs it: {NAME} asserts it"
        needed = Problem(NAME, text, f"set {packing.name}=true")
        reading.by_layout.append(lambda layout: needed if layout.cp > 1 else None)
    prefix = NAMES.settings[0]
    for path, value in at.items():
        name = path.removeprefix(prefix).partition(".")[0]
        own = f"{_MEGATRON}{name}"
        if path.startswith(prefix) and (name in _FIRST_CLASS or (own in at and at[own].given)):
            text = f"{path} ({value.source}): {NAME} refuses an override of a setting of its own"
            reading.problems.append(Problem(NAME, text, f"set {own} instead"))
