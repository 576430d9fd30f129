"""The settings part of the preflight: the settings that Megatron gets, the dispatcher, and the record for the builder.

Options are turned into settings, and the dispatcher is checked against the effective settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moeref.check.report import Problem, Report
from moeref.config import ConfigError, Setting
from moeref.config.effective import same
from moeref.config.precision import PRECISIONS, recipe
from moeref.dispatcher import AUTO, DispatcherError, Environment, Setup, refusals, select
from moeref.dispatcher.backends import BACKENDS
from moeref.dispatcher.setup import PACKAGES
from moeref.layout import LayoutError
from moeref.record import Draft, Record, settings_of
from moeref.seeds import SeedError

_PACKAGES = {**{backend.package: backend.needs for backend in BACKENDS}, "transformer_engine": "Transformer Engine"}
#: Settings that decide the shapes of weights: if they differ from the model's, its checkpoint does not fit.
_SHAPES = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "gated_linear_unit"),
        *("multi_latent_attention", "attention_output_gate", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "experimental_attention_variant"),
        *("moe_shared_expert_gate", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "normalization"),
        *("layernorm_zero_centered_gamma", "softmax_type", "mtp_num_layers", "moe_latent_size"),
    }
)

#: Settings that change what a model computes and no shape, as they are where its config asks for nothing of the kind.
_NEUTRAL: Mapping[str, object] = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "glu_linear_offset": 0.0,
    "hidden_dropout": 0.0,
    "moe_apply_probs_on_input": False,
    "moe_expert_capacity_factor": None,
    "moe_expert_rank_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False,
    "moe_token_dropping": False,
    "no_rope_freq": None,
    "qk_clip": False,
    "qk_l2_norm": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "softmax_scale": None,
    "use_mup": False,
    "window_size": None,
}

#: Settings that moeref does not map -> why, and in which kernels and experts they have an effect; "" is any.
_UNMAPPED: Mapping[str, tuple[str, str, str]] = {
    "hybrid_context_parallel": ("samples are dealt out over groups of several sizes", "", ""),
    "mla_down_proj_fusion": ("both down projections are one parameter", "te", ""),
    "moe_mlp_glu_interleave_size": ("the rows of gate and up projection alternate", "te", "grouped"),
    "moe_single_grouped_weight": ("experts of a layer are one parameter", "te", "grouped"),
    "use_grouped_gemm_for_shared_expert": ("shared experts are a class of their own", "", ""),
}


def settled(report: Report, draft: Draft, problems: list[Problem], notes: list[str]) -> Report:
    """The report with dispatcher, effective settings and record. Problems and notes are appended to the lists."""
    refused: tuple[str, ...] = ()
    try:
        setup = draft.setup
        chosen, report, refused = _dispatcher(report, draft, setup, problems)
        settings = draft.resolve(chosen)
        report = replace(report, settings=settings)
        if draft.kernels == "torch" and settings.values.get("gradient_accumulation_fusion"):
            report = replace(report, needs=(*report.needs, "apex's fused_weight_gradient_mlp_cuda"))
        record = _record(draft, report)
    except DispatcherError as error:
        problems.append(Problem("config", *problem_and_fix(str(error))))
        return report
    except LayoutError as error:
        if str(error) not in {problem.text for problem in problems}:
            problems.append(Problem("layout", *problem_and_fix(str(error))))
        return report
    except ConfigError as error:
        for text in error.problems:
            if not text.endswith(refused):
                problems.append(Problem("config", *problem_and_fix(text)))
        return report
    # Linear layers of multi-latent attention have no biases, whatever is asked for.
    apart = frozenset({"add_qkv_bias"}) if report.model.mla else frozenset[str]()
    trails = {name: trail for name, trail in settings.trails.items() if name not in apart}
    if "mtp." in report.model.ignored and settings.values.get("mtp_num_layers"):
        trails.pop("mtp_num_layers")
        held = f"{report.model.family}'s files hold one such layer (mtp.*)"
        text = f"mtp_num_layers: {held}, and moeref does not map more"
        problems.append(Problem("config", text, "leave them out to have a verdict", refused=False))
    problems += _unmapped(settings.values, draft)
    _of_the_checkpoint(trails, problems, notes, dense=not all(report.model.moe_layers))
    notes += [*_weaker_loss(draft.layout.dp, settings.values), *_otherwise(settings.values, draft.options.precision)]
    return replace(report, record=record)


def _unmapped(values: Mapping[str, object], draft: Draft) -> Iterator[Problem]:
    """What is built or dealt out with a setting in a way that moeref does not map, whatever its config class says."""
    shared = bool(draft.model.shared_ffn)
    for name, (why, kernels, experts) in _UNMAPPED.items():
        here = kernels in ("", draft.kernels) and experts in ("", draft.names.experts)
        if values.get(name) and here and (shared or name != "use_grouped_gemm_for_shared_expert"):
            text = f"{name}={values[name]!r}: {why} then, which moeref does not map"
            yield Problem("config", text, "drop it to have a verdict", refused=False)
    if values.get("moe_grouped_gemm") and draft.kernels == "torch" and draft.options.environment.minor == "0.16":
        text = (
            "moe_grouped_gemm: plain modules of megatron-core 0.16 are GroupedMLP then, which needs the package "
            "grouped_gemm, and moeref does not map its parameters (weight1, weight2)"
        )
        yield Problem("config", text, "ask for kernels='te' or experts='grouped' instead", refused=False)


def _weaker_loss(dp: int, values: Mapping[str, object]) -> list[str]:
    """That Megatron's global balancing loss counts less than its coefficient says (Megatron-LM#3672)."""
    kinds, given = values.get("moe_router_load_balancing_type"), values.get("moe_aux_loss_coeff")
    listed = isinstance(kinds, list) and isinstance(given, list)
    coefficients = dict(zip(kinds, given, strict=False)) if listed else {str(kinds): given}  # type: ignore[call-overload]
    if dp == 1 or not coefficients.get("global_aux_loss"):
        return []
    text = f"global_aux_loss counts 1/{dp} of moe_aux_loss_coeff={given}: megatron-core divides it by dp={dp} twice"
    return [f"{text} (Megatron-LM#3672); multiply the coefficient by {dp} to have what it says"]


def _otherwise(values: Mapping[str, object], precision: str | None) -> Iterator[str]:
    """Notes on settings that mislead: bf16=False, balancing that chooses experts, recomputation without granularity."""
    if precision == "bf16" and values.get("bf16") is False:
        yield "bf16=False leaves the parameters in bfloat16; precision fp32 reads them in float32"
    kind = values.get("moe_router_load_balancing_type")
    if kind in ("sinkhorn", "quantile_balancing"):
        yield f"moe_router_load_balancing_type={kind!r} chooses experts itself: not those of the model"
    if values.get("recompute_granularity") is None and not values.get("moe_layer_recompute"):
        for name, default in (("method", None), ("num_layers", None), ("modules", ["core_attn"])):
            value = values.get(f"recompute_{name}")
            if value not in (None, [], default):
                yield f"recompute_{name}={value!r} has no effect: recompute_granularity is None"


def _record(draft: Draft, report: Report) -> Record | None:
    """The record; None if the seeds are refused."""
    assert report.settings is not None
    try:
        return draft.record(report.settings)
    except SeedError:
        return None  # `check.run` reports the problem with the seeds


def quantised(report: Report, precision: str) -> str | None:
    """The recipe of quantised GEMMs in the effective settings; None without FP8 and FP4."""
    values: Mapping[str, object] = report.settings.values if report.settings else PRECISIONS[precision]
    return recipe(values)


def _dispatcher(
    report: Report, draft: Draft, setup: Setup, problems: list[Problem]
) -> tuple[dict[str, Setting], Report, tuple[str, ...]]:
    """(settings of an automatic choice, report with the dispatcher, `[rule id]` of each refusal reported)."""
    there, why, chosen = draft.options.environment, "asked for", {}
    if not draft.names_dispatcher:
        try:
            selection = select(AUTO, setup, there)
        except DispatcherError as error:
            problems.append(Problem("dispatcher", str(error)))
            return {}, report, ()
        choice, why = selection.choice, selection.why
        setup = replace(setup, dispatcher=choice.dispatcher, backend=choice.backend_name)
        chosen = settings_of(choice, "derived", why)
    found = refusals(setup, there)
    problems += [Problem("dispatcher", f"{setup.choice or 'flex'}: {r.text} [{r.rule}]", r.fix) for r in found]
    if setup.choice is not None:
        report = replace(report, dispatcher=str(setup.choice), dispatcher_why=why)
    if not found:
        report = replace(report, needs=_needs(setup, there))
    return chosen, report, tuple(f"[{refusal.rule}]" for refusal in found)


def _needs(setup: Setup, environment: Environment) -> tuple[str, ...]:
    """What the machine must have: each thing without which the table refuses the setup."""
    without = {name: replace(environment, packages=environment.packages - {name}) for name in PACKAGES}
    found = [said for name, said in _PACKAGES.items() if refusals(setup, without[name])]
    return (*found, *(("a GPU",) if refusals(setup, replace(environment, gpu=False)) else ()))


def _of_the_checkpoint(
    trails: Mapping[str, tuple[Setting, ...]], problems: list[Problem], notes: list[str], *, dense: bool
) -> None:
    """Report the settings that replace values of the model's config, whose weights then may not fit.

    Of what decides shapes, a model whose config is silent has Megatron's default; else that of `_NEUTRAL`. `dense`:
    the model has layers without experts, and so weights of the width `ffn_hidden_size`.
    """
    for name, trail in trails.items():
        silent = trail[0].value if name in _SHAPES else _NEUTRAL.get(name, trail[-1].value)
        theirs = next((setting.value for setting in trail if setting.origin == "hf"), silent)
        if not same(theirs, trail[-1].value) and (theirs or trail[-1].value):
            text = f"{name}={trail[-1].value!r} replaces {theirs!r} of the model's own config"
            if name == "ffn_hidden_size" and not dense:
                notes.append(f"{text}; no weight has that width, as all layers have experts")
            elif name in _SHAPES:
                problems.append(Problem("config", f"{text}, whose weights then do not fit", "give the model's config"))
            else:
                notes.append(text)


def problem_and_fix(text: str) -> tuple[str, str]:
    """(problem, fix) of a message; the two are separated by a semicolon."""
    wrong, _, fix = text.partition("; ")
    return wrong, fix
