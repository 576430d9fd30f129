"""GRD-002: the bias by which routers choose experts, which a step moves by the number of tokens that each got."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from moeref_conformance.contract.cells import BIAS_UPDATE_RATE
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.policy import unrouted
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import TRAINING_STEPS, expected, finding, gradients_of, missing_records, records
from moeref_conformance.judges.observed_routes import oracle, seen_routes, with_mtp
from moeref_conformance.oracles import balancing
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown

_BIAS = "e_score_correction_bias"
#: In fp32 a bias of about 8 holds a step of 0.001 to a part in a thousand.
STEPS_APART = 0.01


@judges("GRD-002")
def experts_bias_follows_the_tokens(case: Case) -> Iterator[Finding]:
    """Against the tokens that each expert gets in transformers; a bias holds values that differ by far more.

    Multi-token prediction layers may route the last tokens of a row in any way, or count none: what these decide is
    open. Under given routes the last tokens of samples, which have none, count for the experts that they took; whether
    such a step moves the bias at all is open. A policy's steps under the routers' own choice move it as others do: all
    tokens count, whether they are trained on or not.
    """
    steps = ("gradients", *_of_a_policy(case))
    yield from missing_records(case, "inventory", *steps)
    for step in steps:
        yield from _bias_of(case, step, "native")
    if case.cell.replay == "R3":
        yield from missing_records(case, "replay")
        for phase in ("step-a", "recompute-b"):
            yield from _bias_of(case, phase, phase[-1])


def _of_a_policy(case: Case) -> tuple[str, ...]:
    """The steps of a policy's loss that take the routers' own choice; none where the cell or the target has none."""
    cell = case.cell
    open_loss = cell.mtp and (cell.router_loss or not case.claims.mtp_in_policy)
    asked = cell.loss_mask and cell.replay != "R3" and not open_loss
    return unrouted(cell) if asked and "policy" in case.claims.facets else ()


def _bias_of(case: Case, phase: str, routes: str) -> Iterator[Finding]:
    """Findings for the experts' bias after a step under these routes, or under the routers' own."""
    step = phase if phase in TRAINING_STEPS else "replay"
    placed = Placement(case.cell, expected(case).config, _updated(case, phase, routes))
    findings, moved = list[Finding](), False
    for record in records(case, "inventory", step):
        have = gradients_of(record, phase)
        for item in record.value("inventory"):
            held = _bias(placed, record.rank, item)
            if held is not None:
                got = have.get(f"{item['chunk']}:{item['local']}")
                moved |= got is None or not torch.equal(got, expected(case).tensors[held.hf[0]])
                findings += _moved(case, record.rank, phase, item["local"], held, got)
    if moved or step != "replay":
        yield from findings


def _updated(case: Case, phase: str, routes: str) -> Mapping[str, torch.Tensor]:
    """The checkpoint with each bias as it is after the step."""
    tensors, lengths = dict(expected(case).tensors), expected(case).lengths
    took = {} if phase in TRAINING_STEPS else seen_routes(case, phase)[0]
    last = {(row, length - 1) for row, length in enumerate(lengths)}
    routed = {**oracle(case, routes).experts, **(with_mtp(case, routes).experts if case.cell.mtp else {})}
    for layer, by_place in routed.items():
        own = {place: experts for place, experts in took.get(layer, {}).items() if place in last}
        chosen = [own.get(place, experts) for place, experts in by_place.items()]
        name = next(of for of in tensors if of.startswith(f"model.layers.{layer}.") and of.endswith(_BIAS))
        ways_E = balancing.directions(chosen, len(tensors[name]), sum(lengths) - len(chosen))
        tensors[name] = tensors[name] + BIAS_UPDATE_RATE * ways_E
    return tensors


def _bias(placed: Placement, rank: int, item: Mapping[str, Any]) -> ExpectedShard | None:
    """What a tensor holds if it is the experts' bias of a router."""
    try:
        held = placed.shard(rank, item["chunk"], item["local"], item["shape"])
    except Unknown:
        return None
    return held if any(name.endswith(_BIAS) for name in held.hf) else None


def _moved(
    case: Case, rank: int, phase: str, local: str, held: ExpectedShard, got: torch.Tensor | None
) -> Iterator[Finding]:
    """A finding for an updated bias that is not there, or not the expected one."""
    (name,), behind_it = held.hf, "the step" if phase == "gradients" else phase
    where = {"stage": phase, "hf_name": name, "local_name": local}
    if got is None or got.shape != held.tensor.shape:
        message = f"no {local} after {behind_it}" if got is None else f"{local} is {list(got.shape)} after {behind_it}"
        yield finding(case, rank, message=message, **where)
        return
    before = expected(case).tensors[name].double()
    steps_E, want_E = ((one.double() - before) / BIAS_UPDATE_RATE for one in (got, held.tensor))
    want_E = want_E.where(~want_E.isnan(), steps_E.nan_to_num().round().clamp(-1, 1))
    wrong_E = ~((steps_E - want_E).abs() <= STEPS_APART)
    if bool(wrong_E.any()):
        diagnosis = f"moved by {_steps(steps_E)} times the rate, expected {_steps(want_E)}"
        message = f"{local}: {int(wrong_E.sum())} of {len(got)} experts have another bias after {behind_it}"
        yield finding(case, rank, message=message, diagnosis=diagnosis, **where)


def _steps(steps_E: torch.Tensor) -> str:
    return ", ".join(f"{round(step, 2):g}" for step in steps_E[:8].tolist()) + (" …" if len(steps_E) > 8 else "")
