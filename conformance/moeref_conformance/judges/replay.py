"""RPL: which experts received each token under replay, and the resulting logits and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.replay import PHASES, SHORTER
from moeref_conformance.contract.requests.sequences import shorter
from moeref_conformance.diagnosis.compare import same
from moeref_conformance.judges import Case, hidden_states, judges
from moeref_conformance.judges.common import (
    LAYOUT,
    ROUNDINGS,
    distance,
    expected,
    finding,
    in_any_order,
    missing_records,
    not_refused,
    once,
    outcome,
    records,
    tokens_of,
    tolerance,
    unmeasured,
    values,
    within,
    without_logits,
)
from moeref_conformance.judges.observed_routes import (
    Place,
    Seen,
    oracle,
    oracle_of,
    oracle_recorded,
    own_choice,
    replayed,
    rounding,
    route_set,
    seen_routes,
    without_route,
)
from moeref_conformance.judges.refusals import unfinished
from moeref_conformance.oracles.routed import SETS

TRANSFORMERS = 2e-5
#: Of the same forward twice; other experts are off by a tenth and more.
AGAIN = 1e-3
#: So many wrong tokens of a sample are needed to tell whose routes they have, and this share of them; a last token, and
#: one without a route, has others.
ENOUGH, NEARLY_ALL = 2, 0.8
#: Phases of R3 that are not replayed.
NATIVE = ("native-before", "native-between", "native-after")


def _against(case: Case, phase: str, want: Seen, *, only: set[Place] | None = None, whose: str) -> list[Finding]:
    """Findings where the tokens of `phase` went elsewhere than `want`, all of them or `only` those at these places."""
    went, unplaced = seen_routes(case, phase)
    findings = [*unplaced]
    for layer, places in sorted(want.items()):
        for place, experts in sorted(places.items()):
            if only is not None and place not in only:
                continue
            have = went.get(layer, {}).get(place, frozenset())
            if have != experts:
                message = f"{phase}: token {place[1]} of sample {place[0]} went to other experts of layer {layer} than"
                more = {"expected": sorted(experts), "got": sorted(have) if have else "no expert"}
                diagnosis = _diagnosis(case, phase, want, layer, place, have)
                findings.append(
                    finding(case, None, "replay", f"{message} {whose}", layer=layer, diagnosis=diagnosis, **more)
                )
    return findings


def _diagnosis(case: Case, phase: str, want: Seen, layer: int, place: Place, have: frozenset[int]) -> str:
    """What the experts that were chosen instead are the right ones of, if of anything."""
    if not have:
        return "reached no expert"
    right = want[layer][place]

    def fits(experts: frozenset[int] | None) -> bool:
        # Of a phase that runs a layer twice, one run may be right: then `have` is the right experts and others.
        return experts is not None and experts != right and have in (experts, experts | right)

    if case.cell.replay == "R3" and fits(oracle(case, "native").experts.get(layer, {}).get(place)):
        return "the router's own choice"
    if have == frozenset(range(len(right))):  # before routes of other tokens: some rows have these experts
        return "the first experts: a padding row"
    if case.cell.replay == "R3" and (cause := _of_another_set(case, phase, layer, place[0])):
        return cause
    if cause := _of_another(want, layer, place, fits):
        return cause
    if len(have) < len(right):
        return "fewer experts than top-k: an expert twice in the route"
    return ""


@once
def _wrong(case: Case, phase: str, layer: int, sample: int) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
    """By position the experts that R3's routers or routes have in this phase, and those of tokens that had others."""
    want = oracle(case, route_set(phase)).experts.get(layer, {})
    went = seen_routes(case, phase)[0].get(layer, {})
    both = {place[1]: (want[place], have) for place, have in went.items() if place[0] == sample and place in want}
    return {at: (right, have) for at, (right, have) in both.items() if right != have}


def _of_another_set(case: Case, phase: str, layer: int, sample: int) -> str:
    """The set, and the sample in it, whose routes the wrong tokens of a sample have, each at its own position.

    Where a layer runs twice, one run may be right.
    """
    wrong = _wrong(case, phase, layer, sample)
    for name in SETS if len(wrong) >= ENOUGH else ():
        experts = oracle(case, name).experts.get(layer, {})
        for other in range(len(expected(case).lengths)):
            routes = {at: experts.get((other, at), frozenset()) for at in wrong}
            alike = sum(have in (routes[at], routes[at] | right) for at, (right, have) in wrong.items())
            if not phase.endswith(f"-{name}") and alike >= NEARLY_ALL * len(wrong):
                whose = f", sample {other}" if other != sample else ""
                return f"the routes of set {name}{whose}: of another forward or turn"
    return ""


def _of_another(want: Seen, layer: int, place: Place, fits: Callable[[frozenset[int] | None], bool]) -> str:
    """The layer or the token whose route fits."""
    for other, places in want.items():
        if other != layer and fits(places.get(place)):
            return f"the route of layer {other} (layer {other - layer:+d})"
    for (sample, position), experts in want[layer].items():
        if fits(experts):
            away = f"({position - place[1]:+d})" if sample == place[0] else f"of sample {sample}"
            return f"the route of token {position} {away}"
    return ""


def _last(case: Case) -> set[Place]:
    """The last token of each sample."""
    return {(number, length - 1) for number, length in enumerate(expected(case).lengths)}


def _at(case: Case, places: set[Place]) -> torch.Tensor:
    """Whether each of the tokens [B, S] is at one of the places."""
    at_BS = torch.zeros_like(tokens_of(case))
    at_BS[tuple(zip(*places, strict=True))] = True
    return at_BS


def _in_bf16(case: Case) -> Outcome | None:
    if case.cell.dtype == "float32":
        return None
    return Outcome(untested=f"judged in fp32 only: {case.cell.dtype} turns the routers' own choice")


@judges("RPL-001")
def tokens_take_their_routes(case: Case) -> list[Finding]:
    """In every phase that is replayed; of R3 the given rows, of R2 all rows as recorded."""
    if findings := missing_records(case, "replay"):
        return findings
    if case.cell.replay == "R2":
        for phase, source in (("replay", "record"), ("recompute", "record"), ("step-changed", "record-changed")):
            findings += _against(case, phase, seen_routes(case, source)[0], whose="the recorded forward's")
        return [*(lost for source in ("record", "record-changed") for lost in _unseen(case, source)), *findings]
    for phase in PHASES["R3"]:
        if phase.startswith("native"):
            continue
        missing = without_route(case, phase[-1])
        want = _begun(case, oracle(case, phase[-1]).experts) if phase == SHORTER else oracle(case, phase[-1]).experts
        given = {layer: {p: e for p, e in places.items() if p not in missing} for layer, places in want.items()}
        findings += _against(case, phase, given, whose="its route says")
    return findings


def _unseen(case: Case, phase: str) -> Iterator[Finding]:
    """A finding for each layer in which some tokens of a phase reached no expert that the kit looks at."""
    went = seen_routes(case, phase)[0]
    for layer, places in sorted(oracle(case, "native").experts.items()):
        lost = sorted(places.keys() - went.get(layer, {}).keys())
        if lost:
            message = f"{phase}: {len(lost)} of {len(places)} tokens reached no expert of layer {layer}"
            yield finding(case, None, "replay", message, layer=layer)


@judges("RPL-002")
def other_forwards_are_native(case: Case) -> Outcome | list[Finding]:
    """Forwards before, between and after replays: R3 against transformers, R2 with negated routers.

    Of R3 in bf16 against transformers' routers, in fp32, on the hidden states that enter the target's.
    """
    narrow = case.cell.dtype != "float32"
    if narrow and (case.cell.replay != "R3" or case.cell.batch == "packed" or case.cell.precision):
        return _in_bf16(case) or []
    if findings := missing_records(case, "replay"):
        return findings
    if narrow:
        for phase in NATIVE:
            findings += _against(case, phase, own_choice(case, phase), whose="its router chooses in fp32")
        return findings
    native = oracle(case, "native").experts
    if case.cell.replay == "R3":
        for phase in NATIVE:
            findings += _against(case, phase, _first(case, native), whose="the router chooses")
            findings += _of_first(case, phase, oracle(case, "native").logits_BSV)
        return [*findings, *_after_refusals(case)]
    findings += _against(case, "record", native, whose="the router chooses")
    recorded = seen_routes(case, "record")[0]
    findings += _still(case, _first(case, recorded), "changed-native")
    findings += _of_first(case, "changed-native", oracle_recorded(case, "changed-native", True).logits_BSV)
    findings += _still(case, recorded, "record-changed")
    return findings


def _of_first(case: Case, phase: str, want_BSV: torch.Tensor) -> Iterator[Finding]:
    """Findings where logits of the first microbatch are off transformers' in a forward that is not replayed.

    Or are not there on a rank of the last stage.
    """
    if unmeasured(case):
        return
    rows, have = case.cell.rows, _logits(case, phase)
    yield from without_logits(case, "replay", have, f"logits of {phase}")
    for rank, got in have.items():
        yield from _of_rank(case, rank, phase, want_BSV[:rows], got, tokens_of(case)[:rows])


def _still(case: Case, recorded: Seen, phase: str) -> Iterator[Finding]:
    """A finding for each layer in which a microbatch takes its recorded experts, though routers are others."""
    turned = seen_routes(case, phase)[0]
    microbatches = topology.microbatches(case.cell, len(expected(case).tokens_BS))
    for layer, places in sorted(recorded.items()):
        for rows in microbatches:
            held = {place: experts for place, experts in places.items() if place[0] in rows}
            if held and all(turned.get(layer, {}).get(place) == experts for place, experts in held.items()):
                message = f"{phase}: layer {layer} still takes the recorded routes outside of replay"
                yield finding(case, None, "replay", message, layer=layer)
                break


def _after_refusals(case: Case) -> Iterator[Finding]:
    """A finding where a forward is another one once routes were refused, as when replay is left on by an error."""
    for rank, value in values(case, "refuse_routes"):
        off = (value or {}).get("off", 0.0)
        if not off <= AGAIN:
            message = f"after routes were refused, logits without replay are off by {off:.2g} of the largest"
            yield finding(case, rank, "refuse_routes", message)


@judges("RPL-003")
def rows_without_a_route_are_native(case: Case) -> Outcome | list[Finding]:
    """They take what transformers' router chooses while the other rows are replayed."""
    if no := _in_bf16(case):
        return no
    if findings := missing_records(case, "replay"):
        return findings
    return findings + _native(case, lambda which: without_route(case, which) - _last(case))


def _native(case: Case, places: Callable[[str], set[Place]]) -> list[Finding]:
    """Findings where tokens at these places of a set do not take the router's choice while others are replayed."""
    findings = []
    for phase in ("replay-a", "step-a", "recompute-b"):
        findings += _against(
            case, phase, oracle(case, phase[-1]).experts, only=places(phase[-1]), whose="the router chooses"
        )
    return findings


@judges("RPL-004")
def logits_under_routes_are_transformers(case: Case) -> Outcome | list[Finding]:
    """On every rank of the last stage: in fp32 each logit, in bf16 the Euclidean distance of all."""
    if no := unmeasured(case):
        return no
    if findings := missing_records(case, "replay"):
        return findings
    routed_BS = tokens_of(case) & ~_at(case, _last(case))
    if case.cell.dtype == "float32":
        return _far(case, oracle(case, "a").logits_BSV, routed_BS)
    # Tokens without a route may turn, which moves the later ones.
    want, limit = oracle_of(case, "replay-a").logits_BSV, ROUNDINGS * rounding(case, "a").logits
    return _far(case, want, routed_BS, limit, of_length=True)


def _far(
    case: Case, want: torch.Tensor, at_BS: torch.Tensor, limit: float = TRANSFORMERS, of_length: bool = False
) -> Outcome:
    """Whether logits at these tokens are transformers' under the same routes: each, or all `of_length` of them."""
    phase, worst, have = "replay-a", 0.0, _logits(case, "replay-a")
    findings = without_logits(case, "replay", have, f"logits of {phase}")
    for rank, got in have.items():
        if got.shape != want.shape:
            message = f"{phase}: logits are {list(got.shape)}, transformers' {list(want.shape)}"
            findings.append(finding(case, rank, "replay", message))
            continue
        apart = distance(want[at_BS], got[at_BS])
        far = float(apart.norm() / want[at_BS].norm()) if of_length else float(apart.max())
        worst = max(worst, far)
        if far > limit:
            apart_by = f"{far:.2g}{' of their length' if of_length else ''} > {tolerance(case, limit)}"
            message = f"{phase}: logits are off transformers' under the same routes by {apart_by}"
            diagnosis = "" if of_length else hidden_states.differ(case, "replay", f"{phase}.norms", far, "a")
            findings.append(finding(case, rank, "replay", message, diagnosis=diagnosis))
    return outcome(findings, met=within(case, worst, limit))


@judges("RPL-009")
def the_last_token_is_native(case: Case) -> Outcome | list[Finding]:
    """It takes what transformers' router chooses, and has its logits, while the other tokens are replayed."""
    if no := _in_bf16(case) or unmeasured(case):
        return no
    if findings := missing_records(case, "replay"):
        return findings
    far = _far(case, oracle(case, "a").logits_BSV, _at(case, _last(case)))
    return outcome([*_native(case, lambda which: _last(case)), *far.findings], met=far.met)


@judges("RPL-005")
def replayed_logits_are_the_recorded_ones(case: Case) -> Outcome:
    """Bit for bit on a CPU, on a GPU within a tolerance in fp32; on the same layout with the same weights."""
    limit = LAYOUT if in_any_order(case) else 0.0
    if limit and case.cell.dtype != "float32":
        return Outcome(untested="sums come in any order on a GPU, and no limit for them is measured below fp32")
    if limit and (no := unmeasured(case)):
        return no
    findings, worst = missing_records(case, "replay"), 0.0
    recorded, again = _logits(case, "record"), _logits(case, "replay")
    if not findings:
        findings += without_logits(case, "replay", recorded, "logits of the recorded forward")
        findings += without_logits(case, "replay", again, "logits of the replayed forward")
    for rank in recorded.keys() & again.keys():
        if recorded[rank].shape != again[rank].shape:
            shapes = f"{list(again[rank].shape)}, the recorded ones {list(recorded[rank].shape)}"
            findings.append(finding(case, rank, "replay", f"the logits replayed are {shapes}"))
        elif not same(recorded[rank], again[rank]):
            far = float(distance(recorded[rank], again[rank]).max())
            worst = max(worst, far)
            if not limit or far > limit:
                message = f"the logits replayed are off the recorded ones by {far:.2g}"
                findings.append(finding(case, rank, "replay", message))
    return outcome([*findings, *_recorded_far(case, recorded)], met=within(case, worst, limit))


def _recorded_far(case: Case, recorded: Mapping[int, torch.Tensor]) -> Iterator[Finding]:
    """Findings where logits of the forward that records are off transformers', in fp32."""
    if case.cell.dtype != "float32" or unmeasured(case):
        return
    want_BSV, tokens_BS = oracle(case, "native").logits_BSV, tokens_of(case)
    for rank, got in recorded.items():
        rows = topology.step_rows(case.cell, rank, len(tokens_BS))
        yield from _of_rank(case, rank, "record", want_BSV[rows], got, tokens_BS[rows])


def _of_rank(
    case: Case, rank: int, phase: str, want: torch.Tensor, got: torch.Tensor, at_BS: torch.Tensor
) -> Iterator[Finding]:
    """A finding where a rank's logits of a phase are off transformers' at these tokens, in fp32."""
    if got.shape != want.shape:
        message = f"{phase}: logits are {list(got.shape)}, transformers' {list(want.shape)}"
        yield finding(case, rank, "replay", message)
    elif (far := float(distance(want[at_BS], got[at_BS]).max())) > TRANSFORMERS:
        apart_by = f"{far:.2g} > {tolerance(case, TRANSFORMERS)}"
        yield finding(case, rank, "replay", f"{phase}: logits are off transformers' by {apart_by}")


@judges("RPL-006")
def gates_learn(case: Case) -> Iterator[Finding]:
    """Every router's weight has a gradient that is not zero."""
    phases = ("step-a", "recompute-b") if case.cell.replay == "R3" else ("recompute", "step-changed")
    yield from missing_records(case, "inventory", "replay")
    for record in records(case, "inventory", "replay"):
        have = replayed(case)[record.rank]
        held = [f"{item['chunk']}:{item['local']}" for item in record.value("inventory")]
        for phase, key in ((phase, key) for phase in phases for key in held if key.endswith("router.weight")):
            gradient = have.get(f"{phase}.gradients.{key}")
            if gradient is None or not bool(gradient.any()):
                yield finding(case, record.rank, "replay", f"{phase}: the gate {key} has no gradient")


@judges("RPL-007")
def malformed_routes_are_refused(case: Case) -> list[Finding]:
    """On every rank, so that no rank waits for another."""
    step = "refuse_routes"
    failed = unfinished(case, step) or missing_records(case, step)
    return failed or not_refused(case, step, "routes with {} were replayed")


def _logits(case: Case, phase: str) -> dict[int, torch.Tensor]:
    return {rank: t[f"{phase}.logits"] for rank, t in replayed(case).items() if f"{phase}.logits" in t}


def _begun(case: Case, want: Seen) -> Seen:
    """The beginning of the first microbatch, without the last token of it, which has no route there."""
    length = shorter(expected(case).tokens_BS.shape[1], case.cell)
    first = _first(case, want)
    return {layer: {p: e for p, e in places.items() if p[1] < length - 1} for layer, places in first.items()}


def _first(case: Case, want: Seen) -> Seen:
    """The first microbatch alone: forwards without replay are given no other."""
    rows = case.cell.rows
    return {layer: {p: e for p, e in places.items() if p[0] < rows} for layer, places in want.items()}
