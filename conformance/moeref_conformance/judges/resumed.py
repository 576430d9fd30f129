"""OPT-004: the steps of an optimizer that was saved and restored, and of one that is made while routers are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.optimizer import (
    FROZEN,
    MOVED,
    ON,
    RESUMED,
    SAVED,
    SETTINGS,
    STILL,
    is_frozen,
)
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    finding,
    in_any_order,
    missing_records,
    outcome,
    parameters,
    placement,
    records,
    unmeasured,
    within,
)
from moeref_conformance.judges.step_gradients import norm_limit, right_norms, step_gradients, whole_gradients
from moeref_conformance.judges.stepped import (
    ELSEWHERE,
    FEW,
    LIMIT,
    TURNED,
    Stepped,
    Way,
    by_formula,
    experts_of_layers,
    finding_of,
    from_loaded,
    how_far,
    way_of,
    wrong_of,
)
from moeref_conformance.oracles import optimizer

#: Of a step: how far one after a restore may be on a GPU below fp32, beside two digits, where sums change their order.
APART = 0.25
#: The share of elements that tells what a restored optimizer has lost.
MOST = 0.9
#: What a step is compared with one without.
RESTORE = "the restore"


@judges("OPT-004")
def a_restored_optimizer_goes_on(case: Case) -> Outcome:
    """The step after a restore against that of the optimizer that was saved; in fp32 also against Adam's formula.

    It is the third, after two whose gradients differ; its own is that of the first.

    Bit for bit; on a GPU in fp32 by the formula alone, in bf16 nearly all elements nearly so. Until it steps, weights
    are those of the save. Of one that is made while routers are frozen these stay, and in fp32 the others move. In fp32
    an optimizer with settings goes on by them, if the target claims these.
    """
    if no := unmeasured(case):
        return no
    findings = missing_records(case, "inventory", "optimizer_resumed", "optimizer_settings")
    exact, worst = case.cell.dtype == "float32", 0.0
    findings += [*_changed(case), *_frozen(case), *_norm_with_frozen(case)]
    if exact and case.claims.optimizer_settings:
        findings += _with_settings(case)
    for record in records(case, "inventory", "optimizer_resumed"):
        restored = list(_restored(case, record))
        for of in restored:
            more, far = [*otherwise(case, record, of, RESTORE)], 0.0
            if exact and not more:
                more, far = by_formula(case, record, of, (STILL, MOVED, STILL))
            findings, worst = [*findings, *more], max(worst, far)
        if not exact and in_any_order(case):
            findings += other_experts(case, record, restored, RESTORE)
    met = "nearly all elements step as before" if in_any_order(case) else "exact"
    return outcome(findings, met=within(case, worst, LIMIT) if exact else met)


def _changed(case: Case) -> Iterator[Finding]:
    """Parameters that are not what they were, before any step after a save or a restore."""
    for record in records(case, "inventory", "optimizer_resumed"):
        placed = dict(parameters(record, placement(case)))
        for what in ("save", "restore"):
            for key in (key for key in record.value("optimizer_resumed")[what] if key in placed):
                message = f"{key}: a {what} of the optimizer changes it"
                yield finding_of(case, record, key, placed[key][0], message, diagnosis=f"changed by a {what}")


def _restored(case: Case, record: RankRecord) -> Iterator[Stepped]:
    """Every parameter: as STILL where it is saved, as `moved` after the step of the restored optimizer."""
    tensors, none = record.tensors("optimizer_resumed"), torch.empty(0)
    for key, (held,) in parameters(record, step_gradients(case)[MOVED]):
        after = {STILL: SAVED, ON: ON, MOVED: RESUMED}
        yield Stepped(key, held, {step: tensors.get(f"{when}.{key}", none) for step, when in after.items()}, None)


def all_otherwise(case: Case, record: RankRecord, stepped: Sequence[Stepped], without: str) -> Iterator[Finding]:
    """As `otherwise`, of every parameter, after the last step of `rates`, and as `other_experts` where that tells more.

    In fp32 by its way: weights that have moved to other addresses may be summed in another order.
    """
    exact = case.cell.dtype == "float32"
    for one in stepped:
        yield from otherwise(case, record, one, without, way_of(case, record.rank, one) if exact else None)
    if not exact and in_any_order(case):
        yield from other_experts(case, record, stepped, without)


def all_alike(case: Case) -> str:
    """What a case meets of which `all_otherwise` finds nothing."""
    if case.cell.dtype == "float32":
        return f"within {LIMIT} of the rate"
    return "nearly all elements step as before" if in_any_order(case) else "exact"


def otherwise(case: Case, record: RankRecord, of: Stepped, without: str, way: Way | None = None) -> Iterator[Finding]:
    """The finding of a parameter that is after the step MOVED not as after ON: that step `without` something.

    With a `way` it may be LIMIT of the rate off, and more where gradients are not sure.
    """
    if not of.on_record:
        yield finding_of(case, record, of.key, of.held, f"{of.key}: no record of it around {without}")
        return
    off, most = _elsewhere(case, of) if way is None else _astray(of, way), 0.0
    if in_any_order(case) and way is None:
        if case.cell.dtype == "float32" or of.held.expert is not None:
            return
        most = (TURNED if of.key.endswith("router.weight") else ELSEWHERE) * off.numel() + FEW
    if int(off.sum()) > most:
        message = f"{of.key}: {int(off.sum())} of {off.numel()} elements are elsewhere than without {without}"
        yield finding_of(case, record, of.key, of.held, message, diagnosis=_lost(of))


def other_experts(case: Case, record: RankRecord, stepped: Sequence[Stepped], without: str) -> Iterator[Finding]:
    """As `otherwise`, of layers with too many such elements in experts: where a route turns, one has other tokens."""

    def count(of: Stepped) -> tuple[int, int]:
        return int(_elsewhere(case, of).sum()), of.after[ON].numel()

    for off, number, of in experts_of_layers(stepped, count):
        if off > TURNED * number:
            message = f"{of.key} and other experts: {off} of {number} elements are elsewhere than without {without}"
            yield finding_of(case, record, of.key, of.held, message, diagnosis=_lost(of))


def _elsewhere(case: Case, of: Stepped) -> torch.Tensor:
    """Of each element whether it is not where the step without a restore has it; on a GPU not nearly there."""
    on, again = (of.after[when].double()[: of.held.rows] for when in (ON, MOVED))
    allowed = APART * OPTIMIZER_RATE + 2 * of.last_digit if in_any_order(case) else 0.0
    return ~((again - on).abs() <= allowed)


def _astray(of: Stepped, way: Way) -> torch.Tensor:
    """As `_elsewhere`, of sums that may come in another order: the step without a restore stands for Adam's formula."""
    saved, on, again = (of.after[when].double()[: of.held.rows] for when in (STILL, ON, MOVED))
    return wrong_of(again - saved, way._replace(adds=[on - saved]))


def _lost(of: Stepped) -> str:
    """What the restored optimizer has forgotten: Adam's first step is as long as the rate wherever it moves."""
    saved, on, again = (of.after[when].double()[: of.held.rows] for when in (STILL, ON, MOVED))
    goes, went, digit = on - saved, again - saved, of.last_digit

    def tells(off: torch.Tensor) -> bool:
        moved = (goes != 0) | (went != 0)
        return float((off[moved] <= LIMIT * OPTIMIZER_RATE + digit[moved]).double().mean()) >= MOST

    if of.after[ON].dtype != torch.float32 and bool(((again - on).abs() <= digit).all()):
        return "master weights are rebuilt from the weights"
    if not bool(went.any()):
        return "not moved at all"
    for right, counted in ((2, 1), (3, 1), (3, 2)):
        if tells((went * optimizer.corrected(right) - goes * optimizer.corrected(counted)).abs()):
            return f"the step counts as number {counted}, not {right}"
    if tells((went.abs() - OPTIMIZER_RATE).abs() * (went != 0)):
        return "moments are lost"
    return how_far(went)


def _with_settings(case: Case) -> Iterator[Finding]:
    """Parameters that an optimizer with settings has elsewhere after a restore; on a GPU not nearly there."""
    allowed, none = APART * OPTIMIZER_RATE if in_any_order(case) else 0.0, torch.empty(0)
    for record in records(case, "inventory", "optimizer_settings"):
        tensors = record.tensors("optimizer_settings")
        for key, (held,) in parameters(record, placement(case)):
            on, again = (tensors.get(name, none)[: held.rows].double() for name in (key, f"{RESUMED}.{key}"))
            if on.shape != held.tensor[: held.rows].shape or again.shape != on.shape:
                yield finding_of(case, record, key, held, f"{key}: no record of it with settings behind a restore")
            elif off := int((~((again - on).abs() <= allowed)).sum()):
                message = f"{key}: with settings {off} of {on.numel()} elements are elsewhere than without the restore"
                begun = from_loaded(case, record, key, held, none).after[STILL][: held.rows].double()
                yield finding_of(case, record, key, held, message, diagnosis=_decay(begun, on, again))


def _decay(held: torch.Tensor, on: torch.Tensor, again: torch.Tensor) -> str:
    """The weight decay after a restore, if nothing else tells the step from that without one."""
    large = held.abs() > 0.1 * held.abs().max()
    less = (again - on)[large] / (OPTIMIZER_RATE * held[large])
    middle = less.median()
    alike = bool(((less - middle).abs() <= 0.1 * middle.abs()).all())
    return f"a weight decay of {abs(SETTINGS['weight_decay'] - float(middle)):.2g}" if alike else ""


def _frozen(case: Case) -> Iterator[Finding]:
    """Routers that were frozen and have moved, and in fp32 other parameters that Adam's formula has elsewhere."""
    exact, none = case.cell.dtype == "float32", torch.empty(0)
    for record in records(case, "inventory", "optimizer_resumed"):
        tensors = record.tensors("optimizer_resumed")
        for key, (held,) in parameters(record, placement(case)):
            moved = tensors.get(f"{FROZEN}.{key}", none)
            if moved.shape != held.tensor.shape:
                yield finding_of(case, record, key, held, f"{key}: no record of it after steps with routers frozen")
            elif is_frozen(key):
                if difference := compare(held.tensor, moved, held.rows):
                    message = f"{key}: it was frozen, and after a step {difference.text}"
                    details = {"diagnosis": "moved though frozen", **difference.told}
                    yield finding_of(case, record, key, held, message, **details)
            elif exact:
                for found in by_formula(case, record, from_loaded(case, record, key, held, moved), (STILL, MOVED))[0]:
                    yield replace(found, message=f"with routers frozen {found.message}")


def _norm_with_frozen(case: Case) -> Iterator[Finding]:
    """The norm of a step with routers frozen, where the target computes one, against that of all other gradients."""
    held = records(case, "inventory", "optimizer_resumed")
    own = (of for record in held for key, (of,) in parameters(record, placement(case)) if is_frozen(key))
    frozen = {name for of in own for name in of.hf}
    gradients, limit = whole_gradients(case)[MOVED], norm_limit(case)
    want = optimizer.norm({name: gradient for name, gradient in gradients.items() if name not in frozen})
    for record in held:
        got = record.value("optimizer_resumed")[FROZEN]
        if got is not None and not abs(got / want - 1.0) <= limit:
            whole = abs(got / right_norms(case)[MOVED] - 1.0) <= limit
            message = f"with routers frozen the norm of the gradient is {got:.8g}, that of all others' {want:.8g}"
            told = {"expected": want, "got": got, "diagnosis": "that of all gradients, frozen ones too" * whole}
            yield finding(case, record.rank, "optimizer_resumed", message, **told)
