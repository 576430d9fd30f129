"""OPT: steps of an optimizer from the weights that were loaded: at the rate 0 none moves, at another all do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

#: Gradients are transformers' within 1e-4 of the largest (GRD-001): smaller ones may have another sign.
TELLING = 1e-3
#: And where they are near Adam's epsilon, their rounding counts.
LEAST = 1e-5
#: Of the rate: how far an element may be from where Adam moves it.
LIMIT = 2e-3
#: Of the norm: how far it may be off.
NORM_LIMIT = 2e-4


@judges("OPT-001", exact=True)
def a_step_at_rate_zero_moves_nothing(case: Case) -> Iterator[Finding]:
    """Every parameter after it, against the checkpoint's shard."""
    yield from without(case, "inventory", "optimizer")
    for record in records(case, "inventory", "optimizer"):
        before = {f"{row['chunk']}:{row['local']}": row["digest"] for row in _begun(record)}
        for key, held, got in _parameters(case, placement(case), record, "still"):
            difference = compare(held.tensor, got, held.rows)
            if difference is not None:
                old = before.get(key) == digest(got)
                said = "what it held before it was loaded" if old else ""
                message = f"{key}: after a step at the rate 0 {difference.text}"
                yield _found(case, record, key, held, message, diagnosis=said, **difference.told)


@judges("OPT-002")
def a_step_moves_every_weight(case: Case) -> Outcome:
    """In fp32 each element against Adam's formula and transformers' gradient.

    In bf16, where rounding turns routes, that every tensor moves, of the experts of a layer one at least, and that no
    element moves further than the rate.
    """
    if no := unmeasured(case):
        return no
    findings, worst = without(case, "inventory", "optimizer"), 0.0
    exact = case.cell.dtype == "float32"
    want = Placement(case.cell, expected(case).config, oracle(case, "native").gradients) if exact else None
    for record in records(case, "inventory", "optimizer"):
        if want is None:
            findings += _unmoved(case, record)
        else:
            more, far = _by_formula(case, want, record)
            findings, worst = [*findings, *more], max(worst, far)
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


Parameter = tuple[str, ExpectedShard, torch.Tensor]


def _parameters(case: Case, placed: Placement, record: RankRecord, step: str) -> Iterator[Parameter]:
    """`chunk:local`, what the oracle has there, and the values after a step, of every parameter that LOD-001 knows."""
    tensors = record.tensors("optimizer")
    for item in record.value("inventory"):
        key = f"{item['chunk']}:{item['local']}"
        if item["kind"] != "parameter":
            continue
        try:
            held = placed.shard(record.rank, item["chunk"], item["local"], item["shape"])
        except Unknown:
            continue
        got = tensors.get(f"{step}.{key}")
        yield key, held, torch.empty(0) if got is None else got


def _found(case: Case, record: RankRecord, key: str, held: ExpectedShard, message: str, **more: object) -> Finding:
    names = {"local_name": key.partition(":")[2], "hf_name": held.hf[0] if held.hf else ""}
    return finding(case, record.rank, "optimizer", message, **{**names, "layer": held.layer, **more})


def _by_formula(case: Case, want: Placement, record: RankRecord) -> tuple[list[Finding], float]:
    """Findings of a rank, and the largest distance of what is right, relative to the rate."""
    findings, worst = list[Finding](), 0.0
    before = {key: got for key, _, got in _parameters(case, want, record, "still")}
    for key, held, got in _parameters(case, want, record, "moved"):
        gradient = held.tensor[: held.rows]
        if got.shape != before[key].shape or got[: held.rows].shape != gradient.shape:
            findings.append(_found(case, record, key, held, f"{key}: no record of it after a step"))
            continue
        added = (got.double() - before[key].double())[: held.rows]
        sources = held.hf or ("model.embed_tokens.weight",)
        floor = max(LEAST, TELLING * max(want.largest(name) for name in sources))
        tells, none = gradient.abs() > floor, gradient == 0
        right = optimizer.update(gradient, OPTIMIZER_RATE)
        off = (added - right).abs() / OPTIMIZER_RATE
        # Between: too small to say more of than that Adam never moves an element much further than the rate.
        wrong = torch.where(tells | none, off > LIMIT, added.abs() > OPTIMIZER_RATE * (1 + LIMIT)) | added.isnan()
        if bool(wrong.any()):
            text = f"{int(wrong.sum())} of {wrong.numel()} elements are not where Adam moves them"
            findings.append(_found(case, record, key, held, f"{key}: {text}", diagnosis=_said(added, right, tells)))
        elif bool(tells.any()):
            worst = max(worst, float(off[tells].max()))
    return findings, worst


def _said(added: torch.Tensor, right: torch.Tensor, tells: torch.Tensor) -> str:
    if not bool(added.any()):
        return "not moved at all"
    if bool(tells.any()) and torch.allclose(added[tells], -right[tells], rtol=0.1):
        return "moved up the gradient"
    return f"moved by up to {float(added.abs().max()) / OPTIMIZER_RATE:.3g} times the rate"


def _unmoved(case: Case, record: RankRecord) -> Iterator[Finding]:
    """Tensors that stand still, experts only where all of a layer do, and elements that moved further than the rate."""
    before = {key: got for key, _, got in _parameters(case, placement(case), record, "still")}
    moved = {key: (held, got) for key, held, got in _parameters(case, placement(case), record, "moved")}
    alike = {key: got.shape == before[key].shape and torch.equal(got, before[key]) for key, (_, got) in moved.items()}
    for key, (held, got) in moved.items():
        experts = [k for k, (of, _) in moved.items() if of.expert is not None and of.layer == held.layer]
        if all(alike[k] for k in (experts if held.expert is not None else [key])):
            yield _found(case, record, key, held, f"{key}: no element moved in a step", diagnosis="not moved at all")
            continue
        added = (got.double() - before[key].double()).abs()
        steps = torch.finfo(got.dtype).eps * torch.maximum(got.double().abs(), before[key].double().abs())
        if not bool((added <= OPTIMIZER_RATE * (1 + LIMIT) + steps).all()):
            said = f"moved by up to {float(added.max()) / OPTIMIZER_RATE:.3g} times the rate"
            message = f"{key}: elements moved further than {tolerance(case, OPTIMIZER_RATE)}, the rate"
            yield _found(case, record, key, held, message, diagnosis=said)
