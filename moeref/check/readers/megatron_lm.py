"""Reads Megatron-LM's argument lists: what `core_transformer_config_from_args` makes of them after `validate_args`.

Arguments that are not given have the parser's defaults. Fields of TransformerConfig without an argument have the
class's default, also where the model's own config says otherwise: Megatron-LM does not read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moeref.check.readers.arguments import (
    SWITCHES,
    converted,
    destination,
    entry,
    flags,
    may_hold_arguments,
    megatron_arguments,
    read_script,
)
from moeref.check.readers.reading import OPTIMIZER, SIZES, STAGES, Reading, under
from moeref.check.readers.shell import Word
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value
from moeref.config.core import known_fields
from moeref.layout import Layout

NAME = "Megatron-LM"
PROGRAM = r"(?:.*/)?[A-Za-z_]\w*\.py"

Arguments = dict[str, Value]

#: Argument -> axis of the layout. Two have other names than megatron-core's fields.
AXES = {
    **under("", SIZES | STAGES, "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    "decoder_first_pipeline_num_layers": "first",
    "decoder_last_pipeline_num_layers": "last",
    "world_size": "world",
}
#: Argument -> argument of `check`.
OPTIONS = {"seed": "seed", "make_vocab_size_divisible_by": "divisible_by"}
#: Argument -> field of TransformerConfig, where the names differ.
FIELDS = {"num_experts": "num_moe_experts", "fp8_param_gather": "fp8_param", "fp4_param_gather": "fp4_param"}
#: Arguments of GPTModel that TransformerConfig lacks, to be compared with the model's own config. MLA has fields.
BESIDE = (
    *("rotary_base", "rotary_percent", "vocab_size", "untie_embeddings_and_output_weights"),
    *("position_embedding_type", "use_rope_scaling", "rotary_seq_len_interpolation_factor"),
)
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
#: What builds a model that moeref does not map.
UNMAPPED = {
    "spec": "layers come from a spec of its own",
    "hybrid_layer_pattern": "a hybrid model",
    "heterogeneous_layers_config_path": "layers that differ from one another",
    "use_megatron_fsdp": "Megatron-FSDP",
    "use_torch_fsdp2": "FSDP2",
    "te_precision_config_file": "a recipe of its own for quantised layers",
}
#: Fields that the layout decides, that are no plain values, or that concern nothing but the process.
_NOT_SETTINGS = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "inference_sampling_seed"),
        *("params_dtype", "pipeline_dtype", "autocast_dtype", "activation_func", "init_method"),
        *(
            "output_layer_init_method",
            "embedding_init_method",
            "config_logger_dir",
            "tensor_parallel_num_weight_shards",
        ),
        *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards"),
    }
)


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of an argument list or of a script that calls a program with one."""
    reading = Reading(NAME)
    before, words = entry(read_script(paths, given), PROGRAM, reading)
    arguments = parsed(words, reading)
    arguments |= launcher(before)
    return finished(reading, arguments, core)


def parsed(words: Iterable[Word], reading: Reading, own: Mapping[str, str] | None = None) -> Arguments:
    """The arguments given, by destination; the last of several counts. Others are listed in `reading`.

    own: names of further arguments of the framework -> their kind.
    """
    table = megatron_arguments()
    arguments: Arguments = {}
    for flag, values, word in flags(words):
        if flag not in table and (own is None or flag not in own):
            text = " ".join(value.text for value in values)
            reading.unread.append(Value(flag, text, word.where, word.known))
            continue
        known = table.get(flag)
        name = known[0] if known else destination(flag)
        kind = (own or {}).get(flag) or (known[1] if known else "str list")
        if kind == "elsewhere":
            if values and may_hold_arguments(values[0], first=True):
                reading.unread.append(Value(values[0].text, "", values[0].where, known=False))
            reading.elsewhere.append(Value(flag, " ".join(value.text for value in values), word.where))
            continue
        taken = len(values) if kind.endswith("list") else int(kind not in SWITCHES)
        sure = word.known or (flag != word.text and all(value.known for value in values))
        text = " ".join(value.text for value in values[:taken])
        unsure = Value(flag, text, word.where, known=False)
        arguments[name] = converted(flag, kind, values[:taken], word.where) if sure else unsure
        reading.unread += [Value(more.text, "", more.where, more.known) for more in values[taken:]]
    return arguments


def launcher(words: Sequence[Word]) -> Arguments:
    """The number of ranks that torchrun starts."""
    found: Arguments = {}
    for flag, values, word in flags(words):
        name = destination(flag)
        if name in ("nnodes", "nproc_per_node") and values:
            found[name] = converted(flag, "int", values, word.where)
    if len(found) < 2 or not all(value.known for value in found.values()):
        return {}
    nodes, ranks = found["nnodes"], found["nproc_per_node"]
    return {"world_size": Value("--nnodes, --nproc_per_node", nodes.value * ranks.value, ranks.source)}


_VARIANT = "experimental_attention_variant"


def finished(reading: Reading, arguments: Arguments, core: str) -> Reading:
    """The reading of these arguments, after Megatron-LM's defaults and what it derives."""
    computed = {name: value for name, value in arguments.items() if not value.known}
    arguments = {name: value for name, value in arguments.items() if value.known}
    every = {**defaults(), **arguments}
    derive(every)
    mla = bool(every["multi_latent_attention"].value)
    fields = known_fields(core, mla=mla)
    for name, axis in AXES.items():
        if name in every and every[name].value not in (None, False):
            value = every[name]
            reading.layout[axis] = value if value.value is not True else Value(value.name, 1, value.source)
    for name, option in OPTIONS.items():
        reading.options[option] = every[name]
    reading.options |= _options(every)
    reading.beside |= {name: every[name] for name in BESIDE if every[name].value is not None and name not in fields}
    _settings(reading, every, fields)
    reading.training |= _training(every)
    _missing(reading, every, computed)
    used = {*AXES, *OPTIONS, *FIELDS, *BESIDE, *fields, *_READ, *_BATCH, *OPTIMIZER}
    for name, value in computed.items():
        if name in used:
            field = FIELDS.get(name, name)
            reading.computed[AXES.get(name, field)] = value
            reading.settings.pop(field, None)
            reading.beside.pop(name, None)
    reading.elsewhere += [
        value for name, value in {**arguments, **computed}.items() if name not in used and value.given
    ]
    _unmapped(reading, arguments)
    _refusals(reading, every)
    return reading


_BATCH = ("micro_batch_size", "global_batch_size")


def _training(every: Arguments) -> Arguments:
    """What decides memory: the optimizer's arguments, the batch, and the dtype of gradients, fp32 unless asked."""
    found = {name: every[name] for name in (*OPTIMIZER, *_BATCH) if name in every and every[name].value is not None}
    grads, reduced = every["main_grads_dtype"], every["grad_reduce_in_bf16"]
    source = reduced.source if reduced.value else grads.source
    in_fp32 = grads.value == "fp32" and not reduced.value
    return {**found, "grad_reduce_in_fp32": Value("grad_reduce_in_fp32", in_fp32, source)}


def _unmapped(reading: Reading, arguments: Arguments) -> None:
    """Say what is not mapped. A spec of its own also says which attention the layers have, where no argument does."""
    for name, why in UNMAPPED.items():
        if name in arguments and arguments[name].value:
            text = f"{arguments[name].name} ({arguments[name].source}): {why}"
            reading.problems.append(Problem(NAME, text, refused=False))
            if name == "spec" and _VARIANT not in arguments:
                reading.settings.pop(_VARIANT, None)
                reading.own_attention = True


def _refusals(reading: Reading, every: Arguments) -> None:
    """What `validate_args` asserts, and what depends on the layout of the run."""
    gather, length, most = (every[name] for name in ("overlap_param_gather", "seq_length", "max_position_embeddings"))
    if gather.value and not _gathers(every):
        text = f"{gather.name} ({gather.source}) needs --overlap-grad-reduce and an optimizer that is distributed"
        reading.problems.append(Problem(NAME, text, "give --overlap-grad-reduce --use-distributed-optimizer too"))
    if length.value is not None and most.value is not None and most.value < length.value:
        text = f"{most.name} {most.value} ({most.source}) is less than {length.name} {length.value} ({length.source})"
        reading.problems.append(Problem(NAME, text, f"give {most.name} {length.value} or more"))
    if (parts := every["num_distributed_optimizer_instances"]).value > 1:
        reading.by_layout.append(functools.partial(_instances, parts))
    if (order := every["use_tp_pp_dp_mapping"]).value:
        reading.by_layout.append(functools.partial(_order, order))


def _gathers(every: Arguments) -> bool:
    """Whether parameters can be gathered while the next step begins."""
    sharded = every["use_distributed_optimizer"].value or every["use_megatron_fsdp"].value
    return bool(every["overlap_grad_reduce"].value and (sharded or every["optimizer"].value == "dist_muon"))


def _instances(parts: Value, layout: Layout) -> Problem | None:
    """The instances of the optimizer's states share the replicas of the dense weights, those of CP ranks too."""
    if (layout.dp * layout.cp) % parts.value == 0:
        return None
    text = f"{parts.name} {parts.value} ({parts.source}) does not divide dp·cp = {layout.dp}·{layout.cp}"
    return Problem(NAME, f"{text}: megatron-core asserts it", "give a number that divides it")


def _order(order: Value, layout: Layout) -> Problem | None:
    """Ranks whose stages are not outermost have other groups than those of moeref, and only if the DPs are equal."""
    if layout.pp == 1:
        return None
    if layout.edp != layout.dp:
        text = f"{order.name} ({order.source}) needs as many replicas of experts as of other weights at pp > 1, not"
        return Problem(NAME, f"{text} {layout.edp} and {layout.dp}: megatron-core asserts it", f"drop {order.name}")
    text = f"{order.name} ({order.source}): ranks are ordered otherwise than moeref orders them"
    return Problem(NAME, text, refused=False)


def defaults() -> Arguments:
    """The parser's default of every destination."""
    found: Arguments = {}
    for flag, (name, _, default) in megatron_arguments().items():
        found.setdefault(name, Value(flag, default, f"default of {NAME}"))
    return found


#: Arguments that `derive` and `_options` read.
_READ = frozenset(
    {
        *("swiglu", "bias_swiglu_fusion", "bias_gelu_fusion", "squared_relu", "quick_geglu", "no_persist_layer_norm"),
        *(
            "group_query_attention",
            "position_embedding_type",
            "use_rotary_position_embeddings",
            "recompute_activations",
        ),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "transformer_impl"),
        *("data_parallel_random_init", "hf_checkpoint", "add_position_embedding", "overlap_p2p_comm", *UNMAPPED),
        *("yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
        *("yarn_correction_range_round_to_int", "main_grads_dtype", "grad_reduce_in_bf16"),
    }
)


#: (setting, value, when it is derived, why), in Megatron-LM's order. `when` asks for the value of an argument.
_DERIVED: tuple[tuple[str, Any, Callable[[Callable[[str], Any]], bool], str], ...] = (
    ("recompute_granularity", "selective", lambda of: of("recompute_activations"), "--recompute-activations"),
    ("overlap_p2p_comm", False, lambda of: not of("virtual_pipeline_model_parallel_size"), "without virtual stages"),
    ("sequence_parallel", False, lambda of: of("tensor_model_parallel_size") == 1, "at TP 1"),
    ("position_embedding_type", "rope", lambda of: of("use_rotary_position_embeddings"), "the old switch asks for it"),
    ("apply_rope_fusion", False, lambda of: of("position_embedding_type") != "rope", "without RoPE"),
)
#: Lists of which one element stands for itself.
_LISTS = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type")


def derive(every: Arguments) -> None:
    """Put into `every` what Megatron-LM derives before it makes a config."""

    def of(name: str) -> Any:
        return every[name].value if name in every else None

    if of("expert_tensor_parallel_size") is None:
        etp = Value(
            "expert_tensor_parallel_size", of("tensor_model_parallel_size"), "derived: as TP, where it is unset"
        )
        every["expert_tensor_parallel_size"] = etp
    _derive_stages(every)
    for name, value, when, why in _DERIVED:
        if when(of):
            every[name] = Value(name, value, f"derived: {why}")
    _derive_sizes(every)
    for name in _LISTS:
        if isinstance(of(name), list) and len(of(name)) == 1:
            every[name] = Value(every[name].name, of(name)[0], every[name].source)
    _derive_fields(every)


def _derive_stages(every: Arguments) -> None:
    """The number of virtual stages."""
    each, ranks = every["num_layers_per_virtual_pipeline_stage"], every["num_virtual_stages_per_pipeline_rank"]
    pp = every["pipeline_model_parallel_size"].value
    text = every["pipeline_model_parallel_layout"]
    if ranks.value is not None:
        number, source = ranks.value, ranks
    elif each.value is not None and each.value > 0:
        extra = sum(bool(every[f"account_for_{end}_in_pipeline_split"].value) for end in ("embedding", "loss"))
        number, source = ((every["num_layers"].value or 0) + extra) // pp // each.value, each
    else:
        return
    if text.value is None and number > 1:
        every["virtual_pipeline_model_parallel_size"] = Value(source.name, number, source.source)


def _derive_sizes(every: Arguments) -> None:
    """Widths that follow from others."""
    hidden, heads = every["hidden_size"].value, every["num_attention_heads"].value
    if every["ffn_hidden_size"].value is None and hidden:
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if every["swiglu"].value else 4 * hidden
        every["ffn_hidden_size"] = Value("ffn_hidden_size", ffn, "derived: from hidden_size")
    if every["kv_channels"].value is None and hidden and heads:
        every["kv_channels"] = Value("kv_channels", hidden // heads, "derived: hidden_size / num_attention_heads")
    if every["num_experts"].value and every["moe_ffn_hidden_size"].value is None:
        every["moe_ffn_hidden_size"] = Value(
            "moe_ffn_hidden_size", every["ffn_hidden_size"].value, "derived: as the FFN"
        )


def _derive_fields(every: Arguments) -> None:
    """Fields of TransformerConfig that have no argument of their own."""
    fused = "bias_swiglu_fusion" if every["swiglu"].value else "bias_gelu_fusion"
    derived = {
        "gated_linear_unit": (every["swiglu"].value or every["quick_geglu"].value, every["swiglu"]),
        "bias_activation_fusion": (every[fused].value, every[fused]),
        "persist_layer_norm": (not every["no_persist_layer_norm"].value, every["no_persist_layer_norm"]),
        "batch_p2p_comm": (not every["overlap_p2p_comm"].value, every["overlap_p2p_comm"]),
    }
    for name, (value, source) in derived.items():
        every[name] = Value(source.name, value, source.source)
    every["deallocate_pipeline_outputs"] = Value("deallocate_pipeline_outputs", True, f"default of {NAME}")
    every["variable_seq_lengths"] = Value("variable_seq_lengths", False, f"default of {NAME}")
    if not every["group_query_attention"].value:
        every["num_query_groups"] = Value("num_query_groups", every["num_attention_heads"].value, "derived: as heads")
    if isinstance(frequency := every["moe_layer_freq"].value, int) and frequency > 0:
        layers = [int(layer % frequency == 0) for layer in range(every["num_layers"].value or 0)]
        every["moe_layer_freq"] = Value(every["moe_layer_freq"].name, layers, every["moe_layer_freq"].source)


def _missing(reading: Reading, every: Arguments, computed: Arguments) -> None:
    """Report what Megatron-LM requires and nobody gives; then only what is given is checked."""
    missing = [every[name].name for name in REQUIRED if every[name].value is None and name not in computed]
    if missing:
        # Words that only a shell could compute may hold them.
        refused = all(value.known for value in reading.unread)
        reading.problems.append(Problem(NAME, f"{', '.join(missing)}: required, and not given", refused=refused))
        reading.settings = {name: value for name, value in reading.settings.items() if value.given}
        reading.beside = {name: value for name, value in reading.beside.items() if value.given}
        reading.options.pop("experts", None)


def _options(every: Arguments) -> dict[str, Value]:
    """Arguments of `check` that follow from several."""
    half = next((name for name in ("bf16", "fp16") if every[name].value), None)
    if half == "fp16":
        raise CheckError(f"{every['fp16'].source}: --fp16: moeref knows bf16 and fp32 only")
    impl = every["transformer_impl"]
    return {
        "precision": Value("--bf16", half or "fp32", every["bf16"].source),
        "kernels": Value(impl.name, "torch" if impl.value == "local" else "te", impl.source),
        "experts": Value(
            "--moe-grouped-gemm",
            "grouped" if every["moe_grouped_gemm"].value else "sequential",
            every["moe_grouped_gemm"].source,
        ),
        "seed_per_dp": every["data_parallel_random_init"],
    }


def _settings(reading: Reading, every: Arguments, fields: Mapping[str, Mapping[str, Any]]) -> None:
    """Every field of TransformerConfig: its argument, or the class's default."""
    named = {field: name for name, field in FIELDS.items()}
    for name, field in fields.items():
        if name in _NOT_SETTINGS or name.startswith("_"):
            continue
        value = every.get(named.get(name, name))
        if value and not value.given and name.startswith(("cuda_graph_", "inference_")):
            continue  # without effect on training, as long as no graphs are asked for
        if value is None and "default" in field:
            value = Value(name, field["default"], f"default of TransformerConfig, {NAME} has no argument")
        if value is None or (name == "rope_type" and value.value is None):
            continue
        if name in ("kv_channels", "num_query_groups") and every["multi_latent_attention"].value:
            continue  # MLA has head dimensions of its own
        reading.settings[name] = value
