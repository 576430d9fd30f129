"""OPT: steps of an optimizer from the weights that were loaded: at the rate 0 none moves, at another all do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord, digest
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    outcome,
    placement,
    records,
    tolerance,
    unmeasured,
    values,
    within,
    without,
)
from moeref_conformance.judges.observed_routes import oracle
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown

#: Of the largest gradient of a tensor. Smaller ones may have another sign: they are right within 1e-4 of it (GRD-001).
TELLING = 1e-3
#: The least gradient of which Adam's epsilon hides no more than LIMIT.
LEAST = 1e-5
#: Of the rate: how far an element may be from where Adam moves it.
LIMIT = 2e-3
#: Of the norm: how far it may be off.
NORM_LIMIT = 2e-4
#: In bf16: the share of elements with a gradient that may stand still, since rounding turns some to zero.
STILL = 0.1


@judges("OPT-001", exact=True)
def a_step_at_rate_zero_moves_nothing(case: Case) -> Iterator[Finding]:
    """Every parameter after it, against the checkpoint's shard."""
    yield from without(case, "inventory", "optimizer")
    for record in records(case, "inventory", "optimizer"):
        before = {f"{row['chunk']}:{row['local']}": row["digest"] for row in _begun(record)}
        for key, held, still, _ in _parameters(placement(case), record):
            difference = compare(held.tensor, still, held.rows)
            if difference is not None:
                old = before.get(key) == digest(still)
                said = "what it held before it was loaded" if old else ""
                message = f"{key}: after a step at the rate 0 {difference.text}"
                yield _found(case, record, key, held, message, diagnosis=said, **difference.told)


@judges("OPT-002")
def a_step_moves_every_weight(case: Case) -> Outcome:
    """In fp32 each element against Adam's formula and transformers' gradient.

    In bf16, where rounding turns routes: nearly all elements with a gradient move, of a router one at least, and of the
    experts of a layer one. None moves further than the rate.
    """
    if no := unmeasured(case):
        return no
    findings, worst = without(case, "inventory", "optimizer"), 0.0
    exact = case.cell.dtype == "float32"
    want = Placement(case.cell, expected(case).config, oracle(case, "native").gradients)
    for record in records(case, "inventory", "optimizer"):
        stepped = list(_parameters(want, record))
        for of in stepped:
            key, held, still, moved = of
            if still.shape != moved.shape or moved[: held.rows].shape != held.tensor[: held.rows].shape:
                findings.append(_found(case, record, key, held, f"{key}: no record of it after a step"))
                continue
            if exact:
                more, far = _by_formula(case, want, record, of)
                findings, worst = [*findings, *more], max(worst, far)
            else:
                findings += _in_bf16(case, want, record, of)
        findings += [] if exact else _experts(case, record, stepped)
    return outcome(findings, met=within(case, worst, LIMIT) if exact else "every tensor moves, by the rate at most")


@judges("OPT-003")
def norms_are_the_models(case: Case) -> Outcome:
    """In fp32, where the target computes one, against the norm of transformers' gradients."""
    if case.cell.dtype != "float32":
        return Outcome(untested="in bf16 rounding turns routes, and gradients with them")
    findings, worst, none = without(case, "optimizer"), 0.0, True
    want = optimizer.norm({name: of for name, of in oracle(case, "native").gradients.items() if not of.isnan().any()})
    for rank, norms in values(case, "optimizer"):
        for step, got in norms.items():
            if got is None:
                continue
            none, far = False, abs(got / want - 1.0)
            if not far <= NORM_LIMIT:
                message = f"{step}: the norm of the gradient is {got:.6g}, that of transformers' {want:.6g}"
                told = {"expected": want, "got": got, "diagnosis": f"{got / want:.4g} times the right one"}
                findings.append(finding(case, rank, "optimizer", message, **told))
            else:
                worst = max(worst, far)
    return outcome(findings, met="the target computes none" if none else within(case, worst, NORM_LIMIT))


def _begun(record: RankRecord) -> list[dict[str, Any]]:
    """Digests of what the tensors held before they were loaded; none where a cell does not record them."""
    return list((record.value("begun") if record.has("begun") else None) or ())


class _Stepped(NamedTuple):
    """A parameter: `chunk:local`, what the oracle has there, and its values after each step, empty if not on record."""

    key: str
    held: ExpectedShard
    still: torch.Tensor
    moved: torch.Tensor


def _parameters(placed: Placement, record: RankRecord) -> Iterator[_Stepped]:
    """Every parameter of a rank that the oracle knows; LOD-001 finds the others."""
    tensors, none = record.tensors("optimizer"), torch.empty(0)
    for item in record.value("inventory"):
        key = f"{item['chunk']}:{item['local']}"
        if item["kind"] != "parameter":
            continue
        try:
            held = placed.shard(record.rank, item["chunk"], item["local"], item["shape"])
        except Unknown:
            continue
        yield _Stepped(key, held, tensors.get(f"still.{key}", none), tensors.get(f"moved.{key}", none))


def _found(case: Case, record: RankRecord, key: str, held: ExpectedShard, message: str, **more: object) -> Finding:
    names = {"local_name": key.partition(":")[2], "hf_name": held.hf[0] if held.hf else ""}
    return finding(case, record.rank, "optimizer", message, **{**names, "layer": held.layer, **more})


def _telling(want: Placement, held: ExpectedShard) -> torch.Tensor:
    """Which elements have a gradient whose sign is sure."""
    sources = held.hf or ("model.embed_tokens.weight",)  # a tied head's replica names none
    floor = max(LEAST, TELLING * max(want.largest(name) for name in sources))
    return held.tensor[: held.rows].abs() > floor


def _by_formula(case: Case, want: Placement, record: RankRecord, of: _Stepped) -> tuple[list[Finding], float]:
    """The finding of a parameter, if there is one, and its distance from what is right, relative to the rate."""
    gradient, tells = of.held.tensor[: of.held.rows], _telling(want, of.held)
    added = (of.moved.double() - of.still.double())[: of.held.rows]
    right = optimizer.update(gradient, OPTIMIZER_RATE)
    off = (added - right).abs() / OPTIMIZER_RATE
    # Of other gradients no more is sure than that Adam never moves an element much further than the rate.
    sure = tells | (gradient == 0)
    wrong = torch.where(sure, off > LIMIT, added.abs() > OPTIMIZER_RATE * (1 + LIMIT)) | added.isnan()
    if not bool(wrong.any()):
        return [], float(off[tells].max()) if bool(tells.any()) else 0.0
    message = f"{of.key}: {int(wrong.sum())} of {wrong.numel()} elements are not where Adam moves them"
    return [_found(case, record, of.key, of.held, message, diagnosis=_said(added, right, tells))], 0.0


def _said(added: torch.Tensor, right: torch.Tensor, tells: torch.Tensor) -> str:
    if not bool(added.any()):
        return "not moved at all"
    if bool(tells.any()) and torch.allclose(added[tells], -right[tells], rtol=0.1):
        return "moved up the gradient"
    return _times(added)


def _times(added: torch.Tensor) -> str:
    return f"moved by up to {float(added.abs().max()) / OPTIMIZER_RATE:.3g} times the rate"


def _in_bf16(case: Case, want: Placement, record: RankRecord, of: _Stepped) -> Iterator[Finding]:
    """Elements that stand still, and elements that moved further than the rate."""
    still, moved = (values.double()[: of.held.rows] for values in (of.still, of.moved))
    added = (moved - still).abs()
    steps = torch.finfo(of.moved.dtype).eps * torch.maximum(moved.abs(), still.abs())
    if not bool((added <= OPTIMIZER_RATE * (1 + LIMIT) + steps).all()):
        message = f"{of.key}: elements moved further than {tolerance(case, OPTIMIZER_RATE)}, the rate"
        yield _found(case, record, of.key, of.held, message, diagnosis=_times(added))
    if of.held.expert is not None:
        return
    due = _telling(want, of.held) & (steps < OPTIMIZER_RATE)
    stand = due & (added == 0)
    most = 1.0 if of.key.endswith("router.weight") else STILL
    if int(stand.sum()) > most * int(due.sum()) or not bool(added.any()):
        message = f"{of.key}: {int(stand.sum())} of {int(due.sum())} elements with a gradient did not move in a step"
        said = "not moved in part" if bool(added.any()) else "not moved at all"
        yield _found(case, record, of.key, of.held, message, diagnosis=said)


def _experts(case: Case, record: RankRecord, stepped: Sequence[_Stepped]) -> Iterator[Finding]:
    """Experts of layers in which none moved: one may have no token."""
    experts = [of for of in stepped if of.held.expert is not None]
    moving = {of.held.layer for of in experts if not torch.equal(of.still, of.moved)}
    for of in experts:
        if of.held.layer not in moving:
            message = f"{of.key}: no expert of the layer moved in a step"
            yield _found(case, record, of.key, of.held, message, diagnosis="not moved at all")
