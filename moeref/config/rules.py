"""The table of settings that cannot be combined. Dispatchers have their own in `moeref.dispatcher.table`, and what
else megatron-core's config classes refuse is in `core_rules`, what its layers and steps do in `step_rules`.

megatron-core checks some of these when a config is made, some when a layer is built, and some not at all, so that a
setting silently has no effect. Here every rule is checked before anything is built. Functions named in sources are
megatron-core's unless another project is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeref.config import core_rules, step_rules
from moeref.config.precision import FORMATS
from moeref.config.rule import Effective, Rule
from moeref.config.setting import Setting
from moeref.dispatcher import DispatcherError, setup_of
from moeref.dispatcher import contradictions as contradictions_of
from moeref.families.model import Model
from moeref.layout import Layout, LayoutError

_REPLAY, _BALANCING = "moe_enable_routing_replay", "moe_router_load_balancing_type"
_DISPATCHER, _BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"
_SCORES, _BIAS = "moe_router_score_function", "moe_router_enable_expert_bias"
_TOPK, _PRE, _COEFFICIENT = "moe_router_topk", "moe_router_pre_softmax", "moe_aux_loss_coeff"
_GROUPED, _P2P, _CP_KIND = "moe_grouped_gemm", "overlap_p2p_comm", "cp_comm_type"
_VARIANT = "experimental_attention_variant"
_CP_SIZES, _CP_KINDS = "hierarchical_context_parallel_sizes", ("p2p", "all_gather", "a2a", "a2a+p2p")


def _one_softmax(now: Effective) -> bool:
    one = now[_TOPK] == 1 and now[_BALANCING] != "sinkhorn"
    return one and now[_SCORES] == "softmax" and not now[_PRE]


def _coefficients(now: Effective) -> bool:
    kinds, factors = now[_BALANCING], now[_COEFFICIENT]
    return isinstance(kinds, list) and not (isinstance(factors, list) and len(factors) == len(kinds))


def _ignored_backend(now: Effective) -> bool:
    return now[_DISPATCHER] not in (None, "flex") and now.asked(_BACKEND) and now[_BACKEND] is not None


def _unbatched(now: Effective) -> bool:
    return now.layout.vpp > 1 and now.layout.pp == 2 and now.asked(_P2P) and not now[_P2P]


def _cp_kinds(now: Effective) -> set[str]:
    """How Transformer Engine exchanges under CP, over all layers; empty where it does not. Its default is p2p."""
    if now["kernels"] != "te" or now.layout.cp == 1:
        return set()
    kinds: Any = now[_CP_KIND] or "p2p"
    return set(kinds if isinstance(kinds, list) else [kinds])


def _dsa(now: Effective) -> bool:
    return bool(now[_VARIANT] == "dsa")


def _gathers(now: Effective) -> bool:
    kinds: Any = now[_CP_KIND]
    listed = kinds if isinstance(kinds, list) else [kinds]
    return all(str(kind).replace("_", "").lower() == "allgather" for kind in listed)


def _ill_sized(now: Effective) -> bool:
    """Whether hierarchical groups have no sizes where Transformer Engine needs them, or sizes that are not of CP."""
    sizes: Any = now[_CP_SIZES]
    if not sizes:
        return "a2a+p2p" in _cp_kinds(now)
    numbers = isinstance(sizes, list) and all(type(size) is int for size in sizes)
    return not (numbers and math.prod(sizes) == now.layout.cp)


def _heads_left(now: Effective) -> bool:
    """Whether a TP rank's heads or KV groups do not divide over CP; TP ranks that share a group have one each."""
    heads, groups = (now[name] or 0 for name in ("num_attention_heads", "num_query_groups"))
    each = heads // now.layout.tp, max(1, groups // now.layout.tp)
    return not now["multi_latent_attention"] and any(count % now.layout.cp for count in each)


RULES: tuple[Rule, ...] = (
    Rule(
        "replay-needs-plain-router", "settings", (_REPLAY, "moe_router_fusion"),
        "the fused router never asks for the recorded routes",
        "switch one of them off", "topk_routing_with_score_function; NovaSky-AI/SkyRL 04874ec",
        lambda now: now[_REPLAY] and now["moe_router_fusion"],
    ),
    Rule(
        "replay-needs-topk", "settings", (_REPLAY, _BALANCING),
        "this balancing chooses experts itself and never asks for the recorded routes",
        "use another balancing, or no replay", "TopKRouter.routing",
        lambda now: now[_REPLAY] and now[_BALANCING] in ("sinkhorn", "quantile_balancing"),
    ),
    Rule(
        # Not in the dispatchers' table, because megatron-core accepts this and ignores the backend.
        "backend-needs-flex", "settings", (_DISPATCHER, _BACKEND),
        "only flex has a backend, it would be ignored",
        "ask for dispatcher flex, or for None", "NVIDIA-NeMo/Megatron-Bridge#5207",
        _ignored_backend,
    ),
    Rule(
        "bias-needs-sigmoid", "settings", (_BIAS, _SCORES),
        "a bias needs scores by sigmoid",
        "ask for moe_router_enable_expert_bias=False too", "TransformerConfig.__post_init__",
        lambda now: now[_BIAS] and now[_SCORES] == "softmax",
    ),
    Rule(
        "one-expert-needs-pre-softmax", "settings", (_TOPK, _PRE),
        "softmax over one chosen expert is always 1",
        "ask for moe_router_pre_softmax=True too", "TransformerConfig.__post_init__",
        _one_softmax,
    ),
    Rule(
        "coefficient-each", "settings", (_BALANCING, _COEFFICIENT),
        "a list of balancing types needs a list with a coefficient each",
        "give as many coefficients as types", "TransformerConfig.__post_init__",
        _coefficients,
    ),
    Rule(
        "interleaving-needs-overlap", "settings", (_P2P,),
        "pp=2 with virtual stages computes wrongly without it",
        "leave it on", "Megatron-LM's arguments: two sends and two receives between the same two ranks in one batch",
        _unbatched,
    ),
    Rule(
        "replay-needs-its-switch", "run", ("replay", _REPLAY),
        "routers without the switch take no routes",
        "drop the setting", "TopKRouter.__init__",
        lambda now: now["replay"] != "off" and not now[_REPLAY],
    ),
    Rule(
        "te-holds-norms", "run", ("kernels", "norms"),
        "Transformer Engine's linears hold the norms",
        "give norms='fused'", "get_gpt_layer_with_transformer_engine_spec",
        lambda now: now["kernels"] == "te" and now["norms"] != "fused",
    ),
    Rule(
        "grouped-gemm-needs-grouped", "run", (_GROUPED, "experts"),
        "sequential experts are modules without grouped GEMM",
        "give experts='grouped'", "get_moe_module_spec",
        lambda now: now[_GROUPED] and now["experts"] != "grouped",
    ),
    Rule(
        "te-groups-by-its-switch", "run", (_GROUPED, "experts"),
        "Transformer Engine's experts are grouped by moe_grouped_gemm alone",
        "drop one of them", "get_moe_module_spec",
        lambda now: now["kernels"] == "te" and now["experts"] == "grouped" and not now[_GROUPED],
    ),
    Rule(
        "gated-attention-cuts-groups-from-0.19", "run", ("attention_output_gate", "num_query_groups", "core"),
        "TP ranks that share a KV group keep the gates of all its heads, and the product with fewer heads fails",
        "give tp of at most the KV groups, or use megatron-core 0.19", "SelfAttention.get_query_key_value_tensors",
        lambda now: now["core"] == "0.16"
        and now["attention_output_gate"]
        and now.layout.tp > (now["num_query_groups"] or now.layout.tp),
    ),
    Rule(
        "gated-delta-under-cp-from-0.19", "run", (_VARIANT, "core"),
        "every CP rank would take its part of a sequence for a whole one",
        "give cp=1, or use megatron-core 0.19", "a TODO in GatedDeltaNet of 0.16",
        lambda now: now["core"] == "0.16"
        and now[_VARIANT] == "gated_delta_net"
        and now.layout.cp > 1,
    ),
    Rule(
        "dsa-under-cp-by-all-gather", "run", (_VARIANT, _CP_KIND),
        "sparse attention gathers keys under context parallelism, and takes nothing else",
        f"drop {_CP_KIND}", "TransformerConfig.__post_init__: AssertionError",
        lambda now: _dsa(now) and now.layout.cp > 1 and not _gathers(now),
    ),
    Rule(
        "dsa-without-rope-fusion", "run", (_VARIANT, "apply_rope_fusion"),
        "sparse attention does not take it",
        "drop apply_rope_fusion", "TransformerConfig.__post_init__: AssertionError",
        lambda now: _dsa(now) and now["apply_rope_fusion"],
    ),
    Rule(
        "te-sinks-under-cp-by-a2a", "run", ("softmax_type", _CP_KIND),
        "Transformer Engine takes attention sinks under context parallelism by all-to-all only",
        f"ask for {_CP_KIND}='a2a'", "Transformer Engine's attn_forward_func_with_cp",
        lambda now: now["softmax_type"] not in (None, "vanilla") and not _cp_kinds(now) <= {"a2a"},
    ),
    Rule(
        "te-windows-under-cp-by-a2a-or-all-gather", "run", ("window_size", _CP_KIND),
        "Transformer Engine takes a sliding window under context parallelism by all-to-all or all-gather only",
        f"ask for {_CP_KIND}='a2a'", "Transformer Engine's attn_forward_func_with_cp",
        lambda now: bool(now["window_size"]) and not _cp_kinds(now) <= {"a2a", "all_gather"},
    ),
    Rule(
        "a2a-deals-heads-over-cp", "run", (_CP_KIND, "num_attention_heads", "num_query_groups"),
        "all-to-all deals a TP rank's heads, and its KV groups, out over the CP ranks, and they do not divide",
        "give a tp·cp that divides both", "Transformer Engine's AttnFuncWithCPAndQKVOA2A",
        lambda now: "a2a" in _cp_kinds(now) and _heads_left(now),
    ),
    Rule(
        "te-cp-kind-is-known", "run", (_CP_KIND,),
        f"Transformer Engine exchanges by {', '.join(_CP_KINDS)} only",
        "name one of these", "Transformer Engine's attn_forward_func_with_cp: ValueError",
        lambda now: not {str(kind) for kind in _cp_kinds(now)} <= set(_CP_KINDS),
    ),
    Rule(
        "hierarchical-cp-has-its-sizes", "run", (_CP_KIND, _CP_SIZES),
        "the sizes of hierarchical groups multiply to cp, and a2a+p2p needs them",
        f"give {_CP_SIZES} whose product is cp", "initialize_model_parallel: AssertionError; TEDotProductAttention",
        _ill_sized,
    ),
    Rule(
        "quantising-needs-te", "run", ("fp8", "fp4", "kernels", "parameters"),
        "only Transformer Engine's layers quantise; others would compute in the parameters' precision",
        "give kernels='te'", "get_fp8_context, get_fp4_context",
        lambda now: (now["fp8"] or now["fp4"]) and now["kernels"] != "te",
    ),
    Rule(
        "quantising-needs-a-recipe-that-is-built", "run", ("fp8", "fp8_recipe", "fp4"),
        f"it is no FP8 recipe of {', '.join(FORMATS)}, and only those are built",
        "give one of these recipes", "the builder knows the rows and widths of these GEMMs only",
        lambda now: now["fp4"] or (now["fp8"] and now["fp8_recipe"] not in FORMATS),
    ),
)  # fmt: skip


def contradictions(settings: Mapping[str, Setting], layout: Layout) -> list[str]:
    """Every contradiction between effective settings, with values and origins."""
    now = Effective(settings, layout)
    return [*_refused(now, "settings"), *_dispatcher(now)]


def run_contradictions(settings: Mapping[str, Setting], layout: Layout, facts: Mapping[str, str]) -> list[str]:
    """Every contradiction between effective settings and the facts of a run."""
    return list(_refused(Effective(settings, layout, facts), "run"))


def _refused(now: Effective, stage: str) -> Iterator[str]:
    for rule in (*RULES, *core_rules.RULES, *step_rules.RULES):
        if rule.stage == stage and rule.refuses(now):
            yield f"{now.said(*rule.names)}: {rule.text}; {rule.fix} [{rule.id}]"


def _dispatcher(now: Effective) -> Iterator[str]:
    """What the table of dispatchers refuses on every machine and in every version.

    What depends on the packages, the GPU and the rows of a run is checked by `dispatcher.select`.
    """
    if not now["num_moe_experts"]:
        return
    try:
        setup = setup_of({name: setting.value for name, setting in now.settings.items()}, now.layout)
    except DispatcherError:
        return  # a value that the table does not know: `unfit` and the finalisation of the provider check it
    for refusal, names in contradictions_of(setup):
        yield f"{now.said(*names)}: {refusal}" if names else str(refusal)


@dataclass(frozen=True)
class LayoutRule:
    """A layout that a kind of model cannot have."""

    id: str
    text: str
    fix: str
    source: str
    refuses: Callable[[Model, Layout], bool]


LAYOUT_RULES: tuple[LayoutRule, ...] = (
    LayoutRule(
        "biased-experts-need-etp1",
        "megatron-core has biases of experts at ETP 1 only",
        "give etp=1 and more of ep instead", "TransformerConfig.__post_init__",
        lambda model, layout: model.linear_bias and layout.etp > 1,
    ),
    LayoutRule(
        "gated-delta-heads-divide-over-cp",
        "context parallelism deals a TP rank's key heads out, and they do not divide",
        "give a tp·cp that divides the key heads", "GatedDeltaNet: tensor_a2a_cp2hp",
        lambda model, layout: model.gated_delta_net is not None
        and layout.cp > 1
        and model.gated_delta_net.key_heads % (layout.tp * layout.cp) != 0,
    ),
    LayoutRule(
        "stages-begin-with-an-indexer",
        "a layer without an indexer takes the keys of one before it, which is in another stage",
        "cut the layers so that each virtual stage begins with a layer that has an indexer",
        "DSAttention.forward: RuntimeError",
        lambda model, layout: model.indexer is not None and _begins_without(model.indexer.layers, model, layout),
    ),
)  # fmt: skip


def _begins_without(has: Sequence[bool], model: Model, layout: Layout) -> bool:
    return any(
        layers and not has[layers[0]]
        for layers in layout.stages(model.num_layers, mtp=model.mtp_layers).layers.values()
    )


def check_layout(model: Model, layout: Layout) -> None:
    """Raise LayoutError for a layout under which megatron-core cannot compute `model`."""
    for rule in LAYOUT_RULES:
        if rule.refuses(model, layout):
            raise LayoutError(f"{model.family}: {rule.text} ({layout.text}); {rule.fix} [{rule.id}]")


def derive(settings: Mapping[str, Setting], layout: Layout) -> dict[str, Setting]:
    """Settings that follow from others and were not asked for."""
    now, found = Effective(settings, layout), {}
    # The flag and the dispatcher type both select DeepEP: changing one alone leaves the other (Megatron-Bridge#5740).
    dispatcher = now[_DISPATCHER]
    if now["moe_enable_deepep"] and not now.asked("moe_enable_deepep") and dispatcher not in (None, "flex"):
        reason = f"DeepEP is a backend of flex, and the dispatcher is {dispatcher}"
        found["moe_enable_deepep"] = Setting(False, "derived", reason)
    return found
