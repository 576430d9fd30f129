"""GRD: gradients of training steps against transformers' autograd, cut into shards by brute force.

RPL-008 judges steps under given or recorded routes, which transformers takes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome, kind_of
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.gradients import FIRST
from moeref_conformance.contract.requests.logprobs import ROUTES
from moeref_conformance.contract.requests.policy import REPLAYED, UNROUTED, loss, missing_rows, unrouted
from moeref_conformance.judges import Case, gradient_causes, judges, loss_terms
from moeref_conformance.judges.common import (
    NATIVE,
    ROUNDINGS,
    TRAINING_STEPS,
    changed_answers,
    distance,
    expected,
    finding,
    gradients_of,
    missing_records,
    once,
    outcome,
    parameters,
    records,
    tolerance,
    unmeasured,
    values,
    within,
)
from moeref_conformance.judges.observed_routes import (
    balanced,
    native_gradients,
    oracle,
    oracle_of,
    oracle_recorded,
    rounding,
    with_mtp,
)
from moeref_conformance.oracles import policy
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown
from moeref_conformance.oracles.routed import apart
from moeref_conformance.oracles.shares import is_trained

LIMIT = 1e-4
#: In bf16, of one parameter: how many times as far from fp32 it may be as transformers' own tensors of its kind.
#: Measured: gpt-oss up to 2.0 (in its first layer under TP2), Qwen3 1.2, DeepSeek-V3 1.4.
OF_A_KIND = 3.0
#: What an error names that refuses a step which trains on no token, one of these at least.
OF_NO_TOKEN = ("mask", "token", "label", "sample", "batch", "loss")


@judges("GRD-001")
def gradients_are_transformers(case: Case) -> Outcome:
    """In fp32, relative to the largest gradient of the Hugging Face tensors that a parameter is made of."""
    if case.cell.dtype != "float32":
        return Outcome(untested=NATIVE.format(case.cell.dtype, "RPL-008"))
    if no := _no_loss(case) or unmeasured(case):
        return no
    want = native_gradients(case, case.cell.router_loss)
    compared = _compared(case, "gradients", {"gradients": want}, _against)
    return outcome([*compared.findings, *changed_answers(case, "gradients")], met=compared.met)


@judges("GRD-003")
def a_step_on_no_token_trains_nothing(case: Case) -> Iterator[Finding]:
    """Routers have losses of their own, whose gradients are finite."""
    return _on_no_token(case, "on_no_token")


def _on_no_token(case: Case, step: str) -> Iterator[Finding]:
    """What is wrong with the answers to a step whose mask leaves no token."""
    yield from missing_records(case, step)
    answers = dict(values(case, step))
    refused = [rank for rank, got in answers.items() if "refused" in got]
    for rank, got in answers.items():
        if "refused" in got and len(refused) < len(answers):
            yield finding(case, rank, step, f"refused a step that other ranks took: {got['refused']}")
        for key, largest in got.get("largest", {}).items():
            if not (case.cell.router_loss and isfinite(largest)):
                message = f"the gradient of {key.partition(':')[2]} is {largest:.3g} in a step that trains on no token"
                yield finding(case, rank, step, message, local_name=key.partition(":")[2])


@judges("GRD-006")
def a_step_on_no_token_is_refused_in_words(case: Case) -> Iterator[Finding]:
    """In words that tell its reader what to change."""
    yield from missing_records(case, "on_no_token")
    for rank, got in values(case, "on_no_token"):
        if "refused" in got and not any(word in got["refused"].lower() for word in OF_NO_TOKEN):
            message = f"an error in a step that trains on no token does not say so: {got['refused']}"
            yield finding(case, rank, "on_no_token", message, expected=f"an error with one of {', '.join(OF_NO_TOKEN)}")


@judges("GRD-004")
def gradients_of_a_policy_are_transformers(case: Case) -> Outcome:
    """In fp32, relative to the largest gradient of the Hugging Face tensors that a parameter is made of.

    Of a step that trains on no token as GRD-003.
    """
    if no := _no_policy(case) or unmeasured(case):
        return no
    return _policys(case, unrouted(case.cell), "", missing_records(case, UNROUTED[1]))


@judges("GRD-005")
def gradients_of_a_policy_under_routes_are_transformers(case: Case) -> Outcome:
    """As GRD-004, where transformers takes the routes too. Tokens without one take transformers' own choice.

    Logits after a step are those of the routers' own choice.
    """
    if no := _no_policy(case) or unmeasured(case):
        return no
    return _policys(case, REPLAYED, ROUTES)


@judges("GRD-007")
def gradients_of_a_policy_in_bf16_are_near_transformers(case: Case) -> Outcome:
    """As GRD-005, under routes without missing rows, and measured as RPL-008 measures bf16."""
    if no := _no_policy(case) or unmeasured(case):
        return no
    if findings := missing_records(case, "inventory", *REPLAYED):
        return outcome(findings)
    wants = {step: _of_policy(case, step, ROUTES) for step in REPLAYED}
    rounded = {step: _of_policy(case, step, ROUTES, torch.bfloat16) for step in REPLAYED}
    near = _in_bf16(case, {step: {step: want} for step, want in wants.items()}, [(wants[s], rounded[s]) for s in wants])
    changed = (one for step in REPLAYED for one in changed_answers(case, step))
    return outcome([*near.findings, *changed, *_on_no_token(case, "policy_on_no_token")], met=near.met)


def _policys(case: Case, steps: Sequence[str], routes: str, missing: Sequence[Finding] = ()) -> Outcome:
    """Gradients of these steps under these routes or the routers' own, answers after them, and a step on no token."""
    compared = {step: _compared(case, step, {step: _of_policy(case, step, routes)}, _against) for step in steps}
    findings = [*missing, *(one for of_step in compared.values() for one in of_step.findings)]
    findings += [one for step in steps for one in changed_answers(case, step)]
    met = "; ".join(f"{step}: {of_step.met}" if len(steps) > 1 else of_step.met for step, of_step in compared.items())
    return outcome([*findings, *_on_no_token(case, "policy_on_no_token")], met=met)


def _no_policy(case: Case) -> Outcome | None:
    """Untested, where a policy's loss is not asked for."""
    if case.cell.mtp and not case.claims.mtp_in_policy:
        return Outcome(
            untested="not claimed of models with multi-token prediction layers, which have a loss of their own"
        )
    return _no_loss(case)


@once
def _of_policy(case: Case, step: str, routes: str, dtype: torch.dtype = torch.float32) -> Mapping[str, torch.Tensor]:
    """The gradients of a step's loss and the cell's router loss, under a set of routes or the routers' own.

    transformers computes them in `dtype`.
    """
    asked = loss(step, case.cell)
    if case.cell.mtp:
        return with_mtp(case, routes or "native", policy=asked).gradients
    balancing = balanced(case, case.cell.router_loss)
    missing = missing_rows(case.cell, case.claims.missing_rows)
    return policy.gradients(expected(case), routes, missing, balancing, asked, dtype)


@judges("RPL-008")
def replayed_gradients_are_transformers(case: Case) -> Outcome:
    """In fp32 by parameter as GRD-001; in bf16 by Euclidean distances, of each gradient and of all of a rank.

    Of R2 the recomputed step and the one after it, in fp32: of each the routes were recorded with other routers.
    """
    if no := _no_loss(case) or _not_recorded(case) or unmeasured(case):
        return no
    if findings := missing_records(case, "inventory", "replay"):
        return outcome(findings)
    if case.cell.replay == "R2":
        recomputed, later = oracle_recorded(case, "record", True), oracle_recorded(case, "record-changed", False)
        steps = {"recompute": recomputed.gradients, "step-changed": later.gradients}
        return _compared(case, "replay", steps, _against)
    phases = {phase: _wanted(case, phase) for phase in ("step-a", "recompute-b")}
    if case.cell.dtype == "float32":
        return _compared(case, "replay", phases, _against)
    both = [(one.exact, one.rounded) for one in (rounding(case, which) for which in "ab")]
    return _in_bf16(case, {"replay": phases}, both)


Roundings = Mapping[int | str, float]


def _in_bf16(case: Case, steps: Mapping[str, Mapping[str, Have]], both: Sequence[tuple[Have, Have]]) -> Outcome:
    """All gradients of a rank, and each, in these phases of steps; `both` has transformers' in fp32 and in bf16."""
    roundings = _roundings(case, both)
    compare: list[Compare] = [
        partial(_together, roundings),
        partial(_against, measure=partial(_by_length, roundings)),
    ]
    found = [[_compared(case, step, phases, by) for by in compare] for step, phases in steps.items()]
    met = "; ".join(f"{whole.met}; each tensor {each.met}" for whole, each in found)
    return outcome([one for of_step in found for compared in of_step for one in compared.findings], met=met)


def _roundings(case: Case, both: Sequence[tuple[Have, Have]]) -> Roundings:
    """How far transformers in bf16 is from itself in fp32: all gradients of a rank, and at most those of a kind.

    Of what a rank holds: rounding adds up towards the first layers, and tells more in a part of a small tensor.
    """
    far = dict[int | str, float]()
    for exact_and_rounded in both:
        placed = [Placement(case.cell, expected(case).config, gradients) for gradients in exact_and_rounded]
        for record in records(case, "inventory"):
            pairs = [(want, got) for _, (want, got) in parameters(record, *placed)]
            tensors = [(got.tensor, want.tensor) for want, got in pairs]
            held: list[tuple[int | str, float]] = [(record.rank, apart(tensors))]
            held += [(_kind(want.hf), apart([pair])) for (want, _), pair in zip(pairs, tensors, strict=True)]
            for key, one in held:
                far[key] = max(one, far.get(key, 0.0))
    return far


def _kind(sources: tuple[str, ...]) -> str:
    return kind_of(_sources(sources)[0])


def _sources(hf: tuple[str, ...]) -> tuple[str, ...]:
    """A tied head's replica names no tensor that an export reads; it is made of the embedding."""
    return hf or ("model.embed_tokens.weight",)


def _no_loss(case: Case) -> Outcome | None:
    """Untested, where the loss of multi-token prediction layers, or its rounding, is not known."""
    if case.cell.mtp and case.cell.router_loss:
        return Outcome(untested="whether routers of multi-token prediction layers have a loss is open")
    cut = case.cell.layout.cp > 1 and case.cell.batch == "packed"
    if case.cell.mtp and cut and case.claims.mtp_mean != "step":
        return Outcome(untested="which tokens of packed samples a CP rank takes the mean over depends on their padding")
    if case.cell.mtp and case.cell.dtype != "float32":
        return Outcome(untested="with multi-token prediction layers judged in fp32 only")
    return None


def _not_recorded(case: Case) -> Outcome | None:
    """Untested, where transformers does not compute under the routes that a target recorded."""
    if case.cell.replay == "R2" and (case.cell.mtp or case.cell.dtype != "float32"):
        return Outcome(untested="of R2 judged in fp32, without multi-token prediction layers")
    return None


def _wanted(case: Case, phase: str) -> Mapping[str, torch.Tensor]:
    """The gradients of a step under the routes of a phase."""
    if case.cell.mtp:
        return with_mtp(case, phase[-1]).gradients
    return oracle_of(case, phase).gradients


Have = Mapping[str, torch.Tensor]


class Far(NamedTuple):
    """How far a gradient is off, how far it may be, and of what these are parts."""

    far: float
    limit: float
    of: str = ""

    @property
    def share(self) -> float:
        """Of the limit; more than 1 is wrong."""
        return 0.0 if self.far == 0.0 else self.far / self.limit if self.limit else torch.inf


Compare = Callable[[Case, Placement, RankRecord, Have, str], tuple[list[Finding], Far]]


def _compared(case: Case, step: str, phases: Mapping[str, Have], compare: Compare) -> Outcome:
    """The gradients of all ranks in these phases of a step against transformers'."""
    findings, worst = missing_records(case, "inventory", step), Far(0.0, LIMIT)
    for phase, want in phases.items():
        placed = Placement(case.cell, expected(case).config, want)
        off = list[Finding]()
        for record in records(case, "inventory", step):
            more, far = compare(case, placed, record, gradients_of(record, phase), phase)
            off += more
            worst = max(worst, far, key=lambda one: one.share)
        findings += gradient_causes.nearest_the_loss(off)
    return outcome(findings, met=within(case, worst.far, worst.limit))


def _missing(case: Case, placed: Placement, record: RankRecord, have: Have, phase: str) -> list[Finding]:
    """Parameters without a gradient, of those that gradients reach."""
    return [
        finding(case, record.rank, phase, f"no gradient of {item['local']}", local_name=item["local"])
        for item in record.value("inventory")
        if item["kind"] == "parameter"
        and f"{item['chunk']}:{item['local']}" not in have
        and not _is_unreached(placed, record.rank, item)
    ]


def _is_unreached(placed: Placement, rank: int, item: Mapping[str, Any]) -> bool:
    try:
        held = placed.shard(rank, item["chunk"], item["local"], item["shape"])
    except Unknown:
        return False
    return not all(map(is_trained, held.hf))


Pair = tuple[str, ExpectedShard, torch.Tensor, torch.Tensor]


def _pairs(
    case: Case, placed: Placement, record: RankRecord, have: Have, phase: str
) -> tuple[list[Finding], list[Pair]]:
    """`chunk:local`, shard, wanted and given gradient without padded rows; and findings for those without a pair."""
    findings, pairs = _missing(case, placed, record, have, phase), list[Pair]()
    buffers = {f"{item['chunk']}:{item['local']}" for item in record.value("inventory") if item["kind"] == "buffer"}
    for key, got in sorted(have.items()):
        chunk, _, local = key.partition(":")
        if case.cell.bias_update and key in buffers:  # GRD-002's
            continue
        try:
            held = placed.shard(record.rank, int(chunk), local, list(got.shape))
        except Unknown as error:
            findings.append(finding(case, record.rank, phase, str(error), local_name=local))
            continue
        if got.shape == held.tensor.shape:
            pairs.append((key, held, held.tensor[: held.rows].double(), got[: held.rows].double()))
        else:
            message = f"{phase}: the gradient of {local} is {list(got.shape)}, what it is of {list(held.tensor.shape)}"
            findings.append(finding(case, record.rank, phase, message, hf_name=_sources(held.hf)[0], local_name=local))
    return findings, pairs


def _by_largest(placed: Placement, sources: tuple[str, ...], want: torch.Tensor, got: torch.Tensor) -> Far:
    """The largest distance, relative to the largest gradient of the tensors that a parameter is made of."""
    far, largest = float(distance(want, got).max()) if got.numel() else 0.0, max(map(placed.largest, sources))
    return Far(0.0 if far == 0.0 else far / largest if largest else torch.inf, LIMIT, "its largest")


def _by_length(
    roundings: Roundings, placed: Placement, sources: tuple[str, ...], want: torch.Tensor, got: torch.Tensor
) -> Far:
    """The Euclidean distance, relative to the length of what is wanted."""
    return Far(apart([(got, want)]), OF_A_KIND * roundings[_kind(sources)], "its length")


def _against(
    case: Case,
    placed: Placement,
    record: RankRecord,
    have: Have,
    phase: str,
    measure: Callable[[Placement, tuple[str, ...], torch.Tensor, torch.Tensor], Far] = _by_largest,
) -> tuple[list[Finding], Far]:
    """Findings of one rank, and of what is right the gradient that is nearest to its limit."""
    worst = Far(0.0, LIMIT)
    findings, pairs = _pairs(case, placed, record, have, phase)
    for key, held, want, got in pairs:
        sources = _sources(held.hf)
        far = measure(placed, sources, want, got)
        if far.share <= 1.0:
            worst = max(worst, far, key=lambda one: one.share)
            continue
        local = key.partition(":")[2]
        step = "" if phase == "gradients" else f"{phase}: "
        message = f"{step}the gradient of {local} is off transformers' by {_off(case, far)}"
        diagnosis = _cause(case, record, key, phase, want, got)
        if not diagnosis and held.hf == (loss_terms.HEAD,) and case.cell.dtype == "float32":
            rows = loss_terms.rows_of(case, record.rank, key, have[key].shape)
            diagnosis = loss_terms.counted(case, rows, want, got, **_loss_of(case, phase))
        findings.append(
            finding(case, record.rank, phase, message, hf_name=sources[0], local_name=local, diagnosis=diagnosis)
        )
    return findings, worst


def _cause(case: Case, record: RankRecord, key: str, phase: str, want: torch.Tensor, got: torch.Tensor) -> str:
    """What makes the wrong gradient of a rank; empty if no known mistake does."""
    chunk, _, local = key.partition(":")

    def of_rank(placed: Placement) -> torch.Tensor:
        held = placed.shard(record.rank, int(chunk), local, list(got.shape))
        return held.tensor[: len(want)].double()

    wrong = gradient_causes.Wrong(
        want=want,
        got=got,
        earlier=record.tensors(phase).get(f"{FIRST}{key}") if phase == "gradients" else None,
        router_loss=case.cell.router_loss,
        without_router_loss=(lambda: of_rank(_without_router_loss(case, phase))) if case.cell.router_loss else None,
        routers_choice=(lambda: of_rank(_by_routers_choice(case, phase))) if phase in REPLAYED else None,
        of_groups=_of_groups(case, record.rank, key, phase, len(want)),
    )
    return gradient_causes.cause(wrong)


@once
def _without_router_loss(case: Case, phase: str) -> Placement:
    """The gradients of the same step without the loss of the routers."""
    of_policy = partial(policy.gradients, asked=loss(phase, case.cell))
    plain = of_policy(expected(case)) if phase in UNROUTED else oracle(case, "native").gradients
    return Placement(case.cell, expected(case).config, plain)


@once
def _by_routers_choice(case: Case, phase: str) -> Placement:
    """The gradients of a policy's step where no routes are given."""
    return Placement(case.cell, expected(case).config, _of_policy(case, phase, ""))


def _of_groups(case: Case, rank: int, key: str, phase: str, rows: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Each axis of which all ranks of a rank's group have this gradient in one shape, and the `rows` of each."""
    step = phase if phase in TRAINING_STEPS else "replay"
    have = {r.rank: g for r in records(case, step) if (g := gradients_of(r, phase).get(key)) is not None}
    for axis in topology.AXES:
        group = topology.group(case.cell.layout, axis, rank)
        parts = [have[r][:rows].double() for r in group if r in have and have[r].shape == have[rank].shape]
        if len(parts) == len(group) > 1:
            yield axis, parts


def _loss_of(case: Case, phase: str) -> dict[str, Any]:
    """The policy's loss that a phase is of, if it is of one, and the set of routes that it is under."""
    under = dict.fromkeys(REPLAYED, ROUTES) | {step: step[-1] for step in ("step-a", "recompute-b")}
    asked = loss(phase, case.cell) if phase in (*UNROUTED, *REPLAYED) else None
    return {"policy": asked, "routes": under.get(phase, "")}


def _off(case: Case, far: Far) -> str:
    return f"{far.far:.2g} of {far.of} > {tolerance(case, far.limit)}"


def _together(
    roundings: Roundings, case: Case, placed: Placement, record: RankRecord, have: Have, phase: str
) -> tuple[list[Finding], Far]:
    """Compare all gradients of one rank as one vector, relative to its length. Returns findings and the distance."""
    findings, pairs = _pairs(case, placed, record, have, phase)
    far = Far(apart([(got, want) for _, _, want, got in pairs]), ROUNDINGS * roundings[record.rank], "their length")
    if not far.share <= 1.0:
        message = f"{phase}: the gradients are off transformers' by {_off(case, far)}"
        findings.append(finding(case, record.rank, phase, message))
    return findings, far
