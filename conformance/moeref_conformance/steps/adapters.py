"""Facet `adapters`: adapters are attached, take two steps, are sent and merged, and logits are asked for in between.

Before the second step merged weights and the base's are sent and the base's logits computed, as RL does between steps.
It recomputes forwards: after a frozen embedding nothing that goes into the first layer needs a gradient. What came at
last, what was merged, and the base are zeroed by their receiver, which may scale a factor in place, if they last and
are not lent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Adapters, Cell, TensorMeta, to_plain
from moeref_conformance.contract.records import digest, free_key
from moeref_conformance.contract.requests.adapters import ALPHA, RANK, RATES, RESUMED_RATE, modules
from moeref_conformance.steps import gradients, policy
from moeref_conformance.steps.export import items
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.recompute import recomputing
from moeref_conformance.steps.tensors import copied, module_tensors, same_bytes


def trained(adapters: Adapters, context: Context) -> dict[str, Any]:
    """What was sent by phase, metadata of the merged stream and of the base's, and digests of all tensors of the
    chunks, first and last.

    Saves tensors as `phase.name`, those of the merged stream as `merged.name`, of the base's as `base.name`, and logits
    as `logits.phase`. By these keys `overwritten` has the tensors that held other values when their stream had ended.
    """
    cell, held, saved = context.cell, load_file(context.input("tokens")), dict[str, torch.Tensor]()
    of_all, asked = held["tokens"], modules(context.claims, cell)
    rows_BS, mask_BS = (
        gradients.batch(gradients.of_replica(held[name], cell, context.rank), cell) for name in ("tokens", "mask")
    )
    adapters.attach(context.input("checkpoint"), RANK, ALPHA, asked)
    attached, overwritten = _digests(adapters), list[str]()
    sent = {"fresh": _sent(adapters, "fresh", saved, overwritten)}
    _logits(adapters.logits(of_all), "fresh", saved)
    for phase, rate in RATES.items():
        with recomputing(cell)(adapters.chunks()) if phase == "step2" else nullcontext():
            adapters.step(rows_BS, mask_BS, rate)
        sent[phase] = _sent(adapters, phase, saved, overwritten)
        if phase == "step1":
            deque(adapters.merged(), maxlen=0)
            if context.claims.adapter_base:
                deque(adapters.base(), maxlen=0)
            adapters.logits(of_all, base=True)
    _logits(adapters.logits(of_all), "trained", saved)
    _logits(adapters.logits(of_all, base=True), "base", saved)
    own = not context.claims.lends and context.claims.lasts == "stream"
    weights = {"merged": _weights(adapters.merged(), "merged", saved, overwritten, own)}
    if context.claims.adapter_base:
        weights["base"] = _weights(adapters.base(), "base", saved, overwritten, own)
    sent["again"] = _sent(adapters, "again", saved, overwritten, own)
    _logits(adapters.logits(of_all), "after", saved)
    digests = {"attached": attached, "left": _digests(adapters)}
    if context.claims.adapter_saves:
        sent |= _resumed(adapters, context, lambda: adapters.step(rows_BS, mask_BS, RESUMED_RATE), saved, overwritten)
    context.save("adapters", saved)
    return {"sent": sent, **weights, "overwritten": overwritten, **digests}


def _resumed(
    adapters: Adapters,
    context: Context,
    step: Callable[[], None],
    saved: dict[str, torch.Tensor],
    overwritten: list[str],
) -> dict[str, list[str]]:
    """The names that are sent around a save, a step, a restore and the same step; logits of what is restored."""
    sent = {"saved": _sent(adapters, "saved", saved, overwritten)}
    folder = context.world.workdir / "adapters"
    folder.mkdir()
    adapters.save(folder)
    step()
    sent["on"] = _sent(adapters, "on", saved, overwritten)
    adapters.restore(context.input("checkpoint"), folder)
    sent["restored"] = _sent(adapters, "restored", saved, overwritten)
    _logits(adapters.logits(load_file(context.input("tokens"))["tokens"]), "restored", saved)
    step()
    sent["resumed"] = _sent(adapters, "resumed", saved, overwritten)
    return sent


def _sent(
    adapters: Adapters, phase: str, saved: dict[str, torch.Tensor], overwritten: list[str], own: bool = False
) -> list[str]:
    """The names of what this rank is given, whose tensors are saved, and if they are its own then zeroed."""
    names, given = list[str](), dict[str, torch.Tensor]()
    for name, tensor in adapters.stream():
        if not isinstance(name, str) or not (tensor is None or isinstance(tensor, torch.Tensor)):
            what = f"{type(name).__name__}, {type(tensor).__name__}"
            raise TypeError(f"adapters.stream() gave ({what}), expected (str, torch.Tensor or None)")
        if tensor is not None:
            names.append(name)
            key = free_key(saved, f"{phase}.{name}")
            saved[key], given[key] = copied(tensor), tensor
    overwritten += _unlike(given, saved)
    _zero(given.values() if own else ())
    return names


def _unlike(given: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of what holds other values now that its stream has ended."""
    return [key for key, tensor in given.items() if not same_bytes(tensor, saved[key])]


def _zero(given: Iterable[torch.Tensor]) -> None:
    """Once all came: names may share a tensor. inference_mode may also write to inference tensors."""
    with torch.inference_mode():
        for tensor in given:
            tensor.detach().zero_()


def _weights(
    stream: Iterator[tuple[TensorMeta, torch.Tensor | None]],
    of: str,
    saved: dict[str, torch.Tensor],
    overwritten: list[str],
    own: bool,
) -> list[dict[str, Any]]:
    """The metadata of what this rank is given, whose tensors are saved, and if they are its own then zeroed."""
    rows, given = [], dict[str, torch.Tensor]()
    for meta, tensor in items(stream, f"adapters.{of}"):
        if tensor is not None:
            rows.append(to_plain(meta))
            key = free_key(saved, f"{of}.{meta.name}")
            saved[key], given[key] = copied(tensor), tensor
    overwritten += _unlike(given, saved)
    _zero(given.values() if own else ())
    return rows


def _logits(logits_BSV: torch.Tensor | None, phase: str, saved: dict[str, torch.Tensor]) -> None:
    if logits_BSV is not None:
        saved[f"logits.{phase}"] = copied(logits_BSV)


def _digests(adapters: Adapters) -> list[list[Any]]:
    """`chunk:local`, shape and digest of every parameter and persistent buffer."""
    tensors = module_tensors(adapters.chunks())
    return [[f"{chunk}:{local}", list(of.shape), digest(copied(of))] for chunk, local, _, of in tensors]


def asked(cell: Cell) -> bool:
    """Whether a cell asks: as a policy's loss is asked for, where its steps have no other loss besides."""
    return policy.asked(cell) and not cell.router_loss and not cell.mtp


FACET = Facet(
    name="adapters",
    protocol=Adapters,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(Step(name="adapters", ask=trained, stage=Stage.CHANGED),),
)
