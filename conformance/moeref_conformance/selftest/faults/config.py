"""Bugs of settings: lost, overruled, forced, or refused on their way to Megatron."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Request, Session, World
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell

ONE = cell("glm4_moe", "tp1", backend="static")
_REPLAY = "moe_enable_routing_replay"
_DISPATCHER = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")

Wrap = Callable[[Session, Cell, World], Any]
#: What the wrong target answers to a request, given the good facet, the request and the role.
Resolve = Callable[[Any, Request, str], Mapping[str, Any]]


def _resolving(wrong: Resolve) -> Wrap:
    """Requests are answered by `wrong(config, request, role)`, where `config` is the good facet."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good = session.config
        return facet(session, "config", resolve=lambda request, role: wrong(good, request, role))

    return wrap


def _requesting(change: Callable[[Any, Request], Request]) -> Wrap:
    """The good target is asked for `change(config, request)` in place of each request."""
    return _resolving(lambda config, request, role: config.resolve(change(config, request), role))


def _without(request: Request, names: Collection[str]) -> Request:
    return Request(
        fields={k: v for k, v in request.fields.items() if k not in names},
        overrides={k: v for k, v in request.overrides.items() if k not in names},
    )


def _if_true(config: Any, request: Request) -> Request:
    return replace(request, fields={name: value for name, value in request.fields.items() if value})


def _if_not_zero(config: Any, request: Request) -> Request:
    return _without(request, [k for k, v in request.overrides.items() if type(v) in (int, float) and not v])


def _with_defaults(config: Any, request: Request) -> Request:
    section = {"moe_router_enable_expert_bias": False} if request.overrides else {}
    return replace(request, fields={**section, **request.fields})


def _flag_not_read(config: Any, request: Request) -> Request:
    return _without(request, [_REPLAY])


def _flag_not_passed_on(config: Any, request: Request) -> Request:
    return _without(request, [_REPLAY] if config.given()["multi_latent_attention"] else [])


def _fields_last(config: Any, request: Request) -> Request:
    return replace(request, overrides={k: v for k, v in request.overrides.items() if k not in request.fields})


def _without_a_recipe(config: Any, request: Request) -> Request:
    return _without(request, ["moe_shared_expert_overlap", "calculate_per_token_loss", "variable_seq_lengths"])


def _without_softmax(config: Any, request: Request) -> Request:
    return _without(request, ["attention_softmax_in_fp32"])


def _without_recompute(config: Any, request: Request) -> Request:
    return _without(request, [name for name in request.overrides if name.startswith("recompute_")])


def _without_modules(config: Any, request: Request) -> Request:
    return _without(request, ["recompute_modules"])


def _only_known(config: Any, request: Request) -> Request:
    return _without(request, {*request.fields, *request.overrides} - config.given().keys())


def _none_before_known(config: Any, request: Request) -> Request:
    """What is None and not known is left out."""
    return _without(request, [k for k, v in request.overrides.items() if v is None and k not in config.given()])


def _taken_unseen(names: Collection[str], conflict: Callable[[Mapping[str, Any]], bool]) -> Wrap:
    """Requests with a `conflict` are accepted: the settings `names` are set as requested, without a check."""

    def resolve(config: Any, request: Request, role: str) -> Mapping[str, Any]:
        asked = {**request.fields, **request.overrides}
        if not conflict(asked):
            good: Mapping[str, Any] = config.resolve(request, role)
            return good
        return {**config.resolve(_without(request, names), role), **{name: asked[name] for name in names}}

    return _resolving(resolve)


def _replay_and_fusion(asked: Mapping[str, Any]) -> bool:
    return bool(asked.get(_REPLAY) and asked.get("moe_router_fusion"))


def _flex_alone(asked: Mapping[str, Any]) -> bool:
    return asked.get(_DISPATCHER[0]) == "flex" and asked.get(_DISPATCHER[1]) is None


def always(**values: Any) -> Wrap:
    """Megatron is given `values`, whatever the model or the layout needs."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.config
        return facet(
            session,
            "config",
            given=lambda: {**good.given(), **values},
            resolve=lambda request, role: {**good.resolve(request, role), **values},
        )

    return wrap


def _unless_asked(**values: Any) -> Wrap:
    """Megatron is given `values` where nobody asks for others."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.config

        def resolve(request: Request, role: str) -> Mapping[str, Any]:
            asked = {**request.fields, **request.overrides}
            return {**good.resolve(request, role), **{name: asked.get(name, value) for name, value in values.items()}}

        return facet(session, "config", given=lambda: {**good.given(), **values}, resolve=resolve)

    return wrap


def _unless_asked_for_some(session: Session, cell: Cell, world: World) -> Any:
    """Routers have the losses of the model's config and of a recipe, and 0 and None ask for nothing else."""
    good: Any = session.config
    values = {"moe_aux_loss_coeff": 0.001, "moe_z_loss_coeff": 3.5e-6}

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        asked = {**request.fields, **request.overrides}
        return {**good.resolve(request, role), **{name: asked.get(name) or value for name, value in values.items()}}

    return facet(session, "config", given=lambda: {**good.given(), **values}, resolve=resolve)


def _with_a_float(session: Session, cell: Cell, world: World) -> Any:
    """The number of experts is a float."""
    given: Mapping[str, Any] = session.config.given()  # type: ignore[union-attr]
    return always(num_moe_experts=float(given["num_moe_experts"]))(session, cell, world)


def _own_reference(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    chosen = {name: value for name, value in request.fields.items() if name == _DISPATCHER[0]}
    good: Mapping[str, Any] = config.resolve(request if role == "policy" else Request(fields=chosen), role)
    return good


def _reference_by_truth(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    """The reference model is given what is true of a request."""
    passed = {name: value for name, value in request.overrides.items() if value}
    reference = replace(_if_true(config, request), overrides=passed)
    good: Mapping[str, Any] = config.resolve(request if role == "policy" else reference, role)
    return good


def _reference_not_recomputed(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    good: Mapping[str, Any] = config.resolve(request if role == "policy" else _without_recompute(config, request), role)
    return good


def _reference_without_losses(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    good: Mapping[str, Any] = config.resolve(request, role)
    if role == "policy":
        return good
    return {**good, **{name: None for name in good if name.endswith("loss_coeff")}}


def _both_dropped(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    """Of a setting that is given twice, neither value is kept."""
    good: Mapping[str, Any] = config.resolve(request, role)
    twice = request.fields.keys() & request.overrides.keys()
    return {name: value for name, value in good.items() if name not in twice}


def _anonymous(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    try:
        good: Mapping[str, Any] = config.resolve(request, role)
    except ValueError as error:
        raise ValueError("the config is not valid") from error
    return good


def _recompute_refused(config: Any, request: Request, role: str) -> Mapping[str, Any]:
    if "recompute_granularity" in {**request.fields, **request.overrides}:
        raise ValueError("recompute_granularity: recomputation of MoE layers is not supported here")
    good: Mapping[str, Any] = config.resolve(request, role)
    return good


def _built_with(**values: Any) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """Megatron builds its modules from a config in which `values` replace what was given."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.models.gpt import GPTModel

        good = GPTModel.__init__

        def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            vars(config).update(values)
            good(self, config, *args, **kwargs)

        return mock.patch.object(GPTModel, "__init__", init)

    return patch


def _replay_forced_on(session: Session, cell: Cell, world: World) -> Session:
    chunks: Any = session.export.chunks() if session.export else ()
    for chunk in chunks:
        chunk.config.moe_enable_routing_replay = True
    return session


def _ep_in_the_dense_grid(session: Session, cell: Cell, world: World) -> Session:
    layout = cell.layout
    if layout.world % (layout.tp * layout.pp * layout.ep):
        raise ValueError(f"world size {layout.world} is not divisible by TP x PP x EP")
    return session


FAULTS = (
    Fault(
        id="false-taken-for-unset",
        bug="B1 SkyRL#1210: a guard `if value` in front of every setting",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_if_true),
        says="moe_router_enable_expert_bias is True, not False",
    ),
    Fault(
        id="zero-taken-for-unset",
        bug="SkyRL#1210 in kind: the guard lets False and None through, and drops a rate of 0",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_if_not_zero),
        says="moe_router_bias_update_rate is 0.001, not 0.0",
    ),
    Fault(
        id="section-brings-its-defaults",
        bug="B2 SkyRL#1247: the default of a section is False and not unset, and replaces a detected True",
        rules=("CFG-004",),
        cell=ONE,
        wrap=_requesting(_with_defaults),
        says="moe_router_enable_expert_bias became False",
    ),
    Fault(
        id="field-that-nobody-reads",
        bug="B3 SkyRL#1215: a flag in a section that nobody reads",
        rules=("CFG-003",),
        also=("CFG-007",),  # without the flag nothing contradicts the fused router
        cell=ONE,
        wrap=_requesting(_flag_not_read),
        says="moe_enable_routing_replay is False, not True",
    ),
    Fault(
        id="fields-merged-last",
        bug="B4 SkyRL#1215: the order of merging resets values",
        rules=("CFG-010",),
        cell=ONE,
        wrap=_requesting(_fields_last),
        says="moe_grouped_gemm is True, not False",
    ),
    Fault(
        id="both-values-dropped",
        bug="B4 in kind: a setting that two sections have is left out when they are merged",
        rules=("CFG-005",),
        cell=ONE,
        wrap=_resolving(_both_dropped),
        says="moe_grouped_gemm is",
    ),
    Fault(
        id="reference-without-losses",
        bug="a reference model that takes no step is given no losses",
        rules=("CFG-011",),
        cell=ONE,
        wrap=_resolving(_reference_without_losses),
        says="moe_aux_loss_coeff is",
    ),
    Fault(
        id="reference-not-recomputed",
        bug="verl#6247 in kind: what is passed through reaches the policy alone, here recomputation",
        rules=("CFG-011",),
        cell=ONE,
        wrap=_resolving(_reference_not_recomputed),
        says="asked for recompute: recompute_granularity is",
    ),
    Fault(
        id="refused-setting-not-named",
        bug="verl#1555 in kind: a setting is refused by an error that does not say which",
        rules=("CFG-012",),
        cell=ONE,
        wrap=_resolving(_anonymous),
        says="the refusal names nothing",
    ),
    Fault(
        id="recompute-refused",
        bug="reported nowhere: a setting that Megatron takes is refused, by name",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_resolving(_recompute_refused),
        says="refused: ValueError: recompute_granularity",
    ),
    Fault(
        id="recompute-dropped",
        bug="B5 slime#1737, miles#803: bridge mode drops runtime settings, here recomputation",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_without_recompute),
        says="recompute_granularity is None, not 'full'",
    ),
    Fault(
        id="recomputed-modules-dropped",
        bug="Megatron-Bridge#3518: what sets recomputation wipes the modules that another place has asked for",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_without_modules),
        says="asked for recompute of modules: recompute_modules is",
    ),
    Fault(
        id="recipe-dropped",
        bug="NeMo-RL#2278, #3523 in kind: of what a recipe sets, fields that nobody listed are left behind",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_without_a_recipe),
        says="calculate_per_token_loss is False, not True",
    ),
    Fault(
        id="softmax-dropped",
        bug="slime#2155: bridge mode copies some settings to its provider, and not attention_softmax_in_fp32",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_requesting(_without_softmax),
        says="attention_softmax_in_fp32 is True, not False",
    ),
    Fault(
        id="overlap-not-turned-off",
        bug="miles#3232: the bridge overlaps shared experts of itself, and whoever asks for none is not heard",
        rules=("CFG-003",),
        cell=ONE,
        wrap=always(moe_shared_expert_overlap=True),
        says="moe_shared_expert_overlap is True, not False",
    ),
    Fault(
        id="per-token-loss-not-turned-off",
        bug="verl#6609 in kind: a bridge sets calculate_per_token_loss where it builds, whatever was asked for",
        rules=("CFG-003",),
        cell=ONE,
        wrap=always(calculate_per_token_loss=True),
        says="calculate_per_token_loss is True, not False",
    ),
    Fault(
        id="router-losses-not-turned-off",
        bug="Megatron-LM#5694, AReaL#1372 in kind: who asks for no loss of routers gets the model's or a recipe's",
        rules=("CFG-003",),
        cell=ONE,
        wrap=_unless_asked_for_some,
        says="moe_aux_loss_coeff is 0.001, not 0.0",
    ),
    Fault(
        id="dispatcher-dropped-when-built",
        bug="B5 slime#1737, miles#1483: the model is built without the dispatcher that was asked for",
        rules=("CFG-009",),
        cell=cell("qwen3_moe", "ep2"),
        patch=_built_with(moe_token_dispatcher_type="allgather"),
        says="moe_token_dispatcher_type='allgather', not 'alltoall'",
    ),
    Fault(
        id="flag-swallowed-by-the-subclass",
        bug="B6 verl#5884: the constructor of the config's subclass does not pass the replay flag on",
        rules=("CFG-003",),
        also=("CFG-007",),
        cell=cell("deepseek_v3", "tp1", layers=4, backend="static"),
        wrap=_requesting(_flag_not_passed_on),
        says="moe_enable_routing_replay is False, not True",
    ),
    Fault(
        id="replay-under-a-fused-router",
        bug="B7 SkyRL 04874ec: the fused top-k returns before replay, silently",
        rules=("CFG-007",),
        cell=ONE,
        wrap=_taken_unseen(["moe_router_fusion"], _replay_and_fusion),
        says="moe_enable_routing_replay with moe_router_fusion was taken",
    ),
    Fault(
        id="flex-left-without-a-backend",
        bug="B8 Megatron-Bridge#5207, Megatron-Bridge#5740: the fallback clears one of two settings, flex stays",
        rules=("CFG-007",),
        cell=ONE,
        wrap=_taken_unseen(_DISPATCHER, _flex_alone),
        says="moe_token_dispatcher_type with moe_flex_dispatcher_backend was taken",
    ),
    Fault(
        id="ep-in-the-dense-grid",
        bug="B10 Megatron-Bridge#5302: the world has to be a multiple of TP·PP·EP",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1"),
        wrap=_ep_in_the_dense_grid,
        says="not divisible by TP x PP x EP",
    ),
    Fault(
        id="sequence-parallel-left-out",
        bug="B11 NeMo-RL#1487: sequence parallelism is not given to the provider",
        rules=("CFG-002",),
        cell=cell("glm4_moe", "tp2", backend="static"),
        wrap=always(sequence_parallel=False),
        says="sequence_parallel=False, not True",
    ),
    Fault(
        id="layout-string-left-out",
        bug="B5 in kind: slime#1737, the number of stages is passed on, and not the string of their layers",
        rules=("CFG-002",),
        cell=cell("qwen3_moe", "pp2", layers=4, pipeline_layout="Et|tttL", backend="static"),
        wrap=always(pipeline_model_parallel_layout=None),
        says="pipeline_model_parallel_layout=None, not 'Et|tttL'",
    ),
    Fault(
        id="lost-by-renaming",
        bug="B12 ms-swift#9590, verl#7485, miles#1721: settings are mapped by identical name, what is renamed is lost",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(moe_router_topk_scaling_factor=None),
        says="moe_router_topk_scaling_factor=None, not 1.7",
    ),
    Fault(
        id="sizes-as-floats",
        bug="a number that was computed, or read from YAML, arrives as a float, and Megatron takes it until it counts",
        rules=("CFG-001",),
        cell=ONE,
        wrap=_with_a_float,
        says="the config has num_moe_experts=",
    ),
    Fault(
        id="dense-prefix-not-detected",
        bug="first_k_dense_replace is not read, and every layer has experts",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(moe_layer_freq=1),
        says="moe_layer_freq=1, not [0, 1]",
    ),
    Fault(
        id="experts-from-the-first-layer",
        bug="alibaba/ROLL (read): decoder_sparse_step goes on as moe_layer_freq, which counts from the first layer",
        rules=("CFG-001",),
        cell=cell("qwen3_next", "tp1", layers=4, batch="pairs", backend="static"),
        wrap=always(moe_layer_freq=2),
        says="moe_layer_freq=2, not [0, 1, 0, 1]",
    ),
    Fault(
        id="dropout-left-on",
        bug="megatron-core's dropout of 0.1 is left on: the trainer computes other probabilities than the engine",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(hidden_dropout=0.1, attention_dropout=0.1),
        says="attention_dropout=0.1, not 0.0",
    ),
    Fault(
        id="rotary-percent-in-latent-attention",
        bug="Megatron-Bridge#4271: partial_rotary_factor is applied to the part of a latent head that is rotated whole",
        rules=("CFG-001",),
        cell=cell("glm4_moe_lite", "tp1", layers=4, backend="static"),
        wrap=always(rotary_percent=0.5),
        says="rotary_percent=0.5, not 1.0",
    ),
    Fault(
        id="softmax-scaled-for-another-width",
        bug="the scale of attention is worked out from hidden_size / heads, and head_dim says another width",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(softmax_scale=0.03),
        says="softmax_scale=0.03",
    ),
    Fault(
        id="biases-of-qkv-not-detected",
        bug="attention_bias is not read, since the families before had none",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(add_qkv_bias=False),
        says="add_qkv_bias=False, not True",
    ),
    Fault(
        id="mscale-of-the-class",
        bug="Megatron-Bridge#4271 in kind: of a rope's settings the factor alone is mapped, the rest are defaults",
        rules=("CFG-001",),
        cell=cell("deepseek_v3", "tp1", layers=3, backend="static"),
        wrap=always(mscale=1.0, mscale_all_dim=0.0),
        says="mscale_all_dim=0.0, not 1.0",
    ),
    Fault(
        id="windows-in-the-other-layers",
        bug="layer_types is not read: every second layer has a window, counted from the wrong one",
        rules=("CFG-001",),
        cell=cell("gpt_oss", "tp1", backend="static"),
        wrap=always(window_attn_skip_freq=[0, 1]),
        says="window_attn_skip_freq=[0, 1], not [1, 0]",
    ),
    Fault(
        id="shared-gate-not-detected",
        bug="the gate of the shared experts has no setting in config.json, and is not looked for in the checkpoint",
        rules=("CFG-001",),
        cell=cell("qwen3_next", "tp1", backend="static"),
        wrap=always(moe_shared_expert_gate=False),
        says="moe_shared_expert_gate=False, not True",
    ),
    Fault(
        id="capacity-left-on",
        bug="Megatron-LM#1756 in kind: a capacity that recipes of pre-training set drops tokens, which no engine does",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(moe_expert_capacity_factor=1.0),
        says="moe_expert_capacity_factor=1.0, not None",
    ),
    Fault(
        id="rank-capacity-left-on",
        bug="Megatron-LM#1756 in kind: a budget of rows for each rank, beyond which HybridEP drops tokens",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(moe_expert_rank_capacity_factor=1.0),
        says="moe_expert_rank_capacity_factor=1.0, not None",
    ),
    Fault(
        id="window-that-is-off",
        bug="reported nowhere: sliding_window of config.json is read, and use_sliding_window=false beside it is not",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(window_size=[4095, 0]),  # no sequence of the kit is as long
        says="window_size=[4095, 0], not None",
    ),
    Fault(
        id="queries-clipped",
        bug="reported nowhere: qk_clip of a recipe of pre-training changes weights behind the optimizer's back",
        rules=("CFG-001",),
        cell=cell("deepseek_v3", "tp1", layers=3, backend="static"),
        wrap=always(qk_clip=True),
        says="qk_clip=True, not False",
    ),
    Fault(
        id="residual-after-the-norm",
        bug="reported nowhere: a flag of another architecture's recipe changes where every layer's residual is taken",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(apply_residual_connection_post_layernorm=True),
        says="apply_residual_connection_post_layernorm=True, not False",
    ),
    Fault(
        id="activation-not-clamped",
        bug="Megatron-LM#5940: gpt-oss's clamp and offset reach one of the paths of the experts, or none",
        rules=("CFG-001",),
        cell=cell("gpt_oss", "tp1", backend="static"),
        wrap=always(activation_func_clamp_value=None, glu_linear_offset=0.0),
        says="glu_linear_offset=0.0, not 1.0",
    ),
    Fault(
        id="activation-of-megatron",
        bug="Megatron-Bridge#4661 in kind: the activation is not the model's, here TransformerConfig's default of gelu",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(activation_func=torch.nn.functional.gelu),
        says="activation_func='gelu', not 'silu'",
    ),
    Fault(
        id="activation-by-hidden-act",
        bug="reported nowhere: gpt-oss's hidden_act says silu, and its experts compute a sigmoid of 1.702 x",
        rules=("CFG-001",),
        cell=cell("gpt_oss", "tp1", backend="static"),
        wrap=always(activation_func=torch.nn.functional.silu),
        says="activation_func='silu', not 'quick_gelu'",
    ),
    Fault(
        id="norms-not-centred-at-zero",
        bug="Megatron-LM#1958 in kind: whether a norm holds its weight less one is settled for one kind of norm alone",
        rules=("CFG-001",),
        cell=cell("qwen3_next", "tp1", backend="static"),
        wrap=always(layernorm_zero_centered_gamma=False, attention_output_gate=False),
        says="attention_output_gate=False, not True",
    ),
    Fault(
        id="experts-of-the-class-default",
        bug="Megatron-Bridge#5220: the first alias that a config class has is read, here its default number of experts",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(num_moe_experts=256),
        says="num_moe_experts",
    ),
    Fault(
        id="balanced-by-choosing",
        bug="reported nowhere: a kind of load balancing that is no loss, but sends tokens to other experts",
        rules=("CFG-001",),
        cell=ONE,
        wrap=_unless_asked(moe_router_load_balancing_type="sinkhorn"),
        says="moe_router_load_balancing_type='sinkhorn', by which tokens take other experts",
    ),
    Fault(
        id="balanced-by-choosing-and-a-loss",
        bug="reported nowhere: of two kinds of load balancing, as Megatron takes in a list, one chooses experts",
        rules=("CFG-001",),
        cell=ONE,
        wrap=_unless_asked(moe_router_load_balancing_type=["sinkhorn", "aux_loss"]),
        says="moe_router_load_balancing_type='sinkhorn', by which tokens take other experts",
    ),
    Fault(
        id="quantised-unasked",
        bug="reported nowhere: a recipe for large clusters trains in FP8, whoever asks for bf16 alone",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(fp8="hybrid"),
        says="fp8='hybrid', not None",
    ),
    Fault(
        id="positions-interpolated",
        bug="Megatron-Bridge#5097 in kind: a rope's linear factor, here one of another model, interpolates positions",
        rules=("CFG-001",),
        cell=ONE,
        wrap=always(seq_len_interpolation_factor=8.0),
        says="seq_len_interpolation_factor=8.0, not None",
    ),
    Fault(
        id="yarn-numbers-of-the-class",
        bug="Megatron-Bridge#5627 in kind: a family's own branch for YaRN has a factor of its own",
        rules=("CFG-001",),
        cell=cell("gpt_oss", "tp1", backend="static"),
        wrap=always(yarn_rotary_scaling_factor=32.0, yarn_correction_range_round_to_int=True),
        says="yarn_rotary_scaling_factor=32.0, not 8.0",
    ),
    Fault(
        id="yarn-attention-not-scaled",
        bug="Megatron-LM#1429 in kind: DeepSeek-V3's two mscales of 1 in a model that scales cos and sin by its factor",
        rules=("CFG-001",),
        cell=cell("gpt_oss", "tp1", backend="static"),
        wrap=always(yarn_mscale=1.0, yarn_mscale_all_dim=1.0),
        says="multiply cos and sin by 1, not 1.20794",
    ),
    Fault(
        id="rotary-factor-of-the-class",
        bug="Megatron-Bridge#2791: a plain rope of latent attention gets Megatron's default, YaRN by a factor of 40",
        rules=("CFG-001",),
        cell=cell("glm4_moe_lite", "tp1", layers=4, backend="static"),
        wrap=always(rope_type="yarn", rotary_scaling_factor=40.0),
        says="rotary_scaling_factor=40.0, not 1.0",
    ),
    Fault(
        id="router-in-bf16",
        bug="miles#3263: a list of what is passed on lacks the router's dtype, whose default is the parameters'",
        rules=("CFG-013",),
        cell=cell("glm4_moe", "tp1", backend="static", dtype="bfloat16"),
        wrap=_unless_asked(moe_router_dtype=None),
        says="moe_router_dtype=None; transformers' router computes its logits in fp32",
    ),
    Fault(
        id="replay-forced-on",
        bug="B15 miles#2226: replay is switched on after the MTP block is built, whatever was asked for",
        rules=("CFG-009",),
        cell=cell("glm4_moe", "ep2", mtp=1),
        wrap=_replay_forced_on,
        says="moe_enable_routing_replay=True, not False",
    ),
    Fault(
        id="unknown-settings-dropped",
        bug="NeMo-RL#3739: a setting that does not exist is taken silently",
        rules=("CFG-006",),
        cell=ONE,
        wrap=_requesting(_only_known),
        says="moe_router_topkk was taken",
    ),
    Fault(
        id="unknown-and-none-dropped",
        bug="reported nowhere: settings of None are skipped before anybody looks whether Megatron has them",
        rules=("CFG-006",),
        cell=ONE,
        wrap=_requesting(_none_before_known),
        says="layernorm_epsilom was taken",
    ),
    Fault(
        id="reference-by-truth",
        bug="verl#6247 in kind: overrides reach the reference model by a path of its own, here one with `if value`",
        rules=("CFG-008",),
        cell=ONE,
        wrap=_resolving(_reference_by_truth),
        says="for the policy and",
    ),
    Fault(
        id="reference-configured-apart",
        bug="SkyRL#1210: the reference model has settings of its own, and flags reach the policy alone",
        rules=("CFG-008",),
        cell=ONE,
        wrap=_resolving(_own_reference),
        says="for the policy and",
    ),
)
