"""DSP: padding counted out, dispatchers as asked for, and rows that went to their experts and back."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Padding, PadRequest
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.dispatch import CHOICES, requests
from moeref_conformance.contract.requests.exchange import EXCHANGES, GRADIENTS, Exchange, given
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, not_refused, outcome, records, unanswered, values
from moeref_conformance.oracles import dispatch
from moeref_conformance.oracles.dispatch import Looped, looped, row_bytes

#: Both sides work in float64; sums may be taken in another order.
RTOL, ATOL = 1e-12, 1e-13
FIELDS = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
#: What a config may have where this backend is asked for. "nothing": it is left to megatron-core, whose default is
#: deepep. Without flex nothing reads it.
_BACKENDS: dict[str, list[str | None]] = {"": ["nothing", None, "deepep"], "deepep": ["nothing", "deepep"]}


def _title(request: PadRequest) -> str:
    return f"{request.precision}, {request.dispatcher}"


def _paddings(case: Case) -> Iterator[tuple[int, PadRequest, dict[str, Any]]]:
    """Rank, request and answer, of all ranks."""
    for rank, answers in values(case, "padding"):
        for request, answer in zip(requests(case.cell.layout), answers, strict=True):
            yield rank, request, answer


def _answered(case: Case) -> Iterator[tuple[int, PadRequest, Padding]]:
    """Rank, request and padding, of the requests that were answered for every rank of theirs."""
    for rank, request, answer in _paddings(case):
        if not _unfit(request, answer):
            samples = tuple(tuple(lengths) for lengths in answer["samples"])
            yield rank, request, Padding(samples=samples, totals=tuple(answer["totals"]))


def _unfit(request: PadRequest, answer: dict[str, Any]) -> str:
    """Why an answer cannot be judged any further, or ""."""
    if "refused" in answer:
        return f"samples of {list(request.lengths)} refused: {answer['refused']}"
    if len(answer["samples"]) == len(answer["totals"]) == len(request.lengths):
        return ""
    return f"{len(request.lengths)} ranks asked, {len(answer['totals'])} answered"


@judges("DSP-001")
def padding_keeps_what_it_is_for(case: Case) -> Iterator[Finding]:
    """Split each padded sequence as CP and TP split it."""
    yield from unanswered(case, "padding")
    for rank, request, answer in _paddings(case):
        if unfit := _unfit(request, answer):
            yield finding(case, rank, "padding", f"{_title(request)}: {unfit}")
    for rank, request, padding in _answered(case):
        for member in range(len(request.lengths)):
            for message in dispatch.broken(case.cell.layout, request, member, padding):
                yield finding(case, rank, "padding", f"{_title(request)}: {message}")


@judges("DSP-002")
def padding_is_the_least(case: Case) -> Iterator[Finding]:
    """Against the least padding found by counting up."""
    yield from unanswered(case, "padding")
    for rank, request, padding in _answered(case):
        want, pairs = dispatch.least(case.cell.layout, request), list[tuple[str, int, int]]()
        for lengths, have, best in zip(request.lengths, padding.samples, want.samples, strict=True):
            pairs += zip((f"a sample of {length}" for length in lengths), have, best, strict=False)
        whole = (f"samples of {list(lengths)}" for lengths in request.lengths)
        for what, made, least in [*pairs, *zip(whole, padding.totals, want.totals, strict=True)]:
            if made > least:
                message = f"{_title(request)}: {what} became {made}, where {least} would do"
                yield finding(case, rank, "padding", message, expected=least, got=made)


@judges("DSP-003")
def equal_pieces(case: Case) -> Iterator[Finding]:
    """For dispatchers that exchange equal pieces only."""
    yield from unanswered(case, "padding")
    split = case.cell.layout.tp * case.cell.layout.cp
    for rank, request, padding in _answered(case):
        if request.dispatcher not in dispatch.EQUAL:
            continue
        if len(set(padding.totals)) > 1:
            message = f"{_title(request)}: ranks of one group were padded to {list(padding.totals)}, not to one length"
            yield finding(case, rank, "padding", message)
        each = dispatch.EQUAL[request.dispatcher]
        if uneven := sorted({total for total in padding.totals if total % (each * split)}):
            message = f"{_title(request)}: {uneven} rows over {split} ranks are no multiple of {each} each"
            yield finding(case, rank, "padding", message)


@judges("DSP-004")
def kept_or_refused(case: Case) -> Iterator[Finding]:
    """Kind and backend of the dispatcher, as asked for."""
    yield from unanswered(case, "dispatchers")
    for rank, answers in values(case, "dispatchers"):
        for title, answer in answers.items():
            asked = CHOICES[title].dispatcher
            if "refused" in answer:
                if asked == "alltoall":
                    message = f"{title}: refused, and it always works: {answer['refused']}"
                    yield finding(case, rank, "dispatchers", message)
                continue
            dispatcher, _, backend = asked.partition("-")
            have = [answer["given"].get(name, "nothing") for name in FIELDS]
            if have[0] != dispatcher or have[1] not in _BACKENDS.get(backend, [backend]):
                message = f"{title}: {FIELDS[0]} is {have[0]!r} with {FIELDS[1]} {have[1]!r}"
                yield finding(case, rank, "dispatchers", message, expected=asked)


@judges("DSP-005")
def what_cannot_work_is_refused(case: Case) -> Iterator[Finding]:
    """By an error that names the dispatcher."""
    yield from unanswered(case, "dispatchers")
    for rank, answers in values(case, "dispatchers"):
        for title, answer in answers.items():
            why, name = dispatch.cannot_work(case.cell.layout, CHOICES[title]), CHOICES[title].dispatcher
            if why and "refused" not in answer:
                yield finding(case, rank, "dispatchers", f"{title}: taken, but {why}")
            elif why and name.rpartition("-")[2] not in answer["refused"]:
                message = f"{title}: the refusal does not name {name}"
                yield finding(case, rank, "dispatchers", message, got=answer["refused"])


def _exchanges(case: Case) -> Iterator[tuple[int, Exchange, Looped, dict[str, torch.Tensor]]]:
    """Every exchange of every rank: what the loop gives, and what was seen."""
    for record in records(case, "exchange"):
        seen = record.tensors("exchange")
        for number, exchange in enumerate(EXCHANGES):
            prefix = f"{exchange.name}."
            mine = {k.removeprefix(prefix): t for k, t in seen.items() if k.startswith(prefix)}
            yield record.rank, exchange, looped(case.cell.layout, case.cell.dispatcher, number, record.rank), mine


def _lost(case: Case, rank: int, exchange: Exchange, have: Collection[str], *names: str) -> list[Finding]:
    """A finding for each tensor of an exchange that is not among those on record."""
    lacking = [name for name in names if name not in have]
    return [finding(case, rank, "exchange", f"{exchange.name}: no record of {name}") for name in lacking]


def _padding(case: Case, exchange: Exchange, rank: int) -> torch.Tensor:
    return given(exchange, case.cell.layout, case.cell.dispatcher, rank).rows.padding_T


@judges("DSP-006")
def rows_come_back_as_the_loop_has_them(case: Case) -> Outcome:
    """What every expert received, and what every row got."""
    findings = unanswered(case, "exchange")
    for rank, exchange, want, have in _exchanges(case):
        padding = {row for rows in want.padding.values() for row in rows}
        for expert, rows in want.received.items():
            # Rows of zeros fill an expert's share up to what a GEMM or a capacity takes; no row that was sent is zero.
            got = Counter(row_bytes(row) for row in have.get(f"received.{expert}", ()) if row.any())
            real = Counter({row: count for row, count in got.items() if row not in padding})
            if real != rows:
                what = f"{real.total()} rows, not {rows.total()}"
                if unsent := _unsent(case, exchange, rank, got):
                    what = unsent
                elif real.total() == rows.total():
                    what = "other rows than those routed to it"
                message = f"{exchange.name}: expert {expert} received {what}"
                findings.append(finding(case, rank, "exchange", message, expert=expert))
        if lost := _lost(case, rank, exchange, have, "y"):
            findings += lost
            continue
        keep = ~_padding(case, exchange, rank)
        if problem := _apart(have["y"], want.y_TH, keep):
            message = f"{exchange.name}: rows come back {problem}"
            weights_TK = given(exchange, case.cell.layout, case.cell.dispatcher, rank).rows.weights_TK.detach()
            why = _explained(have["y"], want, weights_TK, keep)
            findings.append(finding(case, rank, "exchange", message, diagnosis=why))
    return outcome(findings, met=f"rtol {RTOL:g}")


def _unsent(case: Case, exchange: Exchange, rank: int, got: Counter[bytes]) -> str:
    """How many of the rows an expert got are not as any rank of the group sent them; empty if all are."""
    layout, dispatcher = case.cell.layout, case.cell.dispatcher
    group = topology.group(layout, "etp_ep", rank)
    sent = torch.cat([given(exchange, layout, dispatcher, member).rows.x_TH.detach() for member in group])
    strange = got.keys() - set(map(row_bytes, sent))
    rounded = strange <= set(map(row_bytes, sent.bfloat16().double()))
    return f"{len(strange)} rows {'rounded to bfloat16' if rounded else 'that nobody sent'}" if strange else ""


def _explained(have_TH: torch.Tensor, want: Looped, weights_TK: torch.Tensor, rows_T: torch.Tensor) -> str:
    """What was done to the weights of rows that come back wrong; empty if nothing known explains all of them."""
    if have_TH.shape != want.y_TH.shape:
        return ""
    for dtype in (torch.float32, torch.bfloat16):
        rounded_TK = weights_TK.to(dtype).double()
        if not _apart(have_TH, (rounded_TK[..., None] * want.parts_TKH).sum(1), rows_T):
            return f"as with weights rounded to {str(dtype).removeprefix('torch.')}"
    rows = list(zip(have_TH[rows_T], weights_TK[rows_T], want.parts_TKH[rows_T], strict=True))
    lacking = [_lacking(*row) for row in rows]
    if all(number is not None for number in lacking):
        return f"{sum(map(bool, lacking))} of {len(lacking)} rows lack the output of some of their experts"
    for what, others in _OTHER_WEIGHTS.items():
        if all(any(not _apart(have, w @ parts) for w in others(own, weights_TK)) for have, own, parts in rows):
            return f"as with {what}"
    return _scaled(have_TH, want.y_TH, rows_T)


#: What may have become of the weights of a row `[K]`, given those of all rows `[T, K]`.
_OTHER_WEIGHTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Iterable[torch.Tensor]]] = {
    "weights squared": lambda own_K, _: [own_K * own_K],
    "weights of 1": lambda own_K, _: [torch.ones_like(own_K)],
    "equal weights": lambda own_K, _: [torch.full_like(own_K, 1 / len(own_K))],
    "a row's weights in another order": lambda own_K, _: map(torch.stack, itertools.permutations(own_K)),
    "the weights of other rows": lambda _, weights_TK: weights_TK,
}


def _lacking(have_H: torch.Tensor, weights_K: torch.Tensor, parts_KH: torch.Tensor) -> int | None:
    """How many experts' outputs a row lacks; None if it is no sum of some of them."""
    for kept in sorted(itertools.product((0.0, 1.0), repeat=len(weights_K)), key=sum, reverse=True):
        if not _apart(have_H, (weights_K * weights_K.new_tensor(kept)) @ parts_KH):
            return len(kept) - int(sum(kept))
    return None


def _scaled(have: torch.Tensor, want: torch.Tensor, rows: torch.Tensor | slice = slice(None)) -> str:
    """Whether each row is the right one times a number of its own, as with weights that were changed on the way."""
    if have.shape != want.shape:
        return ""
    have, want = have.double()[rows].flatten(1), want[rows].flatten(1)
    there = want.any(1)
    factor_T1 = (have * want)[there].sum(1, keepdim=True) / (want * want)[there].sum(1, keepdim=True)
    if not factor_T1.any() or have[~there].any():
        return ""
    if not torch.allclose(have[there], factor_T1 * want[there], rtol=1e-9, atol=ATOL):
        return ""
    low, high = (f"{float(factor):.2g}" for factor in (factor_T1.min(), factor_T1.max()))
    return f"each row is {low if low == high else f'{low} to {high}'} times the right one"


@judges("DSP-007")
def gradients_are_the_loop_s(case: Case) -> Outcome:
    """Of rows, weights and experts."""
    findings = unanswered(case, "exchange")
    titles = dict(zip(GRADIENTS, ("rows", "weights", "experts' first weight", "experts' second weight"), strict=True))
    for rank, exchange, want, have in _exchanges(case):
        findings += _lost(case, rank, exchange, have, *GRADIENTS)
        for name in (name for name in GRADIENTS if name in have):
            if problem := _apart(have[name], want.gradients[name]):
                message = f"{exchange.name}: the gradient of the {titles[name]} is {problem}"
                why = _scaled(have[name], want.gradients[name])
                findings.append(finding(case, rank, "exchange", message, diagnosis=why))
    return outcome(findings, met=f"rtol {RTOL:g}")


@judges("DSP-008")
def padding_rows_count_for_nothing(case: Case) -> Iterator[Finding]:
    """What came back for them, and the counts."""
    yield from unanswered(case, "exchange")
    for rank, exchange, want, have in _exchanges(case):
        if lost := _lost(case, rank, exchange, have, "y", "counts"):
            yield from lost
            continue
        padding_T = _padding(case, exchange, rank)
        if have["y"].shape == want.y_TH.shape and bool(have["y"][padding_T].any()):
            yield finding(case, rank, "exchange", f"{exchange.name}: a padding row does not weigh zero")
        right, counts = want.counts_E.tolist(), have["counts"].tolist()
        if counts != right:
            message = f"{exchange.name}: rows that count for each expert are {counts}"
            yield finding(case, rank, "exchange", message, expected=right, got=counts)


@judges("DSP-010")
def padding_rows_are_spread(case: Case) -> Iterator[Finding]:
    """Which experts received them."""
    yield from unanswered(case, "exchange")
    receivers = _receivers(case)
    for rank, exchange, want, _ in _exchanges(case):
        chosen = [receivers.get((exchange.name, _group(case, rank), row), []) for row in want.padding[rank]]
        yield from _spread(case, rank, exchange, chosen)


def _receivers(case: Case) -> dict[tuple[str, int, bytes], list[int]]:
    """(exchange, first rank of the group, row) -> experts that received the row."""
    receivers: dict[tuple[str, int, bytes], list[int]] = {}
    for rank, exchange, want, have in _exchanges(case):
        # All ranks of an ETP group receive the same rows; its first speaks for all.
        if topology.coords(case.cell.layout, rank)["etp"] == 0:
            for expert in want.received:
                for row in have.get(f"received.{expert}", ()):
                    receivers.setdefault((exchange.name, _group(case, rank), row_bytes(row)), []).append(expert)
    return receivers


def _spread(case: Case, rank: int, exchange: Exchange, chosen: list[list[int]]) -> Iterator[Finding]:
    """Findings where padding rows went to too few experts, or too many of them to one. `chosen`: experts by row."""
    for experts in chosen:
        if not len(experts) == len(set(experts)) == exchange.topk:
            message = f"{exchange.name}: a padding row went to experts {experts}, not {exchange.topk} distinct ones"
            yield finding(case, rank, "exchange", message)
    loads = Counter(expert for experts in chosen for expert in experts)
    most = math.ceil(len(chosen) * exchange.topk / (exchange.experts * case.cell.layout.ep))
    if loads and max(loads.values()) > most:
        expert, load = loads.most_common(1)[0]
        message = f"{exchange.name}: {load} of {len(chosen)} padding rows went to expert {expert}, not {most}"
        yield finding(case, rank, "exchange", message, expert=expert)


@judges("DSP-009")
def malformed_routes_are_refused(case: Case) -> list[Finding]:
    """On every rank, since each is given such a row."""
    return unanswered(case, "exchange") + not_refused(case, "exchange", "a row with {} was dispatched")


def _group(case: Case, rank: int) -> int:
    """The first rank of the etp·ep group."""
    return topology.group(case.cell.layout, "etp_ep", rank)[0]


def _apart(have: torch.Tensor, want: torch.Tensor, rows: torch.Tensor | None = None) -> str:
    """How two tensors differ, in the `rows` alone if given; empty if they do not."""
    if have.shape != want.shape:
        return f"as {list(have.shape)}, not {list(want.shape)}"
    have, want = (have.double(), want) if rows is None else (have.double()[rows], want[rows])
    if torch.allclose(have, want, rtol=RTOL, atol=ATOL):
        return ""
    if not have.any():
        return "all zero"
    return f"off a loop over rows by {float((have - want).abs().max()):.2g}"
