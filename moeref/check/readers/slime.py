"""Reads slime's scripts: Megatron-LM's arguments and slime's own, given to `train.py`, often in arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from moeref.check.readers import megatron_lm
from moeref.check.readers.arguments import entry, megatron_arguments, read_script
from moeref.check.readers.reading import Reading
from moeref.check.report import Problem
from moeref.check.value import Value

NAME = "slime"
PROGRAM = r"(?:.*/)?train(?:_async)?\.py"
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
}
#: What builds a model, or cuts sequences, as moeref does not map it.
UNMAPPED = {
    "custom_model_provider_path": "the model is made by a function of its own",
    "allgather_cp": "sequences are cut otherwise than Megatron cuts them",
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
    replay = _own(reading, arguments)
    reading = megatron_lm.finished(reading, _defaults(arguments), core)
    reading.settings["variable_seq_lengths"] = Value("variable_seq_lengths", True, f"derived: {NAME} always sets it")
    reading.as_files = frozenset({"rotary_base", "layernorm_epsilon"})
    reading.training.pop("global_batch_size", None)  # of samples, which slime deals out itself
    if "use_dynamic_batch_size" in {value.name.lstrip("-").replace("-", "_") for value in reading.elsewhere}:
        reading.training.pop("micro_batch_size", None)  # microbatches are packs of tokens
    if factor := reading.beside.pop("rotary_seq_len_interpolation_factor", None):
        reading.elsewhere.append(factor)  # slime does not pass it on
    dispatcher = reading.settings.get("moe_token_dispatcher_type")
    if dispatcher and dispatcher.value == "allgather":
        reading.settings["moe_token_dispatcher_type"] = Value(
            "--moe-token-dispatcher-type", "alltoall", f"derived: {NAME} replaces allgather"
        )
    if replay:
        reading.options["replay"] = replay
        reading.settings.pop("moe_enable_routing_replay", None)
    return _refusals(reading)


def _own(reading: Reading, arguments: megatron_lm.Arguments) -> Value | None:
    """Take slime's arguments out; the number of ranks, the model and what is not mapped go into `reading`."""
    found = {name: arguments.pop(name) for flag in OWN if (name := flag.lstrip("-").replace("-", "_")) in arguments}
    reading.model = found.get("hf_checkpoint")
    nodes, each = (found.get(f"actor_num_{what}") for what in ("nodes", "gpus_per_node"))
    if nodes and each and nodes.known and each.known:
        arguments["world_size"] = Value(f"{nodes.name}, {each.name}", nodes.value * each.value, each.source)
    elif unknown := next((value for value in (nodes, each) if value and not value.known), None):
        reading.computed["world"] = unknown
    for name, why in UNMAPPED.items():
        if name in found:
            text = f"{found[name].name} ({found[name].source}): {why}"
            reading.problems.append(Problem(NAME, text, refused=False))
    if (mode := found.get("megatron_to_hf_mode")) and mode.value == "bridge":
        reading.elsewhere.append(mode)
    if engine := found.get("use_rollout_routing_replay"):
        return Value(engine.name, "R3", engine.source)
    own = found.get("use_routing_replay")
    return Value(own.name, "R2", own.source) if own else None


def _defaults(arguments: megatron_lm.Arguments) -> megatron_lm.Arguments:
    """The arguments with slime's defaults where they differ from Megatron-LM's."""
    source = f"default of {NAME}"
    sharded = Value("use_distributed_optimizer", True, f"derived: {NAME} always sets it")
    found = {"bf16": Value("--bf16", "fp16" not in arguments, source), **arguments}
    found["use_distributed_optimizer"] = sharded
    if found.get("multi_latent_attention") and "rope_type" not in found:
        found["rope_type"] = Value("--rope-type", "yarn", f"derived: {NAME} takes YaRN for MLA")
    return found


def _refusals(reading: Reading) -> Reading:
    """What slime refuses itself before it builds a model."""
    ends = [reading.layout[end] for end in ("first", "last") if end in reading.layout]
    if ends and reading.layout["pp"].value == 1:
        text = f"{ends[0].name} ({ends[0].source}) at one pipeline stage"
        reading.problems.append(Problem(NAME, text, "leave it out"))
    return reading
