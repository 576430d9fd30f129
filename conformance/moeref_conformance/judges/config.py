"""CFG: the settings that Megatron is given, against the model, the layout, the requests, and the modules' configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeref_conformance.contract.api import Request
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.config import HONOURED, OF_THE_REFERENCE, SILENT, TWICE, UNKNOWN, same
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import expected, finding, observed, outcome, unanswered
from moeref_conformance.oracles import settings

STEP = "config"
#: megatron-core's experts hold a copy of the config whose MLP width is their own.
_WIDTH, _WIDTHS = "ffn_hidden_size", ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")


def _records(case: Case) -> Iterator[tuple[int, dict[str, Any]]]:
    for record in observed(case).ranks:
        if record.has(STEP):
            yield record.rank, record.value(STEP)


def _differ(case: Case, rank: int, name: str, want: Any, have: Mapping[str, Any], where: str) -> list[Finding]:
    if name not in have:
        return [finding(case, rank, STEP, f"{where} says nothing of {name}", expected=repr(want), got="nothing")]
    if settings.fits(name, want, have[name]):
        return []
    message = f"{where} has {name}={have[name]!r}, not {want!r}"
    return [finding(case, rank, STEP, message, expected=repr(want), got=repr(have[name]))]


@judges("CFG-001")
def the_model_s(case: Case) -> Outcome:
    """Against transformers' config object and the checkpoint."""
    findings = unanswered(case, STEP)
    wanted = settings.of_the_model(case.cell, expected(case))
    for rank, value in _records(case):
        for name, want in wanted.items():
            findings += _differ(case, rank, name, want, value["given"], "the config")
    return outcome(findings)


@judges("CFG-002")
def the_layout_s(case: Case) -> Outcome:
    """Parallel sizes."""
    findings = unanswered(case, STEP)
    wanted = settings.of_the_layout(case.cell.layout)
    for rank, value in _records(case):
        for name, want in wanted.items():
            findings += _differ(case, rank, name, want, value["given"], "the config")
    return outcome(findings)


@judges("CFG-003")
def what_is_asked_for_arrives(case: Case) -> Outcome:
    """Every name of every request that has to be honoured."""
    findings = unanswered(case, STEP)
    for rank, value in _records(case):
        for title, request in HONOURED.items():
            findings += _arrived(case, rank, title, {**request.fields, **request.overrides}, value)
    return outcome(findings)


@judges("CFG-004")
def what_is_not_asked_for_stays(case: Case) -> Outcome:
    """Nothing but the names of a request changes."""
    findings = unanswered(case, STEP)
    for rank, value in _records(case):
        for title, request in {**HONOURED, **TWICE}.items():
            answer = value["requests"][title]
            asked = {*request.fields, *request.overrides}
            for name in sorted(answer.get("changed", {}).keys() - asked):
                message = f"asked for {title}: {name} became {answer['changed'][name]!r}"
                was = repr(value["nothing"].get(name, "nothing"))
                findings.append(finding(case, rank, STEP, message, expected=was, got=repr(answer["changed"][name])))
        nothing, given = value["nothing"], value["given"]
        own = {"moe_token_dispatcher_type", "moe_enable_routing_replay"}  # which the cell asks for
        for name in sorted(nothing.keys() & given.keys() - own):
            if not same(nothing[name], given[name]):
                message = f"asked for nothing, {name} is {nothing[name]!r}; the model was given {given[name]!r}"
                findings.append(finding(case, rank, STEP, message, expected=repr(given[name]), got=repr(nothing[name])))
    return outcome(findings)


@judges("CFG-005")
def overrides_win(case: Case) -> Outcome:
    """Requests that name a setting on both levels."""
    findings = unanswered(case, STEP)
    for rank, value in _records(case):
        for title, request in TWICE.items():
            findings += _arrived(case, rank, title, request.overrides, value)
    return outcome(findings)


@judges("CFG-006")
def unknown_names_are_refused(case: Case) -> Outcome:
    """By an error that names them."""
    return outcome([*unanswered(case, STEP), *_not_refused(case, UNKNOWN)])


@judges("CFG-007")
def silent_losers_are_refused(case: Case) -> Outcome:
    """By an error that names one of the two."""
    return outcome([*unanswered(case, STEP), *_not_refused(case, SILENT)])


@judges("CFG-008")
def the_reference_is_given_the_same(case: Case) -> Outcome:
    """With and without a request."""
    findings = unanswered(case, STEP)
    for rank, value in _records(case):
        for title in ("nothing", OF_THE_REFERENCE):
            mine, other = value["requests"][title], value["reference"][title]
            if "refused" in other:
                message = f"asked for {title}: the reference refuses it: {other['refused']}"
                findings.append(finding(case, rank, STEP, message))
                continue
            policy = {**value["nothing"], **mine.get("changed", {})}
            reference = {**value["nothing"], **other["changed"]}
            for name in sorted(policy.keys() | reference.keys()):
                a, b = policy.get(name, "nothing"), reference.get(name, "nothing")
                if not same(a, b) or name in other["gone"]:
                    message = f"asked for {title}: {name} is {a!r} for the policy and {b!r} for the reference"
                    findings.append(finding(case, rank, STEP, message, expected=repr(a), got=repr(b)))
    return outcome(findings)


@judges("CFG-009")
def modules_hold_it(case: Case) -> Outcome:
    """Every config object in the built modules."""
    findings = unanswered(case, STEP)
    own = {
        "moe_token_dispatcher_type": case.cell.dispatcher,
        "moe_enable_routing_replay": case.cell.replay != "off",
    }
    for rank, value in _records(case):
        for held in value["held"] or []:
            for name, want in own.items():
                findings += _differ(case, rank, name, want, held["values"], f"module {held['module']}")
            widths = [value["given"].get(name) for name in _WIDTHS]
            for name in sorted(value["given"].keys() & held["values"].keys() - own.keys()):
                if name == _WIDTH and held["values"][name] in widths:
                    continue
                findings += _differ(case, rank, name, value["given"][name], held["values"], f"module {held['module']}")
        if not value["held"]:
            findings.append(finding(case, rank, STEP, "no module has a config that could be read"))
    return outcome(findings)


def _arrived(case: Case, rank: int, title: str, wanted: Mapping[str, Any], value: dict[str, Any]) -> list[Finding]:
    answer = value["requests"][title]
    if "refused" in answer:
        return [finding(case, rank, STEP, f"asked for {title}: refused: {answer['refused']}")]
    effective = {**value["nothing"], **answer["changed"]}
    findings = []
    for name, want in wanted.items():
        have = effective.get(name, "nothing")
        if name in answer["gone"] or name not in effective or not same(have, want):
            message = f"asked for {title}: {name} is {have!r}, not {want!r}"
            findings.append(finding(case, rank, STEP, message, expected=repr(want), got=repr(have)))
    return findings


def _not_refused(case: Case, requests: Mapping[str, Request]) -> list[Finding]:
    findings = []
    for rank, value in _records(case):
        for title, request in requests.items():
            refusal = value["requests"][title].get("refused")
            names = [*request.fields, *request.overrides]
            if refusal is None:
                findings.append(finding(case, rank, STEP, f"{title}: {' with '.join(names)} was taken"))
            elif not any(name in refusal for name in names):
                findings.append(finding(case, rank, STEP, f"{title}: the refusal names nothing", got=refusal))
    return findings
