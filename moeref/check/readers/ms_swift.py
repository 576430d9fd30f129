"""Reads ms-swift's Megatron command lines, also in scripts, and its YAML.

`megatron sft` and `megatron rlhf` hand their arguments to mcore-bridge, which makes the config from the model's own.
Names and defaults: ms-swift at 3602360a5623, mcore-bridge at f020e479a20b.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence, Set
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref.check.readers import megatron_lm, provider
from moeref.check.readers.arguments import destination, entry, flags, may_hold_arguments, program_of, read_script
from moeref.check.readers.reading import OPTIMIZER, Reading, under
from moeref.check.readers.shell import GIVEN, Word
from moeref.check.readers.tree import Names, Tree
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value
from moeref.families import Model

NAME = "ms-swift"
PROGRAM = r"(?:.*/)?megatron|(?:.*/)?swift/cli/_megatron/\w+\.py|swift\.cli\._megatron\.\w+"
_COMMANDS, _CONVERTS = ("sft", "rlhf", "pt"), "export"
_RANKS = ("NNODES", "NPROC_PER_NODE")
_MODES = ("disabled", "R2", "R3")
#: Families whose linears have biases, those of experts too.
_BIASED = ("gpt_oss",)
#: Arguments that only `megatron rlhf` reads.
_OF_RLHF = (
    *("beta", "loss_type", "ref_model", "ref_adapters", "desirable_weight", "undesirable_weight"),
    *("reward_funcs", "reward_model", "num_generations", "rpo_alpha", "center_rewards_coefficient", "teacher_model"),
)

#: Arguments under TransformerConfig's names -> default.
FIELDS: dict[str, Any] = {
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": ["core_attn"],
    "masked_softmax_fusion": True,
    "bias_dropout_fusion": True,
    "bias_activation_fusion": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
    "overlap_p2p_comm": True,
    "attention_softmax_in_fp32": True,
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    "fp4_recipe": "nvfp4",
    "moe_token_dispatcher_type": "alltoall",
    "moe_enable_deepep": False,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_shared_expert_overlap": False,
    "moe_layer_recompute": False,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_token_drop_policy": "probs",
    "mtp_num_layers": None,
    "mtp_loss_scaling_factor": 0.1,
    "sequence_parallel": False,
}
#: Passed on if they are given.
_OPTIONAL = (
    *("cp_comm_type", "calculate_per_token_loss", "microbatch_group_size_per_vp_stage", "tp_comm_overlap"),
    *("apply_query_key_layer_scaling",),
)
DEFAULTS: dict[str, Any] = {
    **FIELDS,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "recompute_granularity": "selective",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": None,
    "attention_backend": "flash",
    "fp8_format": None,
    "fp8_param_gather": False,
    "fp4_format": None,
    "fp4_param_gather": False,
    "seed": 42,
    "tuner_type": "full",
    "bridge_backend": "mcore-bridge",
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "data_parallel_random_init": False,
    "main_grads_dtype": "fp32",
    "torch_dtype": None,
    "fp16": None,
    "task_type": None,
    "rlhf_type": None,
    "cp_partition_mode": "zigzag",
    "router_replay_mode": "disabled",
    "NNODES": 1,
    "NPROC_PER_NODE": 1,
}


@functools.cache
def names() -> tuple[str, ...]:
    """Every argument of ms-swift's."""
    return tuple(files("moeref.check.readers").joinpath("ms_swift_arguments.txt").read_text(encoding="utf-8").split())


@functools.cache
def _names() -> Names:
    read = {*DEFAULTS} - {*FIELDS, "seed"}
    layout = under("", megatron_lm.AXES, "world_size")
    return Names(
        layout=layout,
        options={"seed": "seed", "data_parallel_random_init": "seed_per_dp"},
        settings=("megatron_extra_kwargs.",),
        fields={name: name for name in (*FIELDS, *_OPTIONAL)},
        model="model",
        unmapped={
            "use_megatron_fsdp": "Megatron-FSDP",
            "adapters": "adapters",
            "mcore_adapter": "adapters",
            "custom_register_path": "code of its own",
            "rope_scaling": "positions of its own",
            "linear_decoupled_in_proj": "projections of gated delta nets are tensors of their own",
            "mtp_shared_weights": "MTP layers share their weights",
            "megatron_extra_kwargs": "settings of its own",
        },
        read=frozenset((read | {"main_grads_dtype"}) - layout.keys() - {"data_parallel_random_init"}),
        training={name: name for name in OPTIMIZER},
        elsewhere=names(),
    )


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of command lines, scripts and YAML files, in order."""
    reading, tree = Reading(NAME), Tree()
    kinds: set[str] = set()
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            tree.read(path)
            continue
        script = read_script([path], given)
        before, words = entry(script, PROGRAM, reading)
        tree.overrides(word for word in before if word.text.startswith(tuple(f"{name}=" for name in _RANKS)))
        leading = list(itertools.takewhile(lambda word: not word.text.startswith("-"), words))
        for flag, values, word in flags(words[len(leading) :]):
            if flag.startswith("-"):
                tree.overrides([_override(flag, values, word)])
            if not flag.startswith("-") or (values and may_hold_arguments(values[0], first=True)):
                reading.unread.append(Value((values or [word])[0].text, "", word.where, known=False))
        named = bool(leading) and leading[0].text in (*_COMMANDS, _CONVERTS)
        kind, others = (leading[0].text, leading[1:]) if named else (_command(program_of(script, PROGRAM)), leading)
        if kind == _CONVERTS:
            text = f"megatron {kind} converts a checkpoint and trains nothing"
            raise CheckError(f"{path.name}: {text}; give a script whose last command is one of {', '.join(_COMMANDS)}")
        kinds.add(kind)
        reading.unread += [Value(word.text, "", word.where) for word in others]
    own = {*_RANKS, *names()}
    tree.overrides(Word(f"{name}={value}", GIVEN) for name, value in given.items() if name in own)
    tree.given(given)
    _kind(reading, tree, kinds)
    tree.defaults(NAME, DEFAULTS)
    tree.resolve()
    _names().sort(tree, reading)
    return _finished(reading, tree.values)


def _command(program: str) -> str:
    """The command that a program of ms-swift's runs: `rlhf` for `swift/cli/_megatron/rlhf.py`."""
    found = re.search(r"_megatron[./](\w+?)(?:\.py)?$", program)
    return found[1] if found else ""


def _kind(reading: Reading, tree: Tree, kinds: Set[str]) -> None:
    """The type of RLHF where none is given: dpo for `rlhf`. Where no command is there, arguments of RLHF need one."""
    if "rlhf_type" in tree.values:
        return
    if "rlhf" in kinds:
        tree.overrides([Word("rlhf_type=dpo", f"default of {NAME}")])
    elif not kinds & {"sft", "pt"} and (of := next((name for name in _OF_RLHF if name in tree.values), "")):
        text = f"{of} ({tree.values[of].source}) is of megatron rlhf, and no file calls it"
        fix = "give rlhf_type=dpo, which it takes by itself, or the script that calls it"
        reading.problems.append(Problem(NAME, text, fix, refused=False))


def _override(flag: str, values: Sequence[Word], word: Word) -> Word:
    """An argument as `name=value`; a switch without a value is true, and several values are a list."""
    name, texts = destination(flag), [value.text for value in values]
    text = "true" if not texts else texts[0] if len(texts) == 1 else f"[{','.join(map(repr, texts))}]"
    where = values[0].where if values else word.where
    return Word(f"{name}={text}", where, word.known and all(value.known for value in values))


def _finished(reading: Reading, at: Mapping[str, Value]) -> Reading:
    """The reading after what ms-swift derives."""
    nodes, ranks = (at[name] for name in _RANKS)
    if type(nodes.value) is int and type(ranks.value) is int:
        reading.layout["world"] = Value(", ".join(_RANKS), nodes.value * ranks.value, ranks.source)
    else:
        reading.computed["world"] = nodes if type(nodes.value) is not int else ranks
    reading.options["precision"] = _precision(at)
    for name, field in (("fp8_format", "fp8"), ("fp4_format", "fp4")):
        reading.settings[field] = at[name]
    for name, field in (("fp8_param_gather", "fp8_param"), ("fp4_param_gather", "fp4_param")):
        reading.settings[field] = at[name]
    for name in ("recompute_granularity", "moe_router_dtype"):
        none = at[name].value == "none"
        reading.settings[name] = Value(at[name].name, None, at[name].source) if none else at[name]
    reading.training["micro_batch_size"], grads = at["micro_batch_size"], at["main_grads_dtype"]
    if type(at["global_batch_size"].value) is int:
        reading.training["global_batch_size"] = at["global_batch_size"]
    reading.training["grad_reduce_in_fp32"] = Value(grads.name, grads.value == "fp32", grads.source)
    balancing, backend = at["moe_router_load_balancing_type"], at["attention_backend"]
    if balancing.value is not None:
        reading.settings["moe_router_load_balancing_type"] = balancing
    kind = str(backend.value).partition("_")[0]
    reading.settings["attention_backend"] = Value(backend.name, kind, backend.source)
    _derive_communication(reading, at)
    _task(reading, at)
    _replay(reading, at["router_replay_mode"])
    _refusals(reading, at)
    bridge = provider.MCORE_BRIDGE
    if at["bridge_backend"].value != "mcore-bridge":
        bridge = provider.MEGATRON_BRIDGE
    fused = reading.settings.pop("bias_dropout_fusion", None)
    reading = provider.build(reading, bridge, {}, NAME)
    if fused:
        _unfused(reading, fused)
    return reading


def _unfused(reading: Reading, fused: Value) -> None:
    """Grouped experts whose linears have biases are not fused with dropout, whatever is asked for."""
    grouped = reading.settings.get("moe_grouped_gemm")
    for family, settings in (reading.by_family or {}).items():
        if family in _BIASED and grouped and grouped.value:
            settings["bias_dropout_fusion"] = Value("bias_dropout_fusion", False, f"derived: {NAME} for {family}")
        else:
            settings["bias_dropout_fusion"] = fused
    if fused.given:
        reading.lost["bias_dropout_fusion"] = fused


def _replay(reading: Reading, mode: Value) -> None:
    """Put the kind of replay in."""
    if not mode.known:
        reading.computed["replay"] = mode
    elif mode.value not in _MODES:
        text = f"{mode.name} {mode.value} ({mode.source}) is none of {', '.join(_MODES)}"
        reading.problems.append(Problem(NAME, text, "give one of these"))
    elif mode.value != "disabled":
        reading.options["replay"] = mode


def _precision(at: Mapping[str, Value]) -> Value:
    """bf16. Raises CheckError for what ms-swift computes in fp16: also a `torch_dtype` of float32."""
    half, dtype = at["fp16"], at["torch_dtype"]
    other = dtype.value is not None and str(dtype.value).removeprefix("torch.") not in ("bfloat16", "bf16")
    if half.value or other:
        wrong = half if half.value else dtype
        fix = f"drop {half.name}" if half.value else "give --torch_dtype bfloat16"
        told = f"moeref knows bfloat16 only, and {NAME} computes in float16 then; {fix}"
        raise CheckError(f"{wrong.source}: {wrong.name}={wrong.value}: {told}")
    return Value("bf16", "bf16", dtype.source)


def _task(reading: Reading, at: Mapping[str, Value]) -> None:
    """What follows from what is trained: a head of its own is not mapped, and `sft` counts the loss by tokens."""
    task, kind = at["task_type"], at["rlhf_type"]
    causal = task.value in (None, "causal_lm") and kind.value != "rm"
    if not causal:
        named = kind if kind.value == "rm" else task
        text = f"{named.name} {named.value} ({named.source}): a head of its own"
        reading.problems.append(Problem(NAME, text, refused=False))
    given = reading.settings.get("calculate_per_token_loss")
    if causal and kind.value is None and (given is None or given.value is None):
        derived = Value("calculate_per_token_loss", True, "derived: without a type of RLHF")
        reading.settings["calculate_per_token_loss"] = derived


def _derive_communication(reading: Reading, at: Mapping[str, Value]) -> None:
    """Sequence parallelism needs TP; overlapped point-to-point calls need virtual stages, and are not batched."""
    if at["tensor_model_parallel_size"].value == 1:
        reading.settings["sequence_parallel"] = Value("sequence_parallel", False, "derived: at TP 1")
    if not reading.layout.get("vpp"):
        reading.settings["overlap_p2p_comm"] = Value("overlap_p2p_comm", False, "derived: without virtual stages")
    overlap = reading.settings["overlap_p2p_comm"].value
    reading.settings["batch_p2p_comm"] = Value("batch_p2p_comm", not overlap, "derived: unless they overlap")


def _refusals(reading: Reading, at: Mapping[str, Value]) -> None:
    """What ms-swift refuses itself, and adapters."""
    if (tuner := at["tuner_type"]).value != "full":
        text = f"{tuner.name} {tuner.value} ({tuner.source}): adapters"
        reading.problems.append(Problem(NAME, text, refused=False))
    if at["recompute_granularity"].value == "selective" and (method := at["recompute_method"]).value is not None:
        text = f"{method.name} {method.value} ({method.source}) is for full recomputation, and {NAME} raises ValueError"
        reading.problems.append(Problem(NAME, text, "leave it out, or give --recompute_granularity full"))
    if (backend := at["attention_backend"]).value == "flash":
        reading.by_model.append(functools.partial(_without_sinks, backend))
    if (cut := at["cp_partition_mode"]).value != "zigzag":
        text = f"{cut.name} {cut.value} ({cut.source}): sequences are cut otherwise than Megatron cuts them"
        apart = Problem(NAME, text, refused=False)
        reading.by_layout.append(lambda layout: apart if layout.cp > 1 else None)
    end = reading.layout.get("first") or reading.layout.get("last")
    if end and at["pipeline_model_parallel_size"].value == 1:
        reading.problems.append(Problem(NAME, f"{end.name} ({end.source}) at one pipeline stage", "leave it out"))


def _without_sinks(backend: Value, model: Model) -> Problem | None:
    if not model.sinks:
        return None
    text = f"{backend.name} flash ({backend.source}): {model.family} has attention sinks, and {NAME} raises ValueError"
    return Problem(NAME, text, "give --attention_backend fused or unfused")
