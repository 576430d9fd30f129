"""SYN: what an engine serves after updates of its weights, by transformers' logprobs and routes on the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.sync import FIRST, LONG, LOWER, SECOND, TEMPERATURES, VERSIONS, WEIGHTS
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    distance,
    expected,
    finding,
    outcome,
    tolerance,
    unanswered,
    values,
    within,
)
from moeref_conformance.oracles import sync

#: fp32 on both sides, sums in other orders. Measured: below 2e-6 in four families.
CLOSE = 2e-5
#: How likely samples are: standard deviations from what the model draws. Chance gives more in one run of a million.
DEVIATIONS = 5.0
#: Seconds within which the death of an engine must be noticed.
SECONDS = 120


def off(folder: Path, sample: dict[str, Any]) -> float:
    """The greatest difference of a sample's logprobs to those of the weights in a folder."""
    want_G = sync.logprobs(folder, sample["prompt"], sample["tokens"])
    return float(distance(want_G, torch.tensor(sample["logprobs"])).max()) if len(want_G) else 0.0


def _phase(case: Case, phases: Iterable[str], when: str) -> Outcome:
    """Every token of these phases has the logprob that the phase's weights give it."""
    findings: list[Finding] = unanswered(case, "sync")
    worst = 0.0
    for rank, value in values(case, "sync"):
        for phase in phases:
            for sample in value["sampled"][phase]:
                named = WEIGHTS[phase.removesuffix(" known")]
                far = off(expected(case).dir / named, sample)
                worst = max(worst, far)
                if not far <= CLOSE:
                    message = (
                        f"{when}: logprobs are {far:.2g} off (limit {tolerance(case, CLOSE)}) {_whose(case, sample)}"
                    )
                    findings.append(finding(case, rank, "sync", message, got=far))
    return outcome(findings, within(case, worst, CLOSE))


def _whose(case: Case, sample: dict[str, Any]) -> str:
    """Which weights explain a sample."""
    named = {"checkpoint": "first", "second": "second", "third": "third"}
    explaining = [which for name, which in named.items() if off(expected(case).dir / name, sample) <= CLOSE]
    return f"the {explaining[0]} weights give them" if explaining else "none of the weights that were sent give them"


@judges("SYN-001")
def serves_what_it_was_opened_with(case: Case) -> Outcome:
    """Before any update, also from its cache of prefixes, of what it has sampled itself, and of many prompts."""
    return _phase(case, FIRST, "before any update")


@judges("SYN-002")
def new_weights_are_used(case: Case) -> Outcome:
    """A prompt that the engine has not seen, after an update, which leaves the trainer's tensors as they are."""
    used = _phase(case, ("second",), "after an update")
    written = [
        finding(case, rank, "sync", f"an update has written to {len(names)} of the trainer's tensors", hf_name=names[0])
        for rank, value in values(case, "sync")
        for names in filter(None, value["written"].values())
    ]
    return outcome([*used.findings, *written], used.met)


@judges("SYN-003")
def old_weights_are_gone(case: Case) -> Outcome:
    """Prompts that the engine has not seen, after an update back to the first weights, and one to others."""
    return _phase(case, ("back", "again"), "after a later update")


@judges("SYN-004")
def caches_are_not_stale(case: Case) -> Outcome:
    """A prompt that the engine has seen under earlier weights."""
    phases = ("second known", "back known", "again known")
    return _phase(case, phases, "after an update, for a prompt that was sampled before it")


@judges("SYN-005")
def versions_are_those_of_updates(case: Case) -> Iterable[Finding]:
    """0 at first, then that of every update, of the engine and of the tokens that it samples; also of a lower one."""
    yield from unanswered(case, "sync")
    for rank, value in values(case, "sync"):
        if not _are(value["versions"], wanted := list(VERSIONS.values())):
            message = f"versions {value['versions']} after opening and three updates"
            yield finding(case, rank, "sync", message, expected=wanted, got=value["versions"])
        for phase, samples in value["sampled"].items():
            want = VERSIONS.get(phase.removesuffix(" known"), 0)
            labels = {repr(label): label for sample in samples for label in sample["versions"]}
            if wrong := [label for text, label in sorted(labels.items()) if text != repr(want)]:
                message = f"{phase}: tokens of version {want} are labelled {wrong}"
                yield finding(case, rank, "sync", message, expected=want, got=wrong)
        if problem := _lost(case, value["lower"]):
            yield finding(case, rank, "sync", problem, got=value["lower"]["refused"])


def _lost(case: Case, lower: dict[str, Any]) -> str:
    """What is wrong after an update whose number is lower than the one before; empty if nothing is."""
    refused, sampled = lower["refused"], lower["sampled"]
    if isinstance(sampled, dict):  # an engine that refuses may be dead
        return "" if refused else f"after an update to a lower version nothing is served: {sampled['refused']}"
    folder = expected(case).dir / ("third" if refused else "second")
    after = f"after an update to a lower version, which {'was refused' if refused else 'raised nothing'}"
    if wrong := [sample for sample in sampled if not off(folder, sample) <= CLOSE]:
        return f"{after}, {_whose(case, wrong[0])}"
    want = VERSIONS["again"] if refused else LOWER
    labels = sorted({repr(label) for sample in sampled for label in sample["versions"]})
    return "" if labels == [repr(want)] else f"{after}, tokens of version {want} are labelled {', '.join(labels)}"


def _are(versions: list[Any], wanted: list[int]) -> bool:
    """Whether these versions are the wanted numbers; True and 1.0 are not the number 1."""
    return [repr(version) for version in versions] == [repr(version) for version in wanted]


@judges("SYN-006")
def tokens_have_the_version_that_made_them(case: Case) -> Iterable[Finding]:
    """Each token of a sample that meets an update, or precedes it, has the logprob of weights that its label names."""
    yield from unanswered(case, "sync_under_way")
    for rank, value in values(case, "sync_under_way"):
        for mode, seen in value.items():
            before = (("before the update ", _mislabelled(case, sample, (0,))) for sample in seen["before"])
            meanwhile = (("", _mislabelled(case, sample, (0, 1))) for sample in seen["meanwhile"])
            for when, problem in (*before, *meanwhile):
                if problem:
                    yield finding(case, rank, "sync_under_way", f"pause mode {mode}: {when}{problem}")
            if mode != "abort" and (fewest := min(len(one["tokens"]) for one in seen["meanwhile"])) < LONG:
                message = f"pause mode {mode}: a sample has {fewest} of {LONG} tokens, as if it were aborted"
                yield finding(case, rank, "sync_under_way", message, expected=LONG, got=fewest)
            if problem := _untrue_amid(case, seen["amid"]):
                yield finding(case, rank, "sync_under_way", f"pause mode {mode}: {problem}")
            for sample in seen["then"]:
                if not _are(sample["versions"], [1] * len(sample["tokens"])) or off(_folder(case, 1), sample) > CLOSE:
                    message = f"pause mode {mode}: after the update the engine does not serve version 1"
                    yield finding(case, rank, "sync_under_way", message, expected=1, got=sample["versions"])


def _untrue_amid(case: Case, asked: dict[str, Any]) -> str:
    """What is wrong with an update amid which a sample is asked for, and with what is sampled; empty if nothing is."""
    if asked["refused"]:
        return f"an update amid which a sample was asked for was refused: {asked['refused']}"
    if asked["sampled"] is None:
        return "a sample that was asked for amid an update never came"
    samples = [] if isinstance(asked["sampled"], dict) else asked["sampled"]  # it may be refused
    if problem := next(filter(None, (_mislabelled(case, sample, (1, 2)) for sample in samples)), ""):
        return f"of a sample that was asked for amid an update {problem}"
    if isinstance(asked["behind"], dict):
        return f"after an update amid which a sample was asked for there is none: {asked['behind']['refused']}"
    problem = next(filter(None, (_mislabelled(case, sample, (2,)) for sample in asked["behind"])), "")
    return problem and f"after an update amid which a sample was asked for {problem}"


def _mislabelled(case: Case, sample: dict[str, Any], versions: tuple[int, ...]) -> str:
    """What is wrong with the labels of a sample, of these versions; empty if nothing is."""
    labels, tokens = sample["versions"], sample["tokens"]
    if not labels or not {*map(repr, labels)} <= {*map(repr, versions)} or len(labels) != len(tokens):
        return f"{len(tokens)} tokens are labelled {labels}"
    rows_G = torch.tensor(labels) - versions[0]
    want_G = torch.stack([sync.logprobs(_folder(case, v), sample["prompt"], sample["tokens"]) for v in versions])
    far_G = distance(want_G.gather(0, rows_G[None])[0], torch.tensor(sample["logprobs"]))
    if bad := [number for number, far in enumerate(far_G.tolist()) if not far <= CLOSE]:
        label = sample["versions"][bad[0]]
        return f"token {bad[0]} is labelled version {label}, whose weights are {far_G.max():.2g} off its logprob"
    return ""


def _folder(case: Case, version: int) -> Path:
    """The weights that the kit sent as this version, where samples are under way."""
    return expected(case).dir / ("checkpoint", "second", "checkpoint")[version]


def _torn(case: Case, state: dict[str, Any], *allowed: tuple[int, str]) -> str:
    """Why what an engine serves, or labels it with, is nothing allowed; empty if it is, or it is dead and says why."""
    version, sampled = state["version"], state["sampled"]
    if isinstance(version, dict) and isinstance(sampled, dict):
        return "" if version["refused"].partition(": ")[2].strip() else "the engine is dead and says no reason"
    if isinstance(version, dict) or isinstance(sampled, dict):
        return f"the engine is half dead: version {version}, sampled {sampled}"
    served = [(number, expected(case).dir / weights) for number, weights in allowed if version == number]
    for number, _ in (one for one in served if all(off(one[1], sample) <= CLOSE for sample in sampled)):
        labels = {repr(label) for sample in sampled for label in sample["versions"]}
        right = labels == {repr(number)}
        return "" if right else f"the engine says version {version}, and labels tokens {', '.join(sorted(labels))}"
    whose = sorted({_whose(case, sample) for sample in sampled})
    return f"the engine says version {version}, and of its logprobs {' and '.join(whose)}"


#: The first weights as version 0, and the second as version 1.
OLD, WHOLE = (0, "checkpoint"), (1, "second")


@judges("SYN-007")
def two_updates_do_not_mix(case: Case) -> Iterable[Finding]:
    """One of the two is refused, or one comes after the other."""
    yield from unanswered(case, "sync_two")
    for rank, value in values(case, "sync_two"):
        one, other = value["refused"]
        allowed = [WHOLE] * (one is None) + [(2, "checkpoint")] * (other is None) + [OLD] * bool(one and other)
        if problem := _torn(case, value, *allowed):
            yield finding(case, rank, "sync_two", f"after two updates at once {problem}")


@judges("SYN-008")
def a_killed_engine_is_noticed(case: Case) -> Iterable[Finding]:
    """The update raises in time, the engine is dead or serves what it served, started anew, and no process is left."""
    yield from unanswered(case, "sync_killed")
    for rank, value in values(case, "sync_killed"):
        problems = {
            "the target names no process of its engine": not value["pids"],
            "the update of an engine that was killed raised nothing": value["refused"] is None,
            f"the update of an engine that was killed took {value['seconds']:.0f} s": value["seconds"] > SECONDS,
            f"processes {value['left']} are left of an engine that was killed": bool(value["left"]),
        }
        yield from (finding(case, rank, "sync_killed", problem) for problem, wrong in problems.items() if wrong)
        if problem := _torn(case, value, OLD):
            yield finding(case, rank, "sync_killed", f"after it was killed {problem}")


@judges("SYN-009")
def a_failed_update_changes_nothing(case: Case) -> Iterable[Finding]:
    """Or the engine is dead. A tensor that comes twice, is unknown or a draft's may be taken too, with the rest."""
    yield from unanswered(case, "sync_failed")
    for rank, value in values(case, "sync_failed"):
        for what, state in value.items():
            if "version" not in state:
                continue
            if state["refused"] is None and what not in ("twice", "unknown", "draft"):
                yield finding(case, rank, "sync_failed", f"an update {_with(what)} raised nothing")
            elif problem := _torn(case, state, OLD if state["refused"] and not what.endswith(SECOND) else WHOLE):
                yield finding(case, rank, "sync_failed", f"after an update {_with(what)} {problem}")
            elif problem := _of_other_weights(case, state.get("meanwhile")):
                yield finding(case, rank, "sync_failed", f"of an update {_with(what)} {problem}")


def _of_other_weights(case: Case, met: Any) -> str:
    """What is wrong with samples that a failed update has met; empty if nothing is, or they ended with a reason."""
    problems = filter(None, (_mislabelled(case, sample, (0,)) for sample in met or () if not isinstance(met, dict)))
    return next((f"a sample that it met is of other weights: {one}" for one in problems), "")


def _with(what: str) -> str:
    """What was wrong with an update, in words."""
    if what.startswith("broken off"):
        return f"that was {what}"
    return "without a tensor" if what == "none" else f"with a tensor {what}"


@judges("SYN-010")
def an_update_succeeds_after_a_failed_one(case: Case) -> Iterable[Finding]:
    """On the same engine if it is not dead, else on a new one."""
    yield from unanswered(case, "sync_failed")
    for rank, value in values(case, "sync_failed"):
        for what, again in ((what, state["again"]) for what, state in value.items() if "again" in state):
            if again["refused"]:
                message = f"after {what} a whole update was refused: {again['refused']}"
                yield finding(case, rank, "sync_failed", message)
                continue
            dead = isinstance(again["version"], dict)
            if problem := _torn(case, again, (again["asked"], "third")) or "the engine is dead" * dead:
                yield finding(case, rank, "sync_failed", f"after {what} and a whole update {problem}")


@judges("SYN-011")
def routes_are_those_of_the_weights(case: Case) -> Iterable[Finding]:
    """Of every row and MoE layer, whatever the order of the experts; also after an update amid samples."""
    for step in ("sync", "sync_under_way"):
        yield from unanswered(case, step)
    for rank, value in values(case, "sync"):
        for phase, samples in value["sampled"].items():
            folder = expected(case).dir / WEIGHTS[phase.removesuffix(" known")]
            for problem in filter(None, (_misrouted(folder, sample) for sample in samples)):
                yield finding(case, rank, "sync", f"{phase}: {problem}")
    for rank, value in values(case, "sync_under_way"):
        for mode, seen in value.items():
            for problem in filter(None, (_misrouted(_folder(case, 1), sample) for sample in seen["then"])):
                yield finding(case, rank, "sync_under_way", f"pause mode {mode}: after the update {problem}")
            with_routes = (sample for sample in seen["meanwhile"] if sample["routes"] is not None)
            for problem in filter(None, (_misrouted_amid(case, sample) for sample in with_routes)):
                yield finding(case, rank, "sync_under_way", f"pause mode {mode}: amid the update {problem}")


def _misrouted_amid(case: Case, sample: dict[str, Any]) -> str:
    """As `_misrouted`, of a sample that an update has met: a row is of the weights that sampled the next token."""
    labels = sample["versions"]
    if not {*map(repr, labels)} <= {"0", "1"}:
        return f"routes have tokens of versions {labels}"
    by_version = [sync.routes(_folder(case, version), sample["prompt"], sample["tokens"]) for version in (0, 1)]
    versions = [labels[0]] * (len(sample["prompt"]) - 1) + labels
    return _other_routes(sample, [by_version[version][row] for row, version in enumerate(versions)])


def _misrouted(folder: Path, sample: dict[str, Any]) -> str:
    """What is wrong with the routes of a sample of these weights; empty if nothing is."""
    return _other_routes(sample, sync.routes(folder, sample["prompt"], sample["tokens"]))


def _other_routes(sample: dict[str, Any], want: list[list[frozenset[int]]]) -> str:
    """What is wrong with the routes of a sample that has to have these; empty if nothing is."""
    if (routes := sample["routes"]) is None:
        return "no routes came, which the target claims"
    if [len(row) for row in routes] != [len(row) for row in want]:
        layers = sorted({len(row) for row in routes})
        return f"routes have {len(routes)} rows of {layers} layers, not {len(want)} of {len(want[0])}"
    wrong = [
        (token, layer)
        for token, row in enumerate(want)
        for layer, taken in enumerate(row)
        if sorted(routes[token][layer]) != sorted(taken)  # an expert that comes twice is none of the set's
    ]
    if not wrong:
        return ""
    token, layer = wrong[0]
    pairs = f"{sorted(routes[token][layer])}, not {sorted(want[token][layer])}"
    return f"{len(wrong)} routes are others, first that of token {token} in MoE layer {layer}: {pairs}"


@judges("SYN-012")
def samples_are_drawn_as_asked(case: Case) -> Iterable[Finding]:
    """Those of one prompt all differ, in one call or in two, and all together are as likely as what the model draws."""
    yield from unanswered(case, "sync")
    for rank, value in values(case, "sync"):
        # Of the first weights. Two of 6 tokens are the same by chance in one of 3e12, by the models' own probabilities.
        of_one = [tuple(one["tokens"]) for one in (value["sampled"]["first"][0], *value["sampled"]["cached"])]
        if (different := len({*of_one})) < len(of_one):
            message = f"{len(of_one)} samples of one prompt are only {different} different ones"
            yield finding(case, rank, "sync", message, expected=len(of_one), got=different)
        off, variance = 0.0, 0.0
        for phase, samples in value["sampled"].items():
            folder = expected(case).dir / WEIGHTS[phase.removesuffix(" known")]
            for sample in samples:
                mean_G, variance_G = sync.spread(folder, sample["prompt"], sample["tokens"])
                off += float(torch.tensor(sample["logprobs"]).sum() - mean_G.sum())
                variance += float(variance_G.sum())
        if not abs(sigmas := off / variance**0.5) <= DEVIATIONS:
            message = f"samples are {'more' if off > 0 else 'less'} likely than at temperature 1, of all tokens"
            yield finding(case, rank, "sync", f"{message}: by {abs(sigmas):.2g} standard deviations", got=sigmas)


@judges("SYN-013")
def temperatures_are_those_asked_for(case: Case) -> Iterable[Finding]:
    """Of tokens and of logprobs. At temperature 0 tokens are the likeliest, and logprobs are not compared."""
    yield from unanswered(case, "sync")
    for rank, value in values(case, "sync"):
        for name, samples in value["tempered"].items():
            problem = (
                _not_the_likeliest(case, samples) if name == "zero" else _tempered(case, samples, TEMPERATURES[name])
            )
            if problem:
                yield finding(case, rank, "sync", f"temperature {TEMPERATURES[name]:g}: {problem}")


def _not_the_likeliest(case: Case, samples: list[dict[str, Any]]) -> str:
    """What is wrong with the tokens of temperature 0; empty if nothing is."""
    short, number = 0, sum(len(sample["tokens"]) for sample in samples)
    for asked in ((_folder(case, 0), sample["prompt"], sample["tokens"]) for sample in samples):
        short += int((~(sync.greatest(*asked) - sync.logprobs(*asked) <= CLOSE)).sum())
    return f"{short} of {number} tokens are not the likeliest" if short else ""


def _tempered(case: Case, samples: list[dict[str, Any]], temperature: float) -> str:
    """What is wrong with logprobs, or with how likely tokens are, at a temperature; empty if nothing is."""
    processed = case.claims.engine_logprobs == "processed"
    far, off, variance = 0.0, 0.0, 0.0
    for sample in samples:
        asked = (_folder(case, 0), sample["prompt"], sample["tokens"])
        want_G = sync.logprobs(*asked, temperature if processed else 1.0)
        far = max(far, float(distance(want_G, torch.tensor(sample["logprobs"])).max()))
        mean_G, variance_G = sync.spread(*asked, temperature)
        off += float(sync.logprobs(*asked, temperature).sum() - mean_G.sum())
        variance += float(variance_G.sum())
    if not far <= (CLOSE / temperature if processed else CLOSE):
        whose = "logits divided by the temperature" if processed else "the model's logits"
        return f"logprobs are {far:.2g} off those of {whose}, which the target claims"
    sigmas = off / variance**0.5
    side = "more" if off > 0 else "less"
    return f"samples are {side} likely by {abs(sigmas):.2g} standard deviations" if abs(sigmas) > DEVIATIONS else ""
