"""DSP: padding counted out, dispatchers as asked for, and rows that went to their experts and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Padding, PadRequest
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.dispatch import CHOICES, requests
from moeref_conformance.contract.requests.exchange import EXCHANGES, GRADIENTS, Exchange, given
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, observed, outcome, unanswered
from moeref_conformance.oracles import dispatch
from moeref_conformance.oracles.dispatch import Looped, looped, row_bytes

#: Both sides work in float64; sums may be taken in another order.
RTOL, ATOL = 1e-12, 1e-13
FIELDS = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")


def _title(request: PadRequest) -> str:
    return f"{request.precision}, {request.dispatcher}"


def _paddings(case: Case) -> Iterator[tuple[int, PadRequest, dict[str, Any]]]:
    """Rank, request and answer, of all ranks."""
    for record in observed(case).ranks:
        if record.has("padding"):
            for request, answer in zip(requests(case.cell.layout), record.value("padding"), strict=True):
                yield record.rank, request, answer


def _answered(case: Case) -> Iterator[tuple[int, PadRequest, Padding]]:
    """Those that were answered for every rank of the request."""
    for rank, request, answer in _paddings(case):
        if "refused" not in answer and _fits(request, answer):
            samples = tuple(tuple(lengths) for lengths in answer["samples"])
            yield rank, request, Padding(samples=samples, totals=tuple(answer["totals"]))


def _fits(request: PadRequest, answer: dict[str, Any]) -> bool:
    return len(answer["samples"]) == len(answer["totals"]) == len(request.lengths)


@judges("DSP-001")
def padding_keeps_what_it_is_for(case: Case) -> Outcome:
    """Split each padded sequence as CP and TP split it."""
    findings = unanswered(case, "padding")
    for rank, request, answer in _paddings(case):
        if "refused" in answer:
            message = f"{_title(request)}: samples of {list(request.lengths)} refused: {answer['refused']}"
            findings.append(finding(case, rank, "padding", message))
        elif not _fits(request, answer):
            message = f"{_title(request)}: {len(request.lengths)} ranks asked, {len(answer['totals'])} answered"
            findings.append(finding(case, rank, "padding", message))
    for rank, request, padding in _answered(case):
        for of in range(len(request.lengths)):
            for message in dispatch.broken(case.cell.layout, request, of, padding):
                findings.append(finding(case, rank, "padding", f"{_title(request)}: {message}"))
    return outcome(findings)


@judges("DSP-002")
def padding_is_the_least(case: Case) -> Outcome:
    """Against the least padding found by counting up."""
    findings = unanswered(case, "padding")
    for rank, request, padding in _answered(case):
        want = dispatch.least(case.cell.layout, request)
        for lengths, have, best in zip(request.lengths, padding.samples, want.samples, strict=True):
            for length, sample, least in zip(lengths, have, best, strict=False):
                if sample > least:
                    message = f"{_title(request)}: a sample of {length} became {sample}, where {least} would do"
                    findings.append(finding(case, rank, "padding", message, expected=str(least), got=str(sample)))
        for lengths, total, least in zip(request.lengths, padding.totals, want.totals, strict=True):
            if total > least:
                message = f"{_title(request)}: samples of {list(lengths)} became {total}, where {least} would do"
                findings.append(finding(case, rank, "padding", message, expected=str(least), got=str(total)))
    return outcome(findings)


@judges("DSP-003")
def equal_pieces(case: Case) -> Outcome:
    """For dispatchers that exchange equal pieces only."""
    findings = unanswered(case, "padding")
    split = case.cell.layout.tp * case.cell.layout.cp
    for rank, request, padding in _answered(case):
        if request.dispatcher not in dispatch.EQUAL:
            continue
        if len(set(padding.totals)) > 1:
            message = f"{_title(request)}: ranks of one group were padded to {list(padding.totals)}, not to one length"
            findings.append(finding(case, rank, "padding", message))
        piece = dispatch.EQUAL[request.dispatcher] * split
        uneven = sorted({total for total in padding.totals if total % piece})
        if uneven:
            message = f"{_title(request)}: {uneven} rows over {split} ranks are no multiple of {piece // split} each"
            findings.append(finding(case, rank, "padding", message))
    return outcome(findings)


@judges("DSP-004")
def kept_or_refused(case: Case) -> Outcome:
    """Both fields, as asked for."""
    findings = unanswered(case, "dispatchers")
    for record in observed(case).ranks:
        answers = record.value("dispatchers") if record.has("dispatchers") else {}
        for title, answer in answers.items():
            request = CHOICES[title]
            if "refused" in answer:
                if request.dispatcher == "alltoall":
                    message = f"{title}: refused, and it always works: {answer['refused']}"
                    findings.append(finding(case, record.rank, "dispatchers", message))
                continue
            dispatcher, _, backend = request.dispatcher.partition("-")
            have = [answer["given"].get(name, "nothing") for name in FIELDS]
            # Without flex nothing reads the backend; megatron-core's default for it is deepep.
            if have[0] != dispatcher or have[1] not in ([backend] if backend else [None, "deepep"]):
                message = f"{title}: {FIELDS[0]} is {have[0]!r} with {FIELDS[1]} {have[1]!r}"
                findings.append(finding(case, record.rank, "dispatchers", message, expected=request.dispatcher))
    return outcome(findings)


@judges("DSP-005")
def what_cannot_work_is_refused(case: Case) -> Outcome:
    """By an error that names the dispatcher."""
    findings = unanswered(case, "dispatchers")
    for record in observed(case).ranks:
        answers = record.value("dispatchers") if record.has("dispatchers") else {}
        for title, answer in answers.items():
            why, name = dispatch.cannot_work(case.cell.layout, CHOICES[title]), CHOICES[title].dispatcher
            if why and "refused" not in answer:
                findings.append(finding(case, record.rank, "dispatchers", f"{title}: taken, but {why}"))
            elif why and name.rpartition("-")[2] not in answer["refused"]:
                message = f"{title}: the refusal does not name {name}"
                findings.append(finding(case, record.rank, "dispatchers", message, got=answer["refused"]))
    return outcome(findings)


def _exchanges(case: Case) -> Iterator[tuple[RankRecord, Exchange, Looped, dict[str, torch.Tensor]]]:
    """Every exchange of every rank: what the loop gives, and what was seen."""
    for record in observed(case).ranks:
        if record.has("exchange"):
            seen = record.tensors("exchange")
            for number, exchange in enumerate(EXCHANGES):
                prefix = f"{exchange.name}."
                mine = {k.removeprefix(prefix): t for k, t in seen.items() if k.startswith(prefix)}
                yield record, exchange, looped(case.cell.layout, case.cell.dispatcher, number, record.rank), mine


def _padding(case: Case, exchange: Exchange, rank: int) -> torch.Tensor:
    return given(exchange, case.cell.layout, case.cell.dispatcher, rank).rows.padding_T


@judges("DSP-006")
def rows_come_back_as_the_loop_has_them(case: Case) -> Outcome:
    """What every expert received, and what every row got."""
    findings = unanswered(case, "exchange")
    for record, exchange, want, have in _exchanges(case):
        padding = {row for rows in want.padding.values() for row in rows}
        for expert, rows in want.received.items():
            got = Counter(row_bytes(row) for row in have.get(f"received.{expert}", ()))
            real = Counter({row: count for row, count in got.items() if row not in padding})
            if real != Counter(rows):
                what = f"{real.total()} rows, not {sum(rows.values())}"
                if real.total() == sum(rows.values()):
                    what = "other rows than those routed to it"
                message = f"{exchange.name}: expert {expert} received {what}"
                findings.append(finding(case, record.rank, "exchange", message, expert=expert))
        keep = ~_padding(case, exchange, record.rank)
        if problem := _apart(have["y"], want.y_TH, keep):
            findings.append(finding(case, record.rank, "exchange", f"{exchange.name}: rows come back {problem}"))
    return outcome(findings, met=f"rtol {RTOL:g}")


@judges("DSP-007")
def gradients_are_the_loop_s(case: Case) -> Outcome:
    """Of rows, weights and experts."""
    findings = unanswered(case, "exchange")
    titles = dict(zip(GRADIENTS, ("rows", "weights", "experts' first weight", "experts' second weight"), strict=True))
    for record, exchange, want, have in _exchanges(case):
        for name in GRADIENTS:
            if problem := _apart(have[name], want.gradients[name]):
                message = f"{exchange.name}: the gradient of the {titles[name]} is {problem}"
                findings.append(finding(case, record.rank, "exchange", message))
    return outcome(findings, met=f"rtol {RTOL:g}")


@judges("DSP-008")
def padding_rows_count_for_nothing(case: Case) -> Outcome:
    """Which experts received them, what came back for them, and the counts."""
    findings = unanswered(case, "exchange")
    for record, exchange, want, have in _exchanges(case):
        padding_T = _padding(case, exchange, record.rank)
        if have["y"].shape == want.y_TH.shape and bool(have["y"][padding_T].any()):
            message = f"{exchange.name}: a padding row does not weigh zero"
            findings.append(finding(case, record.rank, "exchange", message))
        if have["counts"].tolist() != want.counts_E.tolist():
            message = f"{exchange.name}: rows that count for each expert are {have['counts'].tolist()}"
            more = {"expected": str(want.counts_E.tolist()), "got": str(have["counts"].tolist())}
            findings.append(finding(case, record.rank, "exchange", message, **more))
    receivers = _receivers(case)
    for record, exchange, want, _ in _exchanges(case):
        group = _group(case, record.rank)[0]
        chosen = [receivers.get((exchange.name, group, row), []) for row in want.padding[record.rank]]
        findings += _spread(case, record.rank, exchange, chosen)
    return outcome(findings)


def _receivers(case: Case) -> dict[tuple[str, int, bytes], list[int]]:
    """(exchange, first rank of the group, row) -> experts that received the row."""
    receivers: dict[tuple[str, int, bytes], list[int]] = {}
    for record, exchange, want, have in _exchanges(case):
        # All ranks of an ETP group receive the same rows; its first speaks for all.
        if topology.coords(case.cell.layout, record.rank)["etp"] == 0:
            group = _group(case, record.rank)[0]
            for expert in want.received:
                for row in have.get(f"received.{expert}", ()):
                    receivers.setdefault((exchange.name, group, row_bytes(row)), []).append(expert)
    return receivers


def _spread(case: Case, rank: int, exchange: Exchange, chosen: list[list[int]]) -> list[Finding]:
    """Findings where padding rows went to too few experts, or too many of them to one. `chosen`: experts by row."""
    findings = []
    for experts in chosen:
        if not len(experts) == len(set(experts)) == exchange.topk:
            message = f"{exchange.name}: a padding row went to experts {experts}, not {exchange.topk} distinct ones"
            findings.append(finding(case, rank, "exchange", message))
    loads = Counter(expert for experts in chosen for expert in experts)
    most = math.ceil(len(chosen) * exchange.topk / (exchange.experts * case.cell.layout.ep))
    if loads and max(loads.values()) > most:
        expert, load = loads.most_common(1)[0]
        message = f"{exchange.name}: {load} of {len(chosen)} padding rows went to expert {expert}, not {most}"
        findings.append(finding(case, rank, "exchange", message, expert=expert))
    return findings


@judges("DSP-009")
def malformed_routes_are_refused(case: Case) -> Outcome:
    """On every rank, so that no rank waits for another."""
    findings = unanswered(case, "exchange")
    for record in observed(case).ranks:
        refused = record.value("exchange")["refused"] if record.has("exchange") else {}
        findings += [
            finding(case, record.rank, "exchange", f"a row with {what} was dispatched")
            for what, answer in refused.items()
            if answer is None
        ]
    return outcome(findings)


def _group(case: Case, rank: int) -> list[int]:
    return next(group for group in topology.groups(case.cell.layout)["etp_ep"] if rank in group)


def _apart(have: torch.Tensor, want: torch.Tensor, rows: torch.Tensor | None = None) -> str:
    """How two tensors differ, in the `rows` alone if given; empty if they do not."""
    if have.shape != want.shape:
        return f"as {list(have.shape)}, not {list(want.shape)}"
    have, want = (have.double(), want) if rows is None else (have.double()[rows], want[rows])
    if torch.allclose(have, want, rtol=RTOL, atol=ATOL):
        return ""
    return f"off a loop over rows by {float((have - want).abs().max()):.2g}"
