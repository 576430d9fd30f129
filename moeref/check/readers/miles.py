"""Reads miles' scripts: Megatron-LM's arguments and miles' own, given to `train.py` or `train_async.py`.

miles is a fork of slime. With `--megatron-to-hf-mode bridge` Megatron-Bridge makes the config from the model's own, and
miles copies some arguments into it; the others do not reach the model. Names and defaults: miles at 31f1ca961a94.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref.check.readers import megatron_lm, provider, slime
from moeref.check.readers.arguments import destination, entry, megatron_arguments, read_script
from moeref.check.readers.reading import Reading
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value

NAME = "miles"
#: miles' arguments of which a check makes use; all its others concern the rollout, rewards and the like.
OWN = {
    **slime.OWN,
    "--train-backend": "str",
    "--qkv-format": "str",
    "--indep-dp": "true",
    "--ft-components": "str list",
    "--use-fault-tolerance": "true",
    "--lora-rank": "int",
    "--multi-lora-n-adapters": "int",
    "--debug-disable-optimizer": "true",
    "--debug-rollout-only": "true",
    "--enable-mtp-training": "true",
    "--use-indexer-replay": "true",
    "--use-rollout-indexer-replay": "true",
    "--skip-actor-forward-only": "true",
    "--use-dynamic-batch-size": "true",
    "--balance-by-flops": "true",
    "--max-tokens-per-gpu": "int",
    "--advantage-estimator": "str",
    "--stream-optimizer-state-to-disk": "true",
    "--rematerialize-param-from-master-weight": "true",
    "--colocate": "true",
}
#: Fields of TransformerConfig that miles' own Megatron takes as arguments too -> kind.
OF_YARN = {"--original-max-position-embeddings": "int", "--beta-fast": "float", "--beta-slow": "float"}
#: What builds a model or an optimizer, or cuts sequences, as moeref does not map it.
UNMAPPED = {
    **slime.UNMAPPED,
    "lora_rank": "adapters",
    "multi_lora_n_adapters": "adapters",
    "indep_dp": "each replica is a Megatron of its own",
    "debug_disable_optimizer": "nothing is optimized",
    "debug_rollout_only": "nothing is trained",
    "use_indexer_replay": "rows of a sparse attention's indexer are replayed",
    "use_rollout_indexer_replay": "rows of a sparse attention's indexer are replayed",
}
#: Arguments that take effect elsewhere too, or of which there is nothing to say.
_KEPT = ("use_dynamic_batch_size", "max_tokens_per_gpu", "advantage_estimator", "colocate")
_STREAM, _REBUILD = "stream_optimizer_state_to_disk", "rematerialize_param_from_master_weight"
#: Prefixes of the arguments of SGLang's server and router.
_ENGINE = ("--sglang-", "--eval-sglang-", "--router-")
#: Arguments that miles copies into Megatron-Bridge's provider (`_apply_bridge_runtime_config`).
COPIED = frozenset(
    {
        *("sequence_parallel", "calculate_per_token_loss", "variable_seq_lengths", "attention_softmax_in_fp32"),
        *("fp32_residual_connection", "deterministic_mode", "recompute_granularity", "recompute_method"),
        *("recompute_num_layers", "recompute_modules", "cpu_offloading_num_layers", "distribute_saved_activations"),
        *("cpu_offloading", "tp_comm_overlap", "fp8", "fp8_recipe", "attention_backend", "moe_token_dispatcher_type"),
        *("moe_router_bias_update_rate", "moe_aux_loss_coeff"),
    }
)
#: Axes that it does not copy.
_UNCOPIED = ("vpp", "embedding", "loss", "pipeline_layout")

Of = Callable[[str], Any]


@functools.cache
def names() -> dict[str, str]:
    """miles' own arguments -> kind; `elsewhere` if a check has no use for them."""
    text = files("moeref.check.readers").joinpath("miles_arguments.txt").read_text(encoding="utf-8")
    others = {flag: "elsewhere" for flag in text.split() if flag not in megatron_arguments()}
    return {**others, **OWN, **OF_YARN}


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of a script that calls `train.py`, or of a list of its arguments."""
    reading = Reading(NAME)
    _, words = entry(read_script(paths, given), slime.PROGRAM, reading)
    engine = {word.text.partition("=")[0]: "elsewhere" for word in words if word.text.startswith(_ENGINE)}
    arguments = megatron_lm.parsed(words, reading, {**engine, **names()})
    own = slime.take(reading, arguments, {**OWN, **OF_YARN}, UNMAPPED)
    if (backend := own.get("train_backend")) and backend.value != "megatron":
        raise CheckError(f"{backend.source}: {backend.name} {backend.value}: moeref knows Megatron only")
    reading.elsewhere += [own[name] for name in (*_KEPT, _STREAM, _REBUILD) if name in own]
    arguments = _defaults(arguments, own)
    reading.problems += [*_unmapped(own), *_refused(own, arguments)]
    width = arguments.get("ffn_hidden_size", Value("--ffn-hidden-size", None, f"default of {NAME}"))
    reading = megatron_lm.finished(reading, arguments, core)
    reading.as_files = _as_files(reading, width)
    for name in map(destination, OF_YARN):
        if name in own:
            (reading.settings if own[name].known else reading.computed)[name] = own[name]
    reading = slime.dealt(reading, slime.replay(own))
    mode = own.get("megatron_to_hf_mode")
    return _bridged(reading, mode) if mode and mode.value == "bridge" else reading


def _as_files(reading: Reading, width: Value) -> dict[str, Value]:
    """What miles compares with the model's files: also the width of dense layers, before one is derived."""
    found = slime.as_files(reading)
    if width.known and (width.given or all(value.known for value in reading.unread)):
        found["ffn_hidden_size"] = width
    return found


def _defaults(arguments: megatron_lm.Arguments, own: megatron_lm.Arguments) -> megatron_lm.Arguments:
    """The arguments with miles' defaults where they differ from Megatron-LM's: Adam alone is distributed."""
    found = slime.of_parser(arguments, NAME)
    optimizer = str(found["optimizer"].value).lower() if "optimizer" in found else "adam"
    adapters = own.get("multi_lora_n_adapters")
    sharded = optimizer == "adam" and "debug_disable_optimizer" not in own and not (adapters and adapters.value)
    source = f"derived: {NAME} distributes Adam, and no other optimizer"
    return {**found, "use_distributed_optimizer": Value("use_distributed_optimizer", sharded, source)}


def _unmapped(own: megatron_lm.Arguments) -> Iterator[Problem]:
    """What is not mapped for its value."""
    layout, parts = own.get("qkv_format"), own.get("ft_components")
    if layout and layout.value != "thd":
        text = f"{layout.name} {layout.value} ({layout.source}): sequences are padded and not packed"
        yield Problem(NAME, text, refused=False)
    if "use_fault_tolerance" in own and parts and "train" in parts.value:
        text = f"{parts.name} train ({parts.source}): {UNMAPPED['indep_dp']}"
        yield Problem(NAME, text, refused=False)


def _value(own: megatron_lm.Arguments, arguments: megatron_lm.Arguments) -> Of:
    """The value of an argument that is given, or Megatron-LM's default."""
    every = {**megatron_lm.defaults(), **arguments, **own}
    return lambda name: every[name].value if name in every and every[name].known else None


#: (argument, what miles refuses beside it, when), as `miles_validate_args` asserts it.
_REFUSED: tuple[tuple[str, str, Callable[[Of], bool]], ...] = (
    ("use_dynamic_batch_size", "without --max-tokens-per-gpu", lambda of: of("max_tokens_per_gpu") is None),
    ("balance_by_flops", "without --use-dynamic-batch-size", lambda of: not of("use_dynamic_batch_size")),
    ("enable_mtp_training", "without --mtp-num-layers", lambda of: not of("mtp_num_layers")),
    (
        "use_dynamic_batch_size",
        "with --qkv-format bshd",
        lambda of: of("qkv_format") == "bshd" and of("max_tokens_per_gpu") is not None,
    ),
    (
        "use_rollout_indexer_replay",
        "with --context-parallel-size above 1",
        lambda of: of("context_parallel_size") != 1,
    ),
    (
        "megatron_to_hf_mode",
        "bridge with --advantage-estimator ppo",
        lambda of: of("megatron_to_hf_mode") == "bridge" and of("advantage_estimator") == "ppo",
    ),
    (_STREAM, "with an --optimizer that is not adam", lambda of: of("optimizer") != "adam"),
    (_STREAM, "with --optimizer-cpu-offload", lambda of: bool(of("optimizer_cpu_offload"))),
    (_STREAM, "with --use-precision-aware-optimizer", lambda of: bool(of("use_precision_aware_optimizer"))),
    (_STREAM, "with --indep-dp", lambda of: bool(of("indep_dp"))),
    (_REBUILD, "without --colocate", lambda of: not of("colocate")),
    (_REBUILD, "with --overlap-param-gather", lambda of: bool(of("overlap_param_gather"))),
    (
        _REBUILD,
        "with --use-precision-aware-optimizer on the GPU",
        lambda of: bool(of("use_precision_aware_optimizer") and not of("optimizer_cpu_offload")),
    ),
    (
        "skip_actor_forward_only",
        "with a --hidden-dropout of its default or above 0",
        lambda of: of("hidden_dropout") != 0,
    ),
    (
        "skip_actor_forward_only",
        "with a --attention-dropout of its default or above 0",
        lambda of: of("attention_dropout") != 0,
    ),
    (
        "skip_actor_forward_only",
        "with routing that is random or forced",
        lambda of: bool(
            of("moe_input_jitter_eps")
            or of("moe_router_force_load_balancing")
            or of("moe_router_force_biased") is not None
            or "sinkhorn" in (of("moe_router_load_balancing_type") or ())
        ),
    ),
    (
        "skip_actor_forward_only",
        "with --use-routing-replay, whose routes that forward records",
        lambda of: bool(of("use_routing_replay") and not of("use_rollout_routing_replay")),
    ),
)


def _refused(own: megatron_lm.Arguments, arguments: megatron_lm.Arguments) -> Iterator[Problem]:
    """What miles asserts of arguments together."""
    of = _value(own, arguments)
    for name, beside, when in _REFUSED:
        if name in own and own[name].value and when(of):
            text = f"{own[name].name} ({own[name].source}) {beside}: {NAME} asserts that they do not go together"
            yield Problem(NAME, text, "drop or change one of them")


def _bridged(reading: Reading, mode: Value) -> Reading:
    """The reading of a model that Megatron-Bridge makes: what miles copies, on what its provider sets."""
    for axis in _UNCOPIED:
        if (value := reading.layout.get(axis)) and value.given:
            text = f"{value.name} ({value.source}) is not passed on with {mode.name} bridge ({mode.source})"
            reading.problems.append(Problem(NAME, text, f"drop {value.name}", refused=False))
    reading.lost = {name: value for name, value in reading.settings.items() if name not in COPIED and value.given}
    reading.settings = {name: value for name, value in reading.settings.items() if name in COPIED}
    reading.computed = {name: value for name, value in reading.computed.items() if name not in reading.lost}
    reading.beside = {}
    for option in ("kernels", "divisible_by", "experts"):
        reading.options.pop(option, None)
    reading.elsewhere.append(mode)
    return provider.build(reading, provider.MEGATRON_BRIDGE, {}, NAME)
