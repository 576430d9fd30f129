"""CFG: the settings that Megatron is given, against the model, the layout, the requests, and the modules' configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from moeref_conformance.contract.api import Request
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.config import HONOURED, OF_THE_REFERENCE, SILENT, TWICE, UNKNOWN, same
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import expected, finding, unanswered, values
from moeref_conformance.judges.observed_routes import weights
from moeref_conformance.oracles import settings

STEP = "config"
#: Settings that decide no logits of a forward on its own routes, by how their names begin: a training step alone reads
#: them, or replay. Further the coefficients of losses.
_TRAINING = (
    "calculate_per_token_loss",
    "gradient_accumulation_fusion",
    "moe_enable_routing_replay",
    "moe_router_bias_update_rate",
    "moe_router_load_balancing_type",
    "mtp_loss_scaling_factor",
    "mtp_num_layers",
    "recompute_",
)
#: Requests that a target may refuse, by title: always, or given the settings of no request.
_REFUSABLE: dict[str, Callable[[Case, Mapping[str, Any]], bool]] = {
    # Dispatchers ask something of the other settings and of the machine, and DSP-004 lets them be refused too.
    **dict.fromkeys(("all-gather", "two dispatchers", "flex"), lambda case, nothing: True),
    # The Hugging Face config says something else.
    "another epsilon": lambda case, nothing: True,
    # A target's loss may be one by tokens.
    "means of microbatches": lambda case, nothing: True,
    # It takes NCCL_ALGO and kernels of its own.
    "deterministic": lambda case, nothing: True,
    "grouped experts": lambda case, nothing: "grouped" not in case.claims.experts,
    "replay": lambda case, nothing: case.claims.replay == {"off"},
    # They would have no effect.
    **dict.fromkeys(
        ("overlap", "no overlap"), lambda case, nothing: not nothing.get("moe_shared_expert_intermediate_size")
    ),
    "drop policy": lambda case, nothing: nothing.get("moe_expert_capacity_factor") is None,
}
#: Settings that a request may bring with it, by title, and their values: what DeepEP and HybridEP ask for. Both take
#: weights in fp32 alone, and Megatron-Bridge's apply_flex_dispatcher_backend ends the overlap of shared experts.
_NEEDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "flex": {"moe_router_dtype": ("fp32", "fp64"), "moe_shared_expert_overlap": (False,)}
}
#: How far the weight of a row is off that of logits in fp32, relative to it: 1e-6 by another order of sums, 1e-4 by
#: logits in bf16. One that is rounded to bf16 afterwards is off by half of its last digit.
_OF_FP32, _ROUNDED_LATE = 3e-5, 2**-8
#: Of the part of attention that has one group a rank, where TP ranks share them (megatron-core's Attention.__init__).
_GROUPS = "num_query_groups"
#: megatron-core's experts hold a copy of the config whose MLP width is their own.
_WIDTH, _WIDTHS = "ffn_hidden_size", ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


def _said(case: Case, rank: int, message: str, want: Any, have: Any) -> Finding:
    return finding(case, rank, STEP, message, expected=repr(want), got=repr(have))


def _differ(case: Case, rank: int, name: str, want: Any, have: Mapping[str, Any], where: str) -> Iterator[Finding]:
    if name not in have and settings.may_lack(name, want):
        return
    if name not in have:
        yield finding(case, rank, STEP, f"{where} says nothing of {name}", expected=repr(want), got="nothing")
    elif not settings.fits(name, want, have[name]):
        yield _said(case, rank, f"{where} has {name}={have[name]!r}, not {want!r}", want, have[name])


def _given(case: Case, wanted: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings where the config of a rank differs from the wanted settings."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        given, unread = settings.completed(value["given"]), settings.unread(value["given"])
        for name in [name for name in wanted if name not in unread]:
            yield from _differ(case, rank, name, wanted[name], given, "the config")


@judges("CFG-001")
def the_model_s(case: Case) -> Iterator[Finding]:
    """Against transformers' config object and the checkpoint."""
    yield from _given(case, settings.of_the_model(case.cell, expected(case)))
    optional = settings.where_given(expected(case))
    for rank, value in values(case, STEP):
        for name in sorted(optional.keys() & value["given"].keys() - settings.unread(value["given"])):
            yield from _differ(case, rank, name, optional[name], value["given"], "the config")
        yield from _choosing(case, rank, value["given"].get("moe_router_load_balancing_type"))
        yield from _yarn_factors(case, rank, value["given"])


def _choosing(case: Case, rank: int, have: Any) -> Iterator[Finding]:
    """Findings for kinds of load balancing by which the router chooses experts; Megatron takes one kind or a list."""
    for kind in [have] if isinstance(have, str) else have or ():
        if kind in settings.BALANCERS:
            message = f"the config has moe_router_load_balancing_type={kind!r}, by which tokens take other experts"
            yield _said(case, rank, message, "none", kind)


def _yarn_factors(case: Case, rank: int, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings for YaRN's mscale and mscale_all_dim, of which several pairs mean the same."""
    both = settings.yarn_factors(expected(case), given)
    if both and not math.isclose(*both, rel_tol=1e-6):
        message = f"the config's mscale and mscale_all_dim multiply cos and sin by {both[1]:.6g}, not {both[0]:.6g}"
        yield _said(case, rank, message, *both)


@judges("CFG-002")
def the_layout_s(case: Case) -> Iterator[Finding]:
    """Parallel sizes, and that there is a layout string where there is one: configs have it in forms of their own."""
    yield from _given(case, settings.of_the_layout(case.cell.layout))
    name, want = "pipeline_model_parallel_layout", case.cell.layout.pipeline_layout
    for rank, value in values(case, STEP):
        if want is not None and value["given"].get(name, want) is None:
            yield _said(case, rank, f"the config has {name}=None, not {want!r}", want, None)


@judges("CFG-003")
def what_is_asked_for_arrives(case: Case) -> Iterator[Finding]:
    """Every name of every request that has to be honoured."""
    return _arrived(case, {title: {**request.fields, **request.overrides} for title, request in HONOURED.items()})


@judges("CFG-004")
def what_is_not_asked_for_stays(case: Case) -> Iterator[Finding]:
    """Nothing but the names of a request changes, and what it needs."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        nothing, given = value["nothing"], value["given"]
        for title, request in {**HONOURED, **TWICE}.items():
            changed, needs = value["requests"][title].get("changed", {}), _NEEDS.get(title, {})
            for name in sorted(changed.keys() - {*request.fields, *request.overrides}):
                if changed[name] in needs.get(name, ()):
                    continue
                was, message = nothing.get(name, "nothing"), f"asked for {title}: {name} became {changed[name]!r}"
                yield _said(case, rank, message, was, changed[name])
        own = {"moe_token_dispatcher_type", "moe_enable_routing_replay"}  # which the cell asks for
        for name in sorted(nothing.keys() & given.keys() - own):
            if not same(nothing[name], given[name]):
                message = f"asked for nothing, {name} is {nothing[name]!r}; the model was given {given[name]!r}"
                yield _said(case, rank, message, given[name], nothing[name])


@judges("CFG-005")
def one_of_two_arrives(case: Case) -> Iterator[Finding]:
    """Requests that name a setting on both levels."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        for title, request in TWICE.items():
            answer = value["requests"][title]
            for name, want in () if "refused" in answer else request.overrides.items():
                have = {**value["nothing"], **answer["changed"]}.get(name, "nothing")
                if name in answer["gone"] or not (same(have, want) or same(have, request.fields[name])):
                    either = f"{request.fields[name]!r} or {want!r}"
                    yield _said(case, rank, f"asked for {title}: {name} is {have!r}, not {either}", either, have)


@judges("CFG-010")
def overrides_win(case: Case) -> Iterator[Finding]:
    """Requests that name a setting on both levels."""
    return _arrived(case, {title: request.overrides for title, request in TWICE.items()})


@judges("CFG-006")
def unknown_names_are_refused(case: Case) -> Iterator[Finding]:
    """By any error."""
    return _not_refused(case, UNKNOWN)


@judges("CFG-007")
def silent_losers_are_refused(case: Case) -> Iterator[Finding]:
    """By any error."""
    return _not_refused(case, SILENT)


@judges("CFG-012")
def refusals_name_a_setting(case: Case) -> Iterator[Finding]:
    """One of those that the request names."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        for title, request in {**UNKNOWN, **SILENT}.items():
            refusal = value["requests"][title].get("refused", "")
            if not any(name in refusal for name in (*request.fields, *request.overrides)):
                yield finding(case, rank, STEP, f"{title}: the refusal names nothing", got=refusal)


@judges("CFG-013")
def the_router_is_as_precise(case: Case) -> Iterator[Finding]:
    """Against the dtype of the products in transformers' own router, also by the weights that experts are given."""
    yield from unanswered(case, STEP)
    good = settings.router_dtype(case.cell, expected(case))
    if None not in good and case.cell.replay == "R3" and not case.cell.precision:
        yield from _weights_of_rounded_logits(case)
    for rank, value in values(case, STEP):
        have = value["given"].get("moe_router_dtype")
        if have not in good:
            message = f"the config has moe_router_dtype={have!r}; transformers' router computes its logits in fp32"
            yield _said(case, rank, message, good[0], have)


def _weights_of_rounded_logits(case: Case) -> Iterator[Finding]:
    """A finding for each rank and layer whose experts weigh rows as logits in fp32 do not have it.

    A weight that is rounded itself, to the parameters' dtype, is none of these. Nor are those of a layer that are all
    off by one factor, which counts after the experts: RPL-004 judges it.
    """
    reported = set[tuple[int, int]]()
    rows = [row for phase in ("native-before", "replay-a") for row in weights(case, phase)]
    factors = _factors(rows)
    for rank, layer, expert, weight, right in rows:
        want = factors[layer] * right
        off = abs(float(weight) - want) / max(want, 1e-6)
        rounded_late = bool(weight == weight.bfloat16()) and off <= _ROUNDED_LATE
        if not off <= _OF_FP32 and not rounded_late and (rank, layer) not in reported:
            reported.add((rank, layer))
            message = f"layer {layer} weighs a row of expert {expert} as logits in fp32 do not have it"
            yield finding(case, rank, "replay", message, layer=layer, expert=expert, expected=want, got=float(weight))


def _factors(rows: Iterable[tuple[int, int, int, torch.Tensor, float]]) -> dict[int, float]:
    """By layer, how many times the right weights experts are given, in the middle of all rows; 1 for 0 or infinity."""
    times: dict[int, list[float]] = {}
    for _, layer, _, weight, right in rows:
        times.setdefault(layer, []).append(float(weight) / right if right else 1.0)
    middles = {layer: median(of_layer) for layer, of_layer in times.items()}
    return {layer: middle if 0 < middle < math.inf else 1.0 for layer, middle in middles.items()}


@judges("CFG-008")
def the_reference_computes_the_same(case: Case) -> Iterator[Finding]:
    """With and without a request."""
    return _of_the_reference(case, lambda name: not _of_training(name))


@judges("CFG-011")
def the_reference_is_given_the_same(case: Case) -> Iterator[Finding]:
    """With and without a request."""
    return _of_the_reference(case, _of_training)


def _of_training(name: str) -> bool:
    """Whether a setting decides no logits: losses and gradients alone, or what replays routes."""
    return name.startswith(_TRAINING) or name.endswith("_loss_coeff")


def _of_the_reference(case: Case, judged: Callable[[str], bool]) -> Iterator[Finding]:
    """Findings where the reference model is given other settings than the policy, of those that are `judged`."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        for title in OF_THE_REFERENCE:
            mine, other = value["requests"][title], value["reference"][title]
            if "refused" in other:
                if "refused" not in mine:
                    yield finding(case, rank, STEP, f"asked for {title}: the reference refuses it: {other['refused']}")
                continue
            policy, reference = (_effective(value["nothing"], answer) for answer in (mine, other))
            for name in sorted(filter(judged, policy.keys() | reference.keys())):
                a, b = policy.get(name, "nothing"), reference.get(name, "nothing")
                if not same(a, b):
                    message = f"asked for {title}: {name} is {a!r} for the policy and {b!r} for the reference"
                    yield _said(case, rank, message, a, b)


def _effective(nothing: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an answer; those of no request if it is a refusal."""
    gone = answer.get("gone", ())
    return {name: value for name, value in {**nothing, **answer.get("changed", {})}.items() if name not in gone}


@judges("CFG-009")
def modules_hold_it(case: Case) -> Iterator[Finding]:
    """Every config object in the built modules, and what rotates queries and keys."""
    yield from unanswered(case, STEP)
    own: dict[str, Any] = {"moe_token_dispatcher_type": case.cell.dispatcher}
    if case.cell.replay == "off":  # hooks of one's own replay without Megatron's flag
        own["moe_enable_routing_replay"] = False
    for rank, value in values(case, STEP):
        given = settings.completed(value["given"])
        widths = [given.get(name) for name in _WIDTHS]
        for held in value["held"] or []:
            have, where = held["values"], f"module {held['module']}"
            wanted = {**own, **{name: given[name] for name in sorted(given.keys() & have.keys() - own.keys())}}
            for name, want in wanted.items():
                if name == _WIDTH and have[name] in widths:
                    continue
                if name == _GROUPS and where.endswith(".core_attention") and have[name] == case.cell.layout.tp:
                    continue
                yield from _differ(case, rank, name, want, have, where)
        if not value["held"]:
            yield finding(case, rank, STEP, "no module has a config that could be read")
        for held in value["frequencies"]:
            if _rounded(held["values"]):
                message = f"module {held['module']}: the frequencies of rotary positions are rounded to bf16"
                yield finding(case, rank, STEP, message, got=held["values"])


def _rounded(values: Sequence[float]) -> bool:
    """Whether bf16 holds all of `values`; powers of two, which it holds of any model, count for nothing."""
    kept = [math.frexp(value)[0] * 2**8 for value in values]
    return all(one.is_integer() for one in kept) and any(one != 2**7 for one in kept)


def _arrived(case: Case, wanted: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings where a request, by title, does not lead to the wanted settings."""
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        for title, named in wanted.items():
            answer = value["requests"][title]
            if "refused" in answer:
                if not (_may_refuse(case, title, value["nothing"]) and _told_of(answer["refused"], named)):
                    yield finding(case, rank, STEP, f"asked for {title}: refused: {answer['refused']}")
                continue
            effective = {**value["nothing"], **answer["changed"]}
            for name, want in named.items():
                have = "nothing" if name in answer["gone"] else effective.get(name, "nothing")
                if not same(have, want) and not (have == "nothing" and settings.may_lack(name, want)):
                    yield _said(case, rank, f"asked for {title}: {name} is {have!r}, not {want!r}", want, have)


def _may_refuse(case: Case, title: str, nothing: Mapping[str, Any]) -> bool:
    return title in _REFUSABLE and _REFUSABLE[title](case, nothing)


def _told_of(refusal: str, named: Mapping[str, Any]) -> bool:
    """Whether a refusal has the name of a setting of the request, or a value that is a name, as megatron-core's do."""
    words = (*named, *(value for value in named.values() if isinstance(value, str)))
    return any(word in refusal.lower() for word in words)


def _not_refused(case: Case, requests: Mapping[str, Request]) -> Iterator[Finding]:
    yield from unanswered(case, STEP)
    for rank, value in values(case, STEP):
        for title, request in requests.items():
            refusal = value["requests"][title].get("refused")
            names = [*request.fields, *request.overrides]
            if refusal is None:
                yield finding(case, rank, STEP, f"{title}: {' with '.join(names)} was taken")
