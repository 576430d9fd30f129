"""OPT-003, OPT-005: the norm of the gradient of a step; and transformers' gradients of each step with their norms.

The gradient of one step is that of the first microbatch, and that of the others is of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.optimizer import BEHIND, MOVED, STILL, TRAINED, of_one_microbatch, rates
from moeref_conformance.judges import Case, judges, optimizer_causes, trained
from moeref_conformance.judges.common import (
    expected,
    finding,
    missing_records,
    once,
    outcome,
    tokens_of,
    unmeasured,
    values,
    within,
)
from moeref_conformance.judges.observed_routes import native_gradients
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import Placement, hf_numbers
from moeref_conformance.oracles.published import COPIES

#: Of the norm: how far it may be off. Of one flat buffer in fp32 `torch.norm` is up to 3e-5 off on a CPU.
LIMIT = 5e-5
#: The same below fp32, where rounding turns gradients, and routes with them. The largest seen is 5e-3.
TURNED = 0.1
#: The same where small parameters have to show. The largest seen tensor by tensor is 5e-7, and without the sinks of
#: half of the heads 5e-6.
NEAR = 3e-6


@judges("OPT-003")
def norms_are_the_models(case: Case) -> Outcome:
    """Where the target computes one, against the norm of transformers' gradients: of the weights that were loaded.

    In bf16, where rounding turns routes and gradients with them, within a tenth.
    """
    answer = _norms(case, norm_limit(case))
    return replace(answer, findings=(*answer.findings, *_of_moved_weights(case)))


@judges("OPT-005")
def norms_are_the_models_to_the_last_parameters(case: Case) -> Outcome:
    """As OPT-003, so near that small parameters show."""
    return _norms(case, NEAR)


def _norms(case: Case, limit: float) -> Outcome:
    """How far norms of gradients are off those of the model."""
    if no := unmeasured(case):
        return no
    findings, worst, none = missing_records(case, "optimizer"), 0.0, True
    wants = right_norms(case)
    for rank, norms in values(case, "optimizer"):
        for step in (STILL, MOVED):
            got = norms.get(step)
            if got is None:
                continue
            none, far, want = False, abs(got / wants[step] - 1.0), wants[step]
            if not far <= limit:
                message = f"{step}: the norm of the gradient is {got:.8g}, that of transformers' {want:.8g}"
                said = "; ".join(filter(None, (f"{got / want:.7g} times the right one", _counted(case, norms))))
                told = {"expected": want, "got": got, "diagnosis": said}
                findings.append(finding(case, rank, "optimizer", message, **told))
            else:
                worst = max(worst, far)
    return outcome(findings, met="the target computes none" if none else within(case, worst, limit))


def _of_moved_weights(case: Case) -> Iterator[Finding]:
    """Norms of the step after the one that has moved weights, against transformers' with those that are sent between.

    Nothing where a router chooses by little, or where multi-token prediction layers, which transformers lacks, train.
    """
    exact = case.cell.dtype == "float32" and not case.cell.mtp
    of = None if unmeasured(case) or not exact else trained.of_trained(case, BEHIND[0])
    if of is None or not bool(trained.sure_positions(of)[tokens_of(case)].all()):
        return
    want = optimizer.norm(_of_parameters(of.gradients))
    for rank, norms in values(case, "optimizer"):
        got = norms.get(TRAINED)
        if got is not None and not abs(got / want - 1.0) <= norm_limit(case):
            before = abs(got / right_norms(case)[STILL] - 1.0) <= norm_limit(case)
            message = f"once weights have moved the norm of the gradient is {got:.8g}, that of transformers' {want:.8g}"
            told = {"expected": want, "got": got, "diagnosis": "that of the weights before the step" if before else ""}
            yield finding(case, rank, "optimizer", message, **told)


def _counted(case: Case, norms: Mapping[str, float | None]) -> str:
    """What counts otherwise in a rank's norms in fp32."""
    if case.cell.dtype != "float32":
        return ""
    gradients = {step: whole_gradients(case)[step] for step in (STILL, MOVED)}
    return optimizer_causes.norms_of(gradients, norms, case.cell.layout)


def norm_limit(case: Case) -> float:
    """How far the norm of a gradient may be off, relative to it."""
    return LIMIT if case.cell.dtype == "float32" else TURNED


@once
def step_gradients(case: Case) -> dict[str, Placement]:
    """transformers' gradients of each step."""
    counted = {step: case.cell.rows if step == of_one_microbatch(case.cell) else None for step in rates(case.cell)}
    found = {step: native_gradients(case, counted=rows) for step, rows in counted.items()}
    return {step: Placement(case.cell, expected(case).config, gradients) for step, gradients in found.items()}


@once
def whole_gradients(case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """The same of each parameter once, by its name: a checkpoint may have copies of embedding and head with layers."""
    return {step: _of_parameters(placed.tensors) for step, placed in step_gradients(case).items()}


def _of_parameters(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    own = {name: gradient for name, gradient in gradients.items() if not gradient.isnan().any()}
    return {name: own[name] for name in own if not (name.startswith("model.layers.") and name.endswith(COPIES))}


@once
def right_norms(case: Case) -> dict[str, float]:
    """The norm of the whole model's gradient, by step."""
    return {step: optimizer.norm(gradients) for step, gradients in whole_gradients(case).items()}


@once
def norms_of_parts(case: Case) -> dict[str, list[float]]:
    """The norm of the experts' gradients in the steps `STILL` and `MOVED`, and that of the others."""
    both = [whole_gradients(case)[step] for step in (STILL, MOVED)]
    own = [{name: of for name, of in one.items() if hf_numbers(name)[1] is not None} for one in both]
    rest = [{name: of for name, of in one.items() if hf_numbers(name)[1] is None} for one in both]
    return {"experts": [*map(optimizer.norm, own)], "all but experts": [*map(optimizer.norm, rest)]}
