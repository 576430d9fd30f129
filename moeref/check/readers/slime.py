"""Reads slime's scripts: Megatron-LM's arguments and slime's own, given to `train.py`, often in arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from moeref.check.readers import megatron_lm
from moeref.check.readers.arguments import destination, entry, megatron_arguments, read_script
from moeref.check.readers.reading import Reading
from moeref.check.report import Problem
from moeref.check.value import Value

NAME = "slime"
PROGRAM = r"(?:.*/)?train(?:_async)?\.py"
#: What the number of ranks is the product of -> default.
RANKS = {"--actor-num-nodes": 1, "--actor-num-gpus-per-node": 8}
#: What is compared with the model's files.
AS_FILES = ("rotary_base", "layernorm_epsilon")
#: slime's arguments of which a check makes use; all its others concern the rollout, rewards and the like.
OWN = {
    "--hf-checkpoint": "str",
    "--actor-num-nodes": "int",
    "--actor-num-gpus-per-node": "int",
    "--use-routing-replay": "true",
    "--use-rollout-routing-replay": "true",
    "--custom-model-provider-path": "str",
    "--megatron-to-hf-mode": "str",
    "--allgather-cp": "true",
    "--custom-config-path": "str",
}
#: What builds a model, or cuts sequences, as moeref does not map it.
UNMAPPED = {
    "custom_model_provider_path": "the model is made by a function of its own",
    "allgather_cp": "sequences are cut otherwise than Megatron cuts them",
    "custom_config_path": "a file that may replace any argument",
}


@functools.cache
def names() -> dict[str, str]:
    """slime's own arguments -> kind; `elsewhere` if a check has no use for them."""
    text = files("moeref.check.readers").joinpath("slime_arguments.txt").read_text(encoding="utf-8")
    others = {flag: "elsewhere" for flag in text.split() if flag not in megatron_arguments()}
    return {**others, **OWN}


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of a script that calls `train.py`, or of a list of its arguments."""
    reading = Reading(NAME)
    _, words = entry(read_script(paths, given), PROGRAM, reading)
    engine = {word.text: "elsewhere" for word in words if word.text.startswith("--sglang-")}
    arguments = megatron_lm.parsed(words, reading, {**names(), **engine})
    own = take(reading, arguments, OWN, UNMAPPED)
    if (mode := own.get("megatron_to_hf_mode")) and mode.value == "bridge":
        reading.elsewhere.append(mode)
    reading = megatron_lm.finished(reading, _defaults(arguments), core)
    reading.as_files = as_files(reading)
    return dealt(reading, replay(own))


def take(
    reading: Reading, arguments: megatron_lm.Arguments, flags: Iterable[str], unmapped: Mapping[str, str]
) -> megatron_lm.Arguments:
    """Take these flags out; the number of ranks, the model and what is not mapped go into `reading`."""
    own = {name: arguments.pop(name) for flag in flags if (name := destination(flag)) in arguments}
    reading.model = own.get("hf_checkpoint")
    nodes, each = (
        own.get(destination(flag), Value(flag, value, f"default of {reading.framework}"))
        for flag, value in RANKS.items()
    )
    if nodes.known and each.known:
        source = each.source if each.given else nodes.source
        arguments["world_size"] = Value(f"{nodes.name}, {each.name}", nodes.value * each.value, source)
    else:
        reading.computed["world"] = each if nodes.known else nodes
    for name, why in unmapped.items():
        if name in own and own[name].value:
            text = f"{own[name].name} ({own[name].source}): {why}"
            reading.problems.append(Problem(reading.framework, text, refused=False))
    return own


def replay(own: megatron_lm.Arguments) -> Value | None:
    """The kind of replay that is asked for."""
    if engine := own.get("use_rollout_routing_replay"):
        return Value(engine.name, "R3", engine.source)
    trainer = own.get("use_routing_replay")
    return Value(trainer.name, "R2", trainer.source) if trainer else None


def dealt(reading: Reading, kind: Value | None) -> Reading:
    """The reading with what slime and its fork miles set after Megatron-LM's own checks, and refuse."""
    name = reading.framework
    reading.settings["variable_seq_lengths"] = Value("variable_seq_lengths", True, f"derived: {name} always sets it")
    reading.training.pop("global_batch_size", None)  # of samples, which the framework deals out itself
    if "use_dynamic_batch_size" in {destination(value.name) for value in reading.elsewhere}:
        reading.training.pop("micro_batch_size", None)  # microbatches are packs of tokens
    if factor := reading.beside.pop("rotary_seq_len_interpolation_factor", None):
        reading.elsewhere.append(factor)  # it is not passed on
    dispatcher = reading.settings.get("moe_token_dispatcher_type")
    if dispatcher and dispatcher.value == "allgather":
        reading.settings["moe_token_dispatcher_type"] = Value(
            "--moe-token-dispatcher-type", "alltoall", f"derived: {name} replaces allgather"
        )
    if kind:
        reading.options["replay"] = kind
        reading.settings.pop("moe_enable_routing_replay", None)
    return _refusals(reading)


def of_parser(arguments: megatron_lm.Arguments, framework: str) -> megatron_lm.Arguments:
    """The arguments with what slime and miles set before Megatron-LM checks them."""
    source = f"default of {framework}"
    found = {"bf16": Value("--bf16", "fp16" not in arguments, source), **arguments}
    length = found.get("seq_length", Value("--seq-length", 4096, source))
    found["max_position_embeddings"] = Value("--seq-length", length.value, f"derived: {framework} takes the length")
    if found.get("multi_latent_attention") and "rope_type" not in found:
        found["rope_type"] = Value("--rope-type", "yarn", f"derived: {framework} takes YaRN for MLA")
    if found.get("mtp_num_layers"):
        found.setdefault("mtp_loss_scaling_factor", Value("--mtp-loss-scaling-factor", 0.2, source))
    return found


def _defaults(arguments: megatron_lm.Arguments) -> megatron_lm.Arguments:
    """The arguments with slime's defaults where they differ from Megatron-LM's."""
    sharded = Value("use_distributed_optimizer", True, f"derived: {NAME} always sets it")
    return {**of_parser(arguments, NAME), "use_distributed_optimizer": sharded}


def as_files(reading: Reading) -> dict[str, Value]:
    """What is compared with the model's files."""
    every = {**reading.settings, **reading.beside}
    return {name: every[name] for name in AS_FILES if name in every}


def _refusals(reading: Reading) -> Reading:
    """What is refused before a model is built."""
    ends = [reading.layout[end] for end in ("first", "last") if end in reading.layout]
    if ends and reading.layout["pp"].value == 1:
        text = f"{ends[0].name} ({ends[0].source}) at one pipeline stage"
        reading.problems.append(Problem(reading.framework, text, "leave it out"))
    return reading
