"""Facet `optimizer`: an optimizer that is made before the weights are loaded takes steps from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Optimizer
from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.contract.requests.logprobs import temperature
from moeref_conformance.contract.requests.optimizer import (
    BACK,
    BEFORE,
    BROKEN_OFF,
    FROZEN,
    LEVEL,
    LOADED,
    MOVED,
    NOT_FINITE,
    OFFLOADED,
    ON,
    RELOADED,
    RESUMED,
    SAVED,
    SCHEDULE,
    SCHEDULED,
    SENT,
    SETTINGS,
    STILL,
    TRAINED,
    WAS,
    WITH_BOTH,
    is_frozen,
    of_one_microbatch,
    rates,
    saved_at,
)
from moeref_conformance.steps import logprobs
from moeref_conformance.steps.export import items
from moeref_conformance.steps.facet import Context, Facet, Stage, Step, refusal
from moeref_conformance.steps.gradients import apart, batch, of_replica
from moeref_conformance.steps.tensors import copied, module_tensors, same_bytes


def stepped(optimizer: Optimizer, context: Context) -> dict[str, float | None]:
    """The norm of the gradient by step; saves all parameters after each, by `step.chunk:local`.

    Between them weights are sent and logits computed, as RL does. After the first one that moves weights a reference
    policy is asked, of which `reference` tells, and what is sent then is saved as `sent.…`. Logits and
    log-probabilities that are asked for before that are saved as `trained.…`. In fp32 a step at the rate 0 follows,
    whose norm is that of moved weights. After the last one the checkpoint is loaded again, unless the target refuses to
    load twice. Weights that are sent then, and logits, are saved as `loaded.…`. A step at the rate 0 follows, after
    which the reference policy is asked once more. In the end the parameters hold what they did before.
    """
    cell, tokens_BS = context.cell, load_file(context.input("tokens"))["tokens"]
    norms, saved = dict[str, float | None](), dict[str, torch.Tensor]()
    loaded = {name: copied(parameter) for name, parameter in _parameters(context).items()}
    logits = _logits(context.facet("forward").logits(tokens_BS), tokens_BS) if _has_reference(context) else {}
    for step, rate in rates(cell).items():
        norm = optimizer.step(_rows(context, step == of_one_microbatch(cell)), rate)
        norms[step] = None if norm is None else float(norm)
        saved |= {f"{step}.{name}": copied(parameter) for name, parameter in _parameters(context).items()}
        if step == MOVED:
            if _has_reference(context):
                context.made["reference"] = _beside(optimizer, context, logits, tokens_BS)
            saved |= _trained(context, tokens_BS) | _sent(context)
        elif len(norms) < len(rates(cell)):
            deque(context.facet("export").stream(), maxlen=0)
        if len(norms) < len(rates(cell)) and "forward" in context.claims.facets:
            context.facet("forward").logits(tokens_BS)
    if cell.dtype == "float32":
        norm = optimizer.step(_rows(context, False), 0.0)
        norms[TRAINED] = None if norm is None else float(norm)
    if refusal(context.facet("export").load, context.input("checkpoint")) is None:
        saved |= _loaded_again(context, tokens_BS)
        optimizer.step(_rows(context, True), 0.0)
        saved |= {f"{RELOADED}.{name}": copied(parameter) for name, parameter in _parameters(context).items()}
        if _has_reference(context):
            context.made["reference"]["again"] = _beside(optimizer, context, logits, tokens_BS)
    context.save("optimizer", saved)
    for name, parameter in _parameters(context).items():
        parameter.data.copy_(loaded[name])
    return norms


def reference(optimizer: Optimizer, context: Context) -> dict[str, Any] | None:
    """What `stepped` has seen of a reference policy; None where the target claims none."""
    told: dict[str, Any] | None = context.made.pop("reference", None)
    return told


def _has_reference(context: Context) -> bool:
    return context.claims.optimizer_reference and "forward" in context.claims.facets


def _logits(logits_BSV: torch.Tensor | None, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of tokens, where a rank has any."""
    if logits_BSV is None:
        return {}
    return {"logits": copied(logits_BSV).where((tokens_BS >= 0)[..., None], 0.0)}


def _beside(
    optimizer: Optimizer, context: Context, logits: dict[str, torch.Tensor], tokens_BS: torch.Tensor
) -> dict[str, Any]:
    """How far logits of a reference policy are off these, and what asking for them has changed by `chunk:local`.

    Meanwhile the model's buffers have another sign, as if a step had moved the experts' bias. Then all are as before.
    """
    _turn_buffers(context)
    before = _copies(context)
    given = _logits(optimizer.reference(tokens_BS), tokens_BS)
    changed = _unlike(before, _tensors(context))
    _put(context, before)
    _turn_buffers(context)
    return {"off": apart(logits, given).get("logits"), "changed": changed}


def _turn_buffers(context: Context) -> None:
    for _, _, kind, tensor in module_tensors(context.facet("export").chunks()):
        if kind == "buffer" and tensor.is_floating_point():
            tensor.data.neg_()


def _trained(context: Context, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits and log-probabilities of moved weights, where a rank has any."""
    cell, found = context.cell, _answers(context, tokens_BS)
    if "logprobs" in context.claims.facets and logprobs.asked(cell):
        found |= logprobs.checked(context.facet("logprobs").logprobs(tokens_BS, temperature(cell)))
    return {f"{TRAINED}.{name}": of for name, of in found.items()}


def _loaded_again(context: Context, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is sent, and logits where a rank has any, once the checkpoint is loaded again."""
    found = _sent(context) | _answers(context, tokens_BS)
    return {f"{LOADED}.{name}": of for name, of in found.items()}


def _sent(context: Context) -> dict[str, torch.Tensor]:
    """What this rank is given of a stream, by `sent.` and Hugging Face's name."""
    pairs = items(context.facet("export").stream(), "stream")
    return {f"{SENT}.{meta.name}": copied(tensor) for meta, tensor in pairs if tensor is not None}


def resumed(optimizer: Optimizer, context: Context) -> dict[str, Any] | None:
    """Save after two steps, take a third, and take it again from the save with a new optimizer.

    The optimizer is saved and restored between the first two steps as well, so that the second save is that of a
    restored optimizer, after a number of steps other than its own. After the second restore a reference policy is
    asked, if there is one, and weights are sent, as a run of RL begins; after its step answers are asked for and
    weights sent again. Last, an optimizer that is made while routers are frozen takes two steps from the loaded
    weights.

    Saves all parameters as `saved.chunk:local`, `on.…` after the third step, `resumed.…` after the same one of the new
    optimizer, and `frozen.…`; then they hold what they did before. What is asked for and sent after the new one's step
    is saved as `trained.…` and `sent.…`. The value has the parameters that the second save and the second restore have
    changed, and the norm of the last step's gradient. None, without any step, where the target does not claim to save.
    """
    if not context.claims.optimizer_saves:
        return None
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    first_BS, second_BS = (_rows(context, step == of_one_microbatch(context.cell)) for step in (STILL, MOVED))
    kept = {"loaded": _copies(context)}
    optimizer.make()
    optimizer.step(first_BS, saved_at(context.cell))
    _made_anew(optimizer, _saved(optimizer, context, 1))
    optimizer.step(second_BS, saved_at(context.cell))
    kept[SAVED] = _copies(context)
    folder = _saved(optimizer, context, 2)
    changed = {"save": _unlike(kept[SAVED], _parameters(context))}
    optimizer.step(first_BS, OPTIMIZER_RATE)
    kept[ON] = _copies(context)
    _put(context, kept[SAVED])
    _made_anew(optimizer, folder)
    changed["restore"] = _unlike(kept[SAVED], _parameters(context))
    if _has_reference(context):
        _beside(optimizer, context, {}, tokens_BS)
    deque(context.facet("export").stream(), maxlen=0)
    optimizer.step(first_BS, OPTIMIZER_RATE)
    kept[RESUMED] = _copies(context)
    behind = _trained(context, tokens_BS) | _sent(context)
    _put(context, kept["loaded"])
    norm, kept[FROZEN] = _with_routers_frozen(optimizer, context, first_BS, second_BS)
    _put(context, kept.pop("loaded"))
    names = _parameters(context)
    saved = {f"{when}.{name}": of[name] for when, of in kept.items() for name in names}
    context.save("optimizer_resumed", saved | behind)
    return {**changed, FROZEN: norm}


def _with_routers_frozen(
    optimizer: Optimizer, context: Context, first_BS: torch.Tensor, second_BS: torch.Tensor
) -> tuple[float | None, dict[str, torch.Tensor]]:
    """All tensors after two steps of a new optimizer, of which the second moves weights, but none of a router.

    Before them, the norm of the second step's gradient.
    """
    routers = [of for name, of in _parameters(context).items() if is_frozen(name) and of.requires_grad]
    for parameter in routers:
        parameter.requires_grad_(False)
    try:
        optimizer.make()
        optimizer.step(first_BS, 0.0)
        norm = optimizer.step(second_BS, OPTIMIZER_RATE)
        return None if norm is None else float(norm), _copies(context)
    finally:
        for parameter in routers:
            parameter.requires_grad_(True)


def with_settings(optimizer: Optimizer, context: Context) -> None:
    """Save all parameters after the second step of an optimizer that is made with settings; the first is at the rate 0.

    Where the target claims to save, the optimizer is saved between the two, and a new one with the same settings takes
    the second step from there: these parameters are saved as `resumed.chunk:local`. Where it claims schedules, one that
    is made with these settings and a schedule of one rate takes the second step alone: `both.chunk:local`. Then all
    hold what they did before. Nothing is asked of a target that takes no settings, nor below fp32.
    """
    if not context.claims.optimizer_settings or context.cell.dtype != "float32":
        return
    first_BS, second_BS = (_rows(context, step == of_one_microbatch(context.cell)) for step in (STILL, MOVED))
    loaded = _copies(context)
    optimizer.make(SETTINGS)
    optimizer.step(first_BS, 0.0)
    folder = _saved(optimizer, context, 3) if context.claims.optimizer_saves else None
    optimizer.step(second_BS, OPTIMIZER_RATE)
    saved = {name: copied(of) for name, of in _parameters(context).items()}
    _put(context, loaded)
    if folder is not None:
        optimizer.make(SETTINGS)
        optimizer.restore(folder)
        optimizer.step(second_BS, OPTIMIZER_RATE)
        saved |= {f"{RESUMED}.{name}": copied(of) for name, of in _parameters(context).items()}
        _put(context, loaded)
    if context.claims.optimizer_schedules:
        optimizer.make({**SETTINGS, **LEVEL})
        optimizer.step(second_BS, None)
        saved |= {f"{WITH_BOTH}.{name}": copied(of) for name, of in _parameters(context).items()}
        _put(context, loaded)
    context.save("optimizer_settings", saved)


def with_schedule(optimizer: Optimizer, context: Context) -> None:
    """Save all parameters before and after each step of an optimizer that is made with a schedule, by its number.

    All steps are of the same rows. Where the target claims to save, the optimizer is saved in the middle of the
    warm-up, and a new one with the same schedule takes two steps from there: these parameters are saved as
    `resumed.number.chunk:local`. Then all hold what they did before. Nothing is asked of a target that takes no
    schedule, nor below fp32.
    """
    if not context.claims.optimizer_schedules or context.cell.dtype != "float32":
        return
    rows_BS, loaded, folder = _rows(context, False), _copies(context), None
    kept = {"0": loaded}

    def steps(prefix: str, first: int, end: int) -> None:
        for number in range(first, end):
            optimizer.step(rows_BS, None)
            kept[f"{prefix}{number + 1}"] = _copies(context)

    optimizer.make(SCHEDULE)
    steps("", 0, BROKEN_OFF)
    if context.claims.optimizer_saves:
        folder = _saved(optimizer, context, 4)
    steps("", BROKEN_OFF, SCHEDULED)
    if folder is not None:
        _put(context, kept[str(BROKEN_OFF)])
        optimizer.make(SCHEDULE)
        optimizer.restore(folder)
        steps(f"{RESUMED}.", BROKEN_OFF, BROKEN_OFF + 2)
    _put(context, loaded)
    names = _parameters(context)
    context.save("optimizer_schedule", {f"{when}.{name}": of[name] for when, of in kept.items() for name in names})


def with_gradients_not_finite(optimizer: Optimizer, context: Context) -> dict[str, Any] | None:
    """For every value of NOT_FINITE: three steps of a new optimizer, of which the second has it in its gradients.

    The first is at the rate 0. Saves all parameters after the third by `inf.chunk:local` or `nan.…`; then all hold what
    they did before. The value has for each, of the second step: what it was `refused` for, or null; the parameters and
    buffers that it has `changed`, each with how many elements are not finite; and how many gradients were `spoiled` on
    this rank. There is no third step where a rank refuses or changes something. None, without any step, where the
    target does not claim to skip.
    """
    if not context.claims.optimizer_skips:
        return None
    first_BS, second_BS = (_rows(context, step == of_one_microbatch(context.cell)) for step in (STILL, MOVED))
    loaded, told, saved = _copies(context), dict[str, Any](), dict[str, torch.Tensor]()
    for name, value in NOT_FINITE.items():
        optimizer.make()
        optimizer.step(first_BS, 0.0)
        with _spoiled(context, value) as spoiled:
            refused = refusal(optimizer.step, second_BS, OPTIMIZER_RATE)
        held = _tensors(context)
        counts = {key: int((~held[key].isfinite()).sum()) for key in _unlike(loaded, held)}
        told[name] = {"refused": refused, "changed": counts, "spoiled": len(spoiled)}
        if not any(context.gathered(f"skipped-{name}", "no" if counts or refused else "")):
            optimizer.step(second_BS, OPTIMIZER_RATE)
            saved |= {f"{name}.{key}": copied(of) for key, of in _parameters(context).items()}
        _put(context, loaded)
    context.save("optimizer_not_finite", saved)
    return told


def offloaded(optimizer: Optimizer, context: Context) -> dict[str, Any] | None:
    """The steps of `rates` by a new optimizer, which is offloaded with the model before the first, and twice before the
    last.

    Between these two weights alone are back, and are sent, and logits computed. Saves all parameters before the last
    step as `before.chunk:local`, after it as `offloaded.…`, and of parameters and buffers that an offload has changed
    what `was.…` there and is `back.…`; then all hold what they did first. The value has those that are `gone`,
    the names of what is `sent` otherwise than before, and how far logits are `off`. None where the target does not
    claim to offload.
    """
    if not context.claims.optimizer_offloads:
        return None
    loaded, tokens_BS = _copies(context), load_file(context.input("tokens"))["tokens"]
    *first, (last, rate) = rates(context.cell).items()
    optimizer.make()
    kept = _back(optimizer, context, loaded)
    for step, of in first:
        optimizer.step(_rows(context, step == of_one_microbatch(context.cell)), of)
    before, sent, logits = _copies(context), _sent(context), _answers(context, tokens_BS)
    optimizer.offload()
    optimizer.onload(weights_only=True)
    again = _sent(context)
    other = [*_unlike(sent, again), *(sent.keys() - again.keys())]
    off = apart(logits, _answers(context, tokens_BS)).get("logits")
    kept |= {f"{BEFORE}.{key}": before[key] for key in _parameters(context) if key in before}
    kept = _back(optimizer, context, before) | kept
    gone = sorted(before.keys() - _tensors(context).keys())
    optimizer.step(_rows(context, last == of_one_microbatch(context.cell)), rate)
    kept |= {f"{OFFLOADED}.{key}": copied(of) for key, of in _parameters(context).items()}
    context.save("optimizer_offloaded", kept)
    _put(context, loaded)
    return {"gone": gone, "sent": sorted(name.removeprefix(f"{SENT}.") for name in other), "off": off}


def _back(optimizer: Optimizer, context: Context, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is not as it was `before`, once model and optimizer are offloaded and onloaded: as it was, and as it is."""
    optimizer.offload()
    optimizer.onload(weights_only=False)
    now = _copies(context)
    other = _unlike(before, now)
    was = {f"{WAS}.{key}": before[key] for key in other if key in before}
    return was | {f"{BACK}.{key}": now[key] for key in other}


def _answers(context: Context, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits of weights as they are, where a rank has any."""
    if "forward" not in context.claims.facets:
        return {}
    return _logits(context.facet("forward").logits(tokens_BS), tokens_BS)


@contextmanager
def _spoiled(context: Context, value: float) -> Iterator[list[torch.Tensor]]:
    """On the last rank alone `value` is in the first element of each gradient of an expert, which are listed then.

    If this rank has no experts, it is in those of all its parameters.
    """
    trained = {name: of for name, of in _parameters(context).items() if of.requires_grad}
    chosen = [of for name, of in trained.items() if ".experts." in name] or [*trained.values()]
    spoiled = list[torch.Tensor]()

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled.append(bad := gradient.clone(memory_format=torch.contiguous_format))
        bad.view(-1)[0] = value
        return bad

    on_last = chosen if context.rank == context.world.size - 1 else []
    hooks = [of.register_hook(spoil) for of in on_last]  # type: ignore[no-untyped-call]
    try:
        yield spoiled
    finally:
        for hook in hooks:
            hook.remove()


def _saved(optimizer: Optimizer, context: Context, number: int) -> Path:
    """The folder of this rank to which an optimizer was saved."""
    folder = context.world.workdir / f"optimizer-{number}"
    folder.mkdir()
    optimizer.save(folder)
    return folder


def _made_anew(optimizer: Optimizer, folder: Path) -> None:
    optimizer.make()
    optimizer.restore(folder)


def _rows(context: Context, alone: bool) -> torch.Tensor:
    """The rows of this replica; or as many, of the first microbatch alone."""
    cell, tokens_BS = context.cell, load_file(context.input("tokens"))["tokens"]
    own_BS = of_replica(tokens_BS, cell, context.rank)
    first_BS = tokens_BS[: cell.rows].repeat(len(own_BS) // cell.rows, 1)
    return batch(first_BS if alone else own_BS, cell)


def _tensors(context: Context) -> dict[str, torch.Tensor]:
    """Parameters and buffers of this rank by `chunk:local`."""
    return {f"{chunk}:{local}": of for chunk, local, _, of in module_tensors(context.facet("export").chunks())}


def _copies(context: Context) -> dict[str, torch.Tensor]:
    return {name: copied(tensor) for name, tensor in _tensors(context).items()}


def _unlike(before: dict[str, torch.Tensor], now: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not what they were before, in shape, dtype and bytes, or were not there."""

    def is_same(was: torch.Tensor | None, of: torch.Tensor) -> bool:
        return was is not None and (was.shape, was.dtype) == (of.shape, of.dtype) and same_bytes(was, of)

    return [name for name, of in now.items() if not is_same(before.get(name), of)]


def _put(context: Context, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in _tensors(context).items():
        tensor.data.copy_(values[name])


def _parameters(context: Context) -> dict[str, torch.Tensor]:
    """The parameters of this rank by `chunk:local`."""
    tensors = module_tensors(context.facet("export").chunks())
    return {f"{chunk}:{local}": tensor for chunk, local, kind, tensor in tensors if kind == "parameter"}


FACET = Facet(
    name="optimizer",
    protocol=Optimizer,
    needs=frozenset({"export"}),
    asked_in=lambda cell: cell.optimizer_step,
    steps=(
        Step(name="optimizer_made", ask=lambda optimizer, context: optimizer.make()),
        Step(name="optimizer", ask=stepped, stage=Stage.LOADED),
        Step(name="optimizer_reference", ask=reference, stage=Stage.LOADED),
        Step(name="optimizer_resumed", ask=resumed, stage=Stage.LOADED),
        Step(name="optimizer_settings", ask=with_settings, stage=Stage.LOADED),
        Step(name="optimizer_schedule", ask=with_schedule, stage=Stage.LOADED),
        Step(name="optimizer_not_finite", ask=with_gradients_not_finite, stage=Stage.LOADED),
        Step(name="optimizer_offloaded", ask=offloaded, stage=Stage.LOADED),
    ),
)
