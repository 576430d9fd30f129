"""RPL: which experts received each token under replay, and the resulting logits and gradients."""

from __future__ import annotations

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.replay import PHASES
from moeref_conformance.diagnosis.compare import same
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    observed,
    outcome,
    tolerance,
    unmeasured,
    within,
    without,
)
from moeref_conformance.judges.observed_routes import Place, Seen, replayed, seen_routes
from moeref_conformance.oracles import routed
from moeref_conformance.oracles.routed import given_routes

TRANSFORMERS = 2e-5


def _against(case: Case, phase: str, want: Seen, *, only_missing: bool = False, whose: str) -> list[Finding]:
    """Findings where the tokens of `phase` went elsewhere than `want`."""
    went, findings = seen_routes(case, phase)
    missing = _without_route(case) if only_missing else None
    for layer, places in sorted(want.items()):
        for place, experts in sorted(places.items()):
            if missing is not None and place not in missing:
                continue
            have = went.get(layer, {}).get(place, frozenset())
            if have != experts:
                findings.append(_elsewhere(case, phase, layer, place, want, have, whose))
    return findings


def _elsewhere(
    case: Case, phase: str, layer: int, place: Place, want: Seen, have: frozenset[int], whose: str
) -> Finding:
    experts = want[layer][place]
    message = f"{phase}: token {place[1]} of sample {place[0]} went to other experts of layer {layer} than {whose}"
    return finding(
        case,
        None,
        "replay",
        message,
        layer=layer,
        expected=str(sorted(experts)),
        got=str(sorted(have)) if have else "no expert",
        diagnosis=_diagnosis(case, want, layer, place, have),
    )


def _diagnosis(case: Case, want: Seen, layer: int, place: Place, have: frozenset[int]) -> str:
    """What the experts that were chosen instead are the right ones of, if of anything."""
    if not have:
        return "reached no expert"
    right = want[layer][place]

    def fits(experts: frozenset[int] | None) -> bool:
        # Of a phase that runs a layer twice, one run may be right: then `have` is the right experts and others.
        return experts is not None and experts != right and have in (experts, experts | right)

    for other, places in want.items():
        if other != layer and fits(places.get(place)):
            return f"the route of layer {other} (layer {other - layer:+d})"
    for (sample, position), experts in want[layer].items():
        if fits(experts):
            same_sample = sample == place[0]
            return f"the route of token {position}" + ("" if same_sample else f" of sample {sample}")
    if len(have) < len(right):
        return "fewer experts than top-k: an expert twice in the route"
    if have == frozenset(range(len(have))):
        return "the first experts: a padding row"
    if case.cell.replay == "R3" and fits(_oracle(case, "native").experts.get(layer, {}).get(place)):
        return "the router's own choice"
    return ""


def _without_route(case: Case) -> set[Place]:
    """Places that the given routes leave to the router."""
    places = set()
    for number, sample in enumerate(given_routes(expected(case), 0)):
        length = expected(case).tokens_BS.shape[1]
        places |= {(number, s) for s in range(length) if s >= len(sample) or sample[s].min() < 0}
    return places


def _oracle(case: Case, which: str) -> routed.Routed:
    return routed.under(expected(case), which)


def _in_bf16(case: Case) -> Outcome | None:
    if case.cell.dtype == "float32":
        return None
    return Outcome(untested=f"judged in fp32 only: {case.cell.dtype} turns the routers' own choice")


@judges("RPL-001")
def tokens_take_their_routes(case: Case) -> Outcome:
    """In every phase that is replayed; of R3 the given rows, of R2 all rows as recorded."""
    findings = without(case, "replay")
    if findings:
        return outcome(findings)
    if case.cell.replay == "R2":
        for phase in ("replay", "recompute"):
            findings += _against(case, phase, seen_routes(case, "record")[0], whose="the recorded forward's")
        changed = seen_routes(case, "record-changed")[0]
        return outcome(findings + _against(case, "step-changed", changed, whose="the recorded forward's"))
    missing = _without_route(case)
    for phase in PHASES["R3"]:
        if phase.startswith("native"):
            continue
        want = _oracle(case, phase[-1]).experts
        given = {layer: {p: e for p, e in places.items() if p not in missing} for layer, places in want.items()}
        findings += _against(case, phase, given, whose="its route says")
    return outcome(findings)


@judges("RPL-002")
def other_forwards_are_native(case: Case) -> Outcome:
    """Forwards before, between and after replays: R3 against transformers, R2 with negated routers."""
    if (no := _in_bf16(case)) is not None:
        return no
    findings = without(case, "replay")
    if findings:
        return outcome(findings)
    if case.cell.replay == "R3":
        for phase in ("native-between", "native-after"):
            findings += _against(case, phase, _first(_oracle(case, "native").experts), whose="the router chooses")
        return outcome(findings)
    recorded, turned = seen_routes(case, "record")[0], seen_routes(case, "changed-native")[0]
    findings += _against(case, "record", _oracle(case, "native").experts, whose="the router chooses")
    for layer, places in sorted(_first(recorded).items()):
        if places and all(turned.get(layer, {}).get(place) == experts for place, experts in places.items()):
            message = f"changed-native: layer {layer} still takes the recorded routes outside of replay"
            findings.append(finding(case, None, "replay", message, layer=layer))
    return outcome(findings)


@judges("RPL-003")
def rows_without_a_route_are_native(case: Case) -> Outcome:
    """They take what transformers' router chooses while the other rows are replayed."""
    if (no := _in_bf16(case)) is not None:
        return no
    findings = without(case, "replay")
    for phase in ("replay-a", "step-a", "recompute-b") if not findings else ():
        want = _oracle(case, phase[-1]).experts
        findings += _against(case, phase, want, only_missing=True, whose="the router chooses")
    return outcome(findings)


@judges("RPL-004")
def logits_under_routes_are_transformers(case: Case) -> Outcome:
    """In fp32, on every rank of the last stage."""
    if (no := _in_bf16(case) or unmeasured(case)) is not None:
        return no
    if findings := without(case, "replay"):
        return outcome(findings)
    phase, want, worst = "replay-a", _oracle(case, "a").logits_BSV, 0.0
    for rank, got in _logits(case, phase).items():
        if got.shape != want.shape:
            message = f"{phase}: logits are {list(got.shape)}, transformers' {list(want.shape)}"
            findings.append(finding(case, rank, "replay", message))
            continue
        apart = (got.double() - want.double()).abs()
        far = float(torch.where(apart.isnan(), torch.inf, apart).max())
        worst = max(worst, far)
        if far > TRANSFORMERS:
            apart_by = f"{far:.2g} > {tolerance(case, TRANSFORMERS)}"
            message = f"{phase}: logits are off transformers' under the same routes by {apart_by}"
            findings.append(finding(case, rank, "replay", message))
    return outcome(findings, met=within(case, worst, TRANSFORMERS))


@judges("RPL-005")
def replayed_logits_are_the_recorded_ones(case: Case) -> Outcome:
    """Bit for bit, on the same layout with the same weights."""
    findings = without(case, "replay")
    if not findings:
        recorded, again = _logits(case, "record"), _logits(case, "replay")
        if not recorded or recorded.keys() != again.keys():
            message = f"logits of the recorded forward on ranks {sorted(recorded)}, of the replayed on {sorted(again)}"
            findings.append(finding(case, None, "replay", message))
        for rank in recorded.keys() & again.keys():
            if not same(recorded[rank], again[rank]):
                far = float((recorded[rank].double() - again[rank].double()).abs().max())
                message = f"the logits replayed are off the recorded ones by {far:.2g}"
                findings.append(finding(case, rank, "replay", message))
    return outcome(findings)


@judges("RPL-006")
def gates_learn(case: Case) -> Outcome:
    """Every router's weight has a gradient that is not zero."""
    findings = without(case, "replay")
    for rank, tensors in replayed(case).items() if not findings else ():
        for phase in ("step-a", "recompute-b") if case.cell.replay == "R3" else ("recompute", "step-changed"):
            prefix = f"{phase}.gradients."
            gates = {k: t for k, t in tensors.items() if k.startswith(prefix) and "router.weight" in k}
            findings += [
                finding(case, rank, "replay", f"{phase}: the gate {key.removeprefix(prefix)} has no gradient")
                for key, gradient in gates.items()
                if not bool(gradient.any())
            ]
    return outcome(findings)


@judges("RPL-007")
def malformed_routes_are_refused(case: Case) -> Outcome:
    """On every rank, so that no rank waits for another."""
    findings = without(case, "replay")
    for record in observed(case).ranks if not findings else ():
        for what, answer in record.value("replay")["refused"].items():
            if answer is None:
                findings.append(finding(case, record.rank, "replay", f"routes with {what} were replayed"))
    return outcome(findings)


def _logits(case: Case, phase: str) -> dict[int, torch.Tensor]:
    return {rank: t[f"{phase}.logits"] for rank, t in replayed(case).items() if f"{phase}.logits" in t}


def _first(want: Seen) -> Seen:
    """The first sample alone: forwards without replay are given no other."""
    return {layer: {p: e for p, e in places.items() if p[0] == 0} for layer, places in want.items()}
