"""OPT: steps of an optimizer from the weights that were loaded: at the rate 0 none moves, at another all do.

The gradient of one step is that of the first microbatch, and that of the others is of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord, digest
from moeref_conformance.contract.requests.optimizer import (
    FROZEN,
    MOVED,
    ON,
    RELOADED,
    RESUMED,
    SAVED,
    SETTINGS,
    STILL,
    is_frozen,
    of_one_microbatch,
    rates,
)
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.judges import Case, judges, optimizer_causes
from moeref_conformance.judges.common import (
    expected,
    finding,
    in_any_order,
    less_one,
    missing_records,
    once,
    outcome,
    parameters,
    placement,
    records,
    tolerance,
    unmeasured,
    values,
    within,
)
from moeref_conformance.judges.observed_routes import native_gradients
from moeref_conformance.oracles import optimizer
from moeref_conformance.oracles.placement import ExpectedShard, Placement, hf_numbers
from moeref_conformance.oracles.published import COPIES

#: Of the largest gradient of a tensor. Smaller ones may have another sign: they are right within 1e-4 of it (GRD-001).
TELLING = 1e-3
#: The least gradient of which Adam's epsilon hides no more than LIMIT.
LEAST = 1e-5
#: Of the rate: how far an element may be from where Adam moves it.
LIMIT = 2e-3
#: Of the norm: how far it may be off. Of one flat buffer in fp32 `torch.norm` is up to 3e-5 off on a CPU.
NORM_LIMIT = 5e-5
#: How far it should be off at most. The largest seen tensor by tensor is 5e-7, and without the sinks of half of the
#: heads 5e-6.
NEAR = 3e-6
#: The same below fp32, where rounding turns gradients, and routes with them. The largest seen is 5e-3.
TURNED_NORM = 0.1
#: Below fp32: the share of elements, and a number, that may be elsewhere, since rounding turns gradients.
ELSEWHERE, FEW = 0.1, 4
#: So many elements may all be elsewhere, in a parameter of which others move: of one, seen on a GPU.
LUCK = 2
#: Of a router, and of all experts of a layer: tokens that go to other experts turn more of them.
TURNED = 0.25
#: Below fp32: the share of the elements that only small steps together move which may stand still.
LOST = 0.5
#: Of a step: how far one after a restore may be on a GPU below fp32, beside two digits, where sums change their order.
APART = 0.25
#: The share of elements that tells what a restored optimizer has lost.
MOST = 0.9
#: Of a digit: what alone moves nothing, and what does together.
FAINT, TOGETHER = 0.49, 0.6


@judges("OPT-001", exact=True)
def a_step_at_rate_zero_moves_nothing(case: Case) -> Iterator[Finding]:
    """Every parameter after it, against the checkpoint's shard; the same after another load."""
    yield from missing_records(case, "inventory", "optimizer")
    for record in records(case, "inventory", "optimizer"):
        for of in _parameters(case, placement(case), record):
            before = {f"{row['chunk']}:{row['local']}": row["digest"] for row in _begun(record)}.get(of.key)
            yield from _moved_at_rate_zero(case, record, of, of.after[STILL], "loaded", before)
            if of.reloaded is not None:
                before = digest(list(of.after.values())[-1])
                yield from _moved_at_rate_zero(case, record, of, of.reloaded, "loaded again", before)


def _moved_at_rate_zero(
    case: Case, record: RankRecord, of: _Stepped, after: torch.Tensor, how: str, before: str | None
) -> Iterator[Finding]:
    """The finding of a parameter that is not as it was loaded; `before` is the digest of what it held until then."""
    difference = compare(of.held.tensor, after, of.held.rows)
    if difference is not None and not less_one(case, of.key, of.held, after):
        said = f"what it held before it was {how}" if before == digest(after) else ""
        message = f"{of.key}: {how}, and after a step at the rate 0 {difference.text}"
        yield _found(case, record, of.key, of.held, message, diagnosis=said, **difference.told)


@judges("OPT-002")
def a_step_moves_every_weight(case: Case) -> Outcome:
    """In fp32 each element against Adam's formula and transformers' gradients.

    In bf16, where rounding turns routes: nearly all elements with a gradient move where the formula has them, of a
    router and of the experts of a layer most. None moves further than the rate. Steps of less than half of a weight's
    last digit add up. Ranks that share a parameter agree.
    """
    if no := unmeasured(case):
        return no
    findings, worst = missing_records(case, "inventory", "optimizer"), 0.0
    exact = case.cell.dtype == "float32"
    for record in records(case, "inventory", "optimizer"):
        stepped = list(_parameters(case, _gradients(case)[MOVED], record))
        for of in stepped:
            if not _on_record(of):
                findings.append(_found(case, record, of.key, of.held, f"{of.key}: no record of it after a step"))
                continue
            if exact:
                more, far = _by_formula(case, record, of)
                findings, worst = [*findings, *more], max(worst, far)
            else:
                findings += _in_bf16(case, record, of)
        if not exact:
            findings += [*_experts(case, record, stepped), *_adding_up(case, record, stepped)]
    findings += [] if exact else _apart(case)
    return outcome(findings, met=within(case, worst, LIMIT) if exact else "every tensor moves, by the rate at most")


@judges("OPT-003")
def norms_are_the_models(case: Case) -> Outcome:
    """Where the target computes one, against the norm of transformers' gradients: of the weights that were loaded.

    In bf16, where rounding turns routes and gradients with them, within a tenth.
    """
    return _norms(case, NORM_LIMIT if case.cell.dtype == "float32" else TURNED_NORM)


@judges("OPT-005")
def norms_are_the_models_to_the_last_parameters(case: Case) -> Outcome:
    """As OPT-003, so near that small parameters show."""
    return _norms(case, NEAR)


@once
def _right_norms(case: Case) -> Mapping[str, float]:
    """The norm of transformers' gradients, by step."""
    return {step: optimizer.norm(_trained(placed.tensors)) for step, placed in _gradients(case).items()}


@once
def _norms_of_parts(case: Case) -> dict[str, list[float]]:
    """The norm of the experts' gradients in the steps `STILL` and `MOVED`, and that of the others."""
    trained = [_trained(_gradients(case)[step].tensors) for step in (STILL, MOVED)]
    own = [{name: of for name, of in one.items() if hf_numbers(name)[1] is not None} for one in trained]
    rest = [{name: of for name, of in one.items() if hf_numbers(name)[1] is None} for one in trained]
    return {"experts": [*map(optimizer.norm, own)], "all but experts": [*map(optimizer.norm, rest)]}


def _norms(case: Case, limit: float) -> Outcome:
    """How far norms of gradients are off those of the model."""
    if no := unmeasured(case):
        return no
    findings, worst, none = missing_records(case, "optimizer"), 0.0, True
    wants = _right_norms(case)
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


def _counted(case: Case, norms: Mapping[str, float | None]) -> str:
    """What counts otherwise in a rank's norms in fp32."""
    if case.cell.dtype != "float32":
        return ""
    gradients = {step: _trained(_gradients(case)[step].tensors) for step in (STILL, MOVED)}
    return optimizer_causes.norms_of(gradients, norms, case.cell.layout)


@judges("OPT-004")
def a_restored_optimizer_goes_on(case: Case) -> Outcome:
    """The step after a restore against that of the optimizer that was saved; in fp32 also against Adam's formula.

    It is the third, after two whose gradients differ; its own is that of the first.

    Bit for bit; on a GPU in fp32 by the formula alone, in bf16 nearly all elements nearly so. Until it steps, weights
    are those of the save. Of one that is made while routers are frozen these stay, and in fp32 the others move.
    """
    if no := unmeasured(case):
        return no
    findings, worst = [*missing_records(case, "inventory", "optimizer_resumed"), *_changed(case)], 0.0
    exact = case.cell.dtype == "float32"
    findings += [*_frozen(case), *_norm_with_frozen(case)]
    for record in records(case, "inventory", "optimizer_resumed"):
        restored = list(_restored(case, record))
        for of in restored:
            more, far = [*_interrupted(case, record, of)], 0.0
            if exact and not more:
                more, far = _by_formula(case, record, of, (STILL, MOVED, STILL))
            findings, worst = [*findings, *more], max(worst, far)
        if not exact and in_any_order(case):
            findings += _interrupted_experts(case, record, restored)
    met = "nearly all elements step as before" if in_any_order(case) else "exact"
    return outcome(findings, met=within(case, worst, LIMIT) if exact else met)


def _changed(case: Case) -> Iterator[Finding]:
    """Parameters that are not what they were, before any step after a save or a restore."""
    for record in records(case, "inventory", "optimizer_resumed"):
        placed = dict(parameters(record, placement(case)))
        for what in ("save", "restore"):
            for key in (key for key in record.value("optimizer_resumed")[what] if key in placed):
                message = f"{key}: a {what} of the optimizer changes it"
                yield _found(case, record, key, placed[key][0], message, diagnosis=f"changed by a {what}")


def _frozen(case: Case) -> Iterator[Finding]:
    """Routers that were frozen and have moved, and in fp32 other parameters that Adam's formula has elsewhere."""
    exact, none = case.cell.dtype == "float32", torch.empty(0)
    for record in records(case, "inventory", "optimizer_resumed"):
        tensors = record.tensors("optimizer_resumed")
        for key, (held,) in parameters(record, placement(case)):
            moved = tensors.get(f"{FROZEN}.{key}", none)
            if moved.shape != held.tensor.shape:
                yield _found(case, record, key, held, f"{key}: no record of it after steps with routers frozen")
            elif is_frozen(key):
                if difference := compare(held.tensor, moved, held.rows):
                    message = f"{key}: it was frozen, and after a step {difference.text}"
                    yield _found(case, record, key, held, message, diagnosis="moved though frozen", **difference.told)
            elif exact:
                for found in _by_formula(case, record, _from_loaded(case, record, key, held, moved), (STILL, MOVED))[0]:
                    yield replace(found, message=f"with routers frozen {found.message}")


def _from_loaded(case: Case, record: RankRecord, key: str, held: ExpectedShard, moved: torch.Tensor) -> _Stepped:
    """A parameter that has `moved` from what was loaded."""
    still = record.tensor("optimizer", f"{STILL}.{key}")
    less = still is not None and less_one(case, key, held, still)
    return _Stepped(key, held, {STILL: held.tensor - 1 if less else held.tensor, MOVED: moved}, None)


def _norm_with_frozen(case: Case) -> Iterator[Finding]:
    """The norm of a step with routers frozen, where the target computes one, against that of all other gradients."""
    held = records(case, "inventory", "optimizer_resumed")
    own = (of for record in held for key, (of,) in parameters(record, placement(case)) if is_frozen(key))
    frozen = {name for of in own for name in of.hf}
    gradients = _trained(_gradients(case)[MOVED].tensors)
    want = optimizer.norm({name: gradient for name, gradient in gradients.items() if name not in frozen})
    limit = NORM_LIMIT if case.cell.dtype == "float32" else TURNED_NORM
    for record in held:
        got = record.value("optimizer_resumed")[FROZEN]
        if got is not None and not abs(got / want - 1.0) <= limit:
            whole = abs(got / optimizer.norm(gradients) - 1.0) <= limit
            message = f"with routers frozen the norm of the gradient is {got:.8g}, that of all others' {want:.8g}"
            told = {"expected": want, "got": got, "diagnosis": "that of all gradients, frozen ones too" * whole}
            yield finding(case, record.rank, "optimizer_resumed", message, **told)


@judges("OPT-006")
def settings_reach_the_optimizer(case: Case) -> Outcome:
    """The second of two steps that are made with settings, against the formula with these."""
    if no := unmeasured(case):
        return no
    findings, worst, none = missing_records(case, "inventory", "optimizer_settings"), 0.0, torch.empty(0)
    for record in records(case, "inventory", "optimizer_settings"):
        tensors = record.tensors("optimizer_settings")
        for key, (held,) in parameters(record, placement(case)):
            of = _from_loaded(case, record, key, held, tensors.get(key, none))
            if not _on_record(of):
                findings.append(_found(case, record, key, held, f"{key}: no record of it after steps with settings"))
                continue
            found, far = _by_formula(case, record, of, (STILL, MOVED), optimizer.read(SETTINGS))
            findings += [replace(one, message=f"with settings {one.message}") for one in found]
            worst = max(worst, far)
    return outcome(findings, met=within(case, worst, LIMIT))


def _restored(case: Case, record: RankRecord) -> Iterator[_Stepped]:
    """Every parameter: as STILL where it is saved, as `moved` after the step of the restored optimizer."""
    tensors, none = record.tensors("optimizer_resumed"), torch.empty(0)
    for key, (held,) in parameters(record, _gradients(case)[MOVED]):
        after = {STILL: SAVED, ON: ON, MOVED: RESUMED}
        yield _Stepped(key, held, {step: tensors.get(f"{when}.{key}", none) for step, when in after.items()}, None)


def _interrupted(case: Case, record: RankRecord, of: _Stepped) -> Iterator[Finding]:
    """The finding of a parameter that steps otherwise after a restore."""
    if not _on_record(of):
        yield _found(case, record, of.key, of.held, f"{of.key}: no record of it around a restore")
        return
    off, most = _elsewhere(case, of), 0.0
    if in_any_order(case):
        if case.cell.dtype == "float32" or of.held.expert is not None:
            return
        most = (TURNED if of.key.endswith("router.weight") else ELSEWHERE) * off.numel() + FEW
    if int(off.sum()) > most:
        message = f"{of.key}: {int(off.sum())} of {off.numel()} elements are elsewhere than without the restore"
        yield _found(case, record, of.key, of.held, message, diagnosis=_lost(of))


def _interrupted_experts(case: Case, record: RankRecord, restored: Sequence[_Stepped]) -> Iterator[Finding]:
    """Layers of whose experts too many elements step otherwise: where a route turns, one has other tokens or none."""
    for off, number, of in _of_layers(restored, lambda of: (int(_elsewhere(case, of).sum()), of.after[ON].numel())):
        if off > TURNED * number:
            message = f"{of.key} and other experts: {off} of {number} elements are elsewhere than without the restore"
            yield _found(case, record, of.key, of.held, message, diagnosis=_lost(of))


def _of_layers(
    stepped: Iterable[_Stepped], count: Callable[[_Stepped], tuple[int, int]]
) -> Iterator[tuple[int, int, _Stepped]]:
    """Both counts over all experts of a layer that are on record, and the expert that has the most of the first."""
    layers: dict[int | None, list[tuple[int, int, _Stepped]]] = {}
    for of in stepped:
        if of.held.expert is not None and _on_record(of):
            layers.setdefault(of.held.layer, []).append((*count(of), of))
    for found in layers.values():
        yield sum(one[0] for one in found), sum(one[1] for one in found), max(found, key=lambda one: one[0])[2]


def _on_record(of: _Stepped) -> bool:
    return all(len(after[: of.held.rows]) == len(of.held.tensor[: of.held.rows]) for after in of.after.values())


def _elsewhere(case: Case, of: _Stepped) -> torch.Tensor:
    """Of each element whether it is not where the step without a restore has it; on a GPU not nearly there."""
    on, again = (of.after[when].double()[: of.held.rows] for when in (ON, MOVED))
    allowed = APART * OPTIMIZER_RATE + 2 * _digit(of) if in_any_order(case) else 0.0
    return ~((again - on).abs() <= allowed)


def _lost(of: _Stepped) -> str:
    """What the restored optimizer has forgotten: Adam's first step is as long as the rate wherever it moves."""
    saved, on, again = (of.after[when].double()[: of.held.rows] for when in (STILL, ON, MOVED))
    goes, went, digit = on - saved, again - saved, _digit(of)

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
    return _times(went)


def _trained(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of parameters. Copies of embedding and head that a checkpoint has with each layer are none of their own."""
    own = {name: gradient for name, gradient in gradients.items() if not gradient.isnan().any()}
    return {name: own[name] for name in own if not (name.startswith("model.layers.") and name.endswith(COPIES))}


@once
def _gradients(case: Case) -> dict[str, Placement]:
    """transformers' gradients of each step."""
    counted = {step: case.cell.rows if step == of_one_microbatch(case.cell) else None for step in rates(case.cell)}
    found = {step: native_gradients(case, counted=rows) for step, rows in counted.items()}
    return {step: Placement(case.cell, expected(case).config, gradients) for step, gradients in found.items()}


def _begun(record: RankRecord) -> list[dict[str, Any]]:
    """Digests of what the tensors held before they were loaded; none where a cell does not record them."""
    return list((record.value("begun") if record.has("begun") else None) or ())


class _Stepped(NamedTuple):
    """A parameter: `chunk:local`, what the oracle has there, and its values after each step, empty if not on record.

    `reloaded` are those after the checkpoint was loaded again; None of a target that does not.
    """

    key: str
    held: ExpectedShard
    after: dict[str, torch.Tensor]
    reloaded: torch.Tensor | None


def _parameters(case: Case, placed: Placement, record: RankRecord) -> Iterator[_Stepped]:
    """Every parameter of a rank that the oracle knows."""
    tensors, none = record.tensors("optimizer"), torch.empty(0)
    reloaded = any(name.startswith(f"{RELOADED}.") for name in tensors)
    for key, (held,) in parameters(record, placed):
        again = tensors.get(f"{RELOADED}.{key}", none) if reloaded else None
        yield _Stepped(key, held, {step: tensors.get(f"{step}.{key}", none) for step in rates(case.cell)}, again)


def _found(case: Case, record: RankRecord, key: str, held: ExpectedShard, message: str, **more: object) -> Finding:
    names = {"local_name": key.partition(":")[2], "hf_name": held.hf[0] if held.hf else ""}
    return finding(case, record.rank, "optimizer", message, **{**names, "layer": held.layer, **more})


class _Way(NamedTuple):
    """What each step that moves weights adds to a parameter by Adam's formula, and where the gradients are sure."""

    adds: list[torch.Tensor]
    tells: torch.Tensor
    none: torch.Tensor  # where there is no gradient
    gradients: list[torch.Tensor]


def _way(
    case: Case, rank: int, of: _Stepped, steps: Sequence[str] = (), settings: optimizer.Settings = optimizer.PLAIN
) -> _Way:
    """`steps` are those whose gradients are taken, in order; without them each is, once. Of no decay."""
    chunk, _, local = of.key.partition(":")
    sources = of.held.hf or ("model.embed_tokens.weight",)  # a tied head's replica names none
    gradients, floor = list[torch.Tensor](), LEAST
    for placed in (_gradients(case)[step] for step in steps or rates(case.cell)):
        held = placed.shard(rank, int(chunk), local, list(of.held.tensor.shape))
        gradients.append(held.tensor[: of.held.rows].double())
        floor = max(floor, TELLING * max(placed.largest(name) for name in sources))
    norms = _norms_of(case, steps)
    adds = [
        optimizer.update(gradients[:number], OPTIMIZER_RATE, settings, norms[:number])
        for number in range(2, len(gradients) + 1)
    ]
    size = torch.stack(gradients).square().mean(0).sqrt()
    return _Way(adds, size > floor, size == 0, gradients)


def _norms_of(case: Case, steps: Sequence[str]) -> list[float]:
    """The right norm of all gradients in each of `steps`; without them in each there is, once."""
    return [_right_norms(case)[step] for step in steps or rates(case.cell)]


def _by_formula(
    case: Case,
    record: RankRecord,
    of: _Stepped,
    steps: Sequence[str] = (),
    settings: optimizer.Settings = optimizer.PLAIN,
) -> tuple[list[Finding], float]:
    """The finding of a parameter, if there is one, and its distance from what is right, relative to the rate.

    That of the last of `steps`, by their gradients. A parameter of one dimension may decay or not.
    """
    way = _way(case, record.rank, of, steps, settings)
    held = of.after[STILL].double()[: of.held.rows]
    added = of.after[MOVED].double()[: of.held.rows] - held
    decays = (settings.decay, 0.0) if held.dim() == 1 else (settings.decay,)
    tried = [(decay, added + decay * OPTIMIZER_RATE * held) for decay in decays]
    decay, moved = min(tried, key=lambda one: int(_wrong(one[1], way).sum()))
    wrong, right = _wrong(moved, way), way.adds[-1]
    if not bool(wrong.any()):
        return [], float((moved - right).abs()[way.tells].max()) / OPTIMIZER_RATE if bool(way.tells.any()) else 0.0
    message = f"{of.key}: {int(wrong.sum())} of {wrong.numel()} elements are not where Adam moves them"
    said = _said(moved, right, way.tells)
    if not said:
        norms, parts = _norms_of(case, steps), _norms_of_parts(case) if settings.clip else {}
        told, asked = way.tells | way.none, settings._replace(decay=decay)
        step = optimizer_causes.Step(way.gradients, norms, held, added, told, OPTIMIZER_RATE, asked, parts)
        said = optimizer_causes.step_of(step, LIMIT)
    return [_found(case, record, of.key, of.held, message, diagnosis=said or _times(added))], 0.0


def _wrong(added: torch.Tensor, way: _Way) -> torch.Tensor:
    """The elements that Adam does not move so, and of those of which no more is sure any that moves much further."""
    off = (added - way.adds[-1]).abs() / OPTIMIZER_RATE
    far = added.abs() > OPTIMIZER_RATE * (1 + LIMIT)
    return torch.where(way.tells | way.none, off > LIMIT, far) | added.isnan()


def _said(added: torch.Tensor, right: torch.Tensor, tells: torch.Tensor) -> str:
    if not bool(added.any()):
        return "not moved at all"
    upwards = bool(tells.any()) and torch.allclose(added[tells], -right[tells], rtol=0.1)
    return "moved up the gradient" if upwards else ""


def _times(added: torch.Tensor) -> str:
    return f"moved by up to {float(added.abs().max()) / OPTIMIZER_RATE:.3g} times the rate"


def _in_bf16(case: Case, record: RankRecord, of: _Stepped) -> Iterator[Finding]:
    """Elements that stand still or move up the gradient, and elements that moved further than the rate."""
    still, last = (values.double()[: of.held.rows] for values in _ends(of))
    added, most = last - still, OPTIMIZER_RATE * (len(of.after) - 1) * (1 + LIMIT)
    if not bool((added.abs() <= most + 2 * _digit(of)).all()):
        message = f"{of.key}: elements moved further than {tolerance(case, OPTIMIZER_RATE)} in a step, the rate"
        yield _found(case, record, of.key, of.held, message, diagnosis=_times(added))
    if of.held.expert is None:
        yield from _not_moved(case, record, of)


def _not_moved(case: Case, record: RankRecord, of: _Stepped) -> Iterator[Finding]:
    """The finding of a parameter that is no expert's, if too many elements do not move where the formula has them."""
    astray, sure = _astray(case, record.rank, of)
    most = TURNED * sure if of.key.endswith("router.weight") else ELSEWHERE * sure + FEW
    none = 0 < sure == astray and (sure > LUCK or torch.equal(*_ends(of)))
    if astray > most or none:
        message = f"{of.key}: {astray} of {sure} elements with a gradient did not move down it"
        yield _found(case, record, of.key, of.held, message, diagnosis=_said_of(of))


def _astray(case: Case, rank: int, of: _Stepped) -> tuple[int, int]:
    """Of how many elements that move by more than their last digit, and how many of them stand still or move up."""
    still, last = (values.double()[: of.held.rows] for values in _ends(of))
    way = _way(case, rank, of)
    due = torch.stack(way.adds).sum(0)
    sure = way.tells & (due.abs() > _digit(of))
    return int((sure & ((last - still) * due <= 0)).sum()), int(sure.sum())


def _said_of(of: _Stepped) -> str:
    return "not moved at all" if torch.equal(*_ends(of)) else "not moved in part"


def _ends(of: _Stepped) -> tuple[torch.Tensor, torch.Tensor]:
    """What a parameter holds after the first step, and after the last one."""
    still, *_, last = of.after.values()
    return still, last


def _digit(of: _Stepped) -> torch.Tensor:
    """The last digit of each element, where it has been largest."""
    values = torch.stack([values[: of.held.rows].double().abs() for values in of.after.values()])
    return torch.finfo(of.after[STILL].dtype).eps * torch.exp2(values.amax(0).clamp_min(1e-30).log2().floor())


def _experts(case: Case, record: RankRecord, stepped: Sequence[_Stepped]) -> Iterator[Finding]:
    """Experts of layers in which too many elements do not move where the formula has them: one may have no token."""
    for astray, sure, of in _of_layers(stepped, lambda of: _astray(case, record.rank, of)):
        if astray > TURNED * sure:
            message = f"{of.key} and other experts: {astray} of {sure} elements with a gradient did not move down it"
            yield _found(case, record, of.key, of.held, message, diagnosis=_said_of(of))


def _adding_up(case: Case, record: RankRecord, stepped: Sequence[_Stepped]) -> Iterator[Finding]:
    """Weights of which no step moves half of the last digit, and all of them more than that."""
    due = stand = 0
    for of in stepped:
        way = _way(case, record.rank, of)
        still, last = (values.double()[: of.held.rows] for values in _ends(of))
        adds, digit = torch.stack(way.adds), _digit(of)
        sure = way.tells & (adds.abs().amax(0) < FAINT * digit) & (adds.sum(0).abs() > TOGETHER * digit)
        due, stand = due + int(sure.sum()), stand + int((sure & (last == still)).sum())
    if stand > LOST * due:
        message = f"{stand} of {due} elements did not move in {len(rates(case.cell)) - 1} steps that add up to a digit"
        yield finding(case, record.rank, "optimizer", message, diagnosis="small steps are lost")


def _apart(case: Case) -> Iterator[Finding]:
    """Parameters that ranks share and hold otherwise."""
    first: dict[tuple[str, str], tuple[int, torch.Tensor]] = {}
    for record in records(case, "inventory", "optimizer"):
        for of in _parameters(case, placement(case), record):
            last, same = of.after["again"][: of.held.rows], (of.key, digest(of.held.tensor.contiguous()))
            rank, other = first.setdefault(same, (record.rank, last))
            apart = int((last != other).sum()) if last.shape == other.shape else last.numel()
            if apart > ELSEWHERE * last.numel():
                told = f"{apart} of {last.numel()} elements are not what rank {rank} has after the same steps"
                yield _found(case, record, of.key, of.held, f"{of.key}: {told}", diagnosis="replicas part")
