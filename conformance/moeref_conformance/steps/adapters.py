"""Facet `adapters`: adapters are attached, take two steps, are sent and merged, and logits are asked for in between.

Before the second step merged weights and the base's are sent and the base's logits computed, as RL does between steps.
It recomputes forwards: after a frozen embedding nothing that goes into the first layer needs a gradient. What came at
last, what was merged, and the base are zeroed by their receiver, which may scale a factor in place, if they last and
are not lent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Adapters, Cell, TensorMeta, to_plain
from moeref_conformance.contract.records import digest, free_key
from moeref_conformance.contract.requests.adapters import ALPHA, BEHIND, RANK, RATES, RESUMED_RATE, modules
from moeref_conformance.steps import gradients, policy
from moeref_conformance.steps.export import items
from moeref_conformance.steps.facet import Context, Facet, Stage, Step
from moeref_conformance.steps.recompute import recomputing
from moeref_conformance.steps.tensors import copied, module_tensors, same_bytes


def trained(adapters: Adapters, context: Context) -> dict[str, Any]:
    """What was sent by phase, metadata of the merged stream and of the base's, and digests of all tensors of the
    chunks, first and last.

    Saves tensors as `phase.name`, those of the merged stream as `merged.name`, of the base's as `base.name`, and logits
    as `logits.phase`. What is streamed of restored adapters and of the base behind them is `resumed_merged` and
    `resumed_base`. By these keys `overwritten` has the tensors that held other values when their stream had ended.
    """
    cell, held, received = context.cell, load_file(context.input("tokens")), _Received(adapters)
    of_all, asked = held["tokens"], modules(context.claims, cell)
    rows_BS, mask_BS = (
        gradients.batch(gradients.of_replica(held[name], cell, context.rank), cell) for name in ("tokens", "mask")
    )
    adapters.attach(context.input("checkpoint"), RANK, ALPHA, asked)
    attached = _digests(adapters)
    sent = {"fresh": received.sent("fresh")}
    received.logits("fresh", of_all)
    for phase, rate in RATES.items():
        with recomputing(cell)(adapters.chunks()) if phase == "step2" else nullcontext():
            adapters.step(rows_BS, mask_BS, rate)
        sent[phase] = received.sent(phase)
        if phase == "step1":
            deque(adapters.merged(), maxlen=0)
            if context.claims.adapter_base:
                deque(adapters.base(), maxlen=0)
            adapters.logits(of_all, base=True)
    received.logits("trained", of_all)
    received.logits("base", of_all, base=True)
    own = not context.claims.lends and context.claims.lasts == "stream"
    weights = _weights(adapters, context, received, "", own)
    sent["again"] = received.sent("again", own)
    received.logits("after", of_all)
    digests = {"attached": attached, "left": _digests(adapters)}
    if context.claims.adapter_saves:
        sent |= _resumed(adapters, context, lambda: adapters.step(rows_BS, mask_BS, RESUMED_RATE), received)
        weights |= _weights(adapters, context, received, BEHIND)
    context.save("adapters", received.tensors)
    return {"sent": sent, **weights, "overwritten": received.overwritten, **digests}


def _weights(
    adapters: Adapters, context: Context, received: _Received, when: str, own: bool = False
) -> dict[str, list[Any]]:
    """The metadata of the merged stream, and of the base's where there is one, each by its name behind `when`."""
    streams = {"merged": adapters.merged, **({"base": adapters.base} if context.claims.adapter_base else {})}
    return {f"{when}{of}": received.weights(f"{when}{of}", stream(), own) for of, stream in streams.items()}


def _resumed(
    adapters: Adapters, context: Context, step: Callable[[], None], received: _Received
) -> dict[str, list[str]]:
    """The names that are sent around a save, a step, a restore and the same step; logits of what is restored."""
    sent = {"saved": received.sent("saved")}
    folder = context.world.workdir / "adapters"
    folder.mkdir()
    adapters.save(folder)
    step()
    sent["on"] = received.sent("on")
    adapters.restore(context.input("checkpoint"), folder)
    sent["restored"] = received.sent("restored")
    received.logits("restored", load_file(context.input("tokens"))["tokens"])
    step()
    sent["resumed"] = received.sent("resumed")
    return sent


class _Received:
    """Copies of what this rank is given, by key; and the keys of what held other values once its stream had ended.

    `own`: the tensors are this rank's own, and are zeroed once all came, as names may share one.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.tensors, self.overwritten = dict[str, torch.Tensor](), list[str]()

    def sent(self, phase: str, own: bool = False) -> list[str]:
        """The names of the adapters that this rank is given, which are kept as `phase.name`."""
        return self._keep(phase, ((name, name, tensor) for name, tensor in _pairs(self._adapters)), own)

    def weights(self, of: str, stream: Iterator[tuple[TensorMeta, torch.Tensor | None]], own: bool) -> list[Any]:
        """The metadata of the weights that this rank is given, which are kept as `of.name`."""
        pairs = items(stream, f"adapters.{of}")
        return self._keep(of, ((to_plain(meta), meta.name, tensor) for meta, tensor in pairs), own)

    def logits(self, phase: str, tokens_BS: torch.Tensor, base: bool = False) -> None:
        """Keep the logits, if this rank has any, as `logits.phase`."""
        logits_BSV = self._adapters.logits(tokens_BS, base=base)
        if logits_BSV is not None:
            self.tensors[f"logits.{phase}"] = copied(logits_BSV)

    def _keep(self, prefix: str, stream: Iterable[tuple[Any, str, torch.Tensor | None]], own: bool) -> list[Any]:
        """What is said of each tensor: the first of `stream`, before its name."""
        said, given = [], dict[str, torch.Tensor]()
        for what, name, tensor in stream:
            if tensor is not None:
                said.append(what)
                key = free_key(self.tensors, f"{prefix}.{name}")
                self.tensors[key], given[key] = copied(tensor), tensor
        self.overwritten += [key for key, tensor in given.items() if not same_bytes(tensor, self.tensors[key])]
        with torch.inference_mode():  # it may also write to inference tensors
            for tensor in given.values() if own else ():
                tensor.detach().zero_()
        return said


def _pairs(adapters: Adapters) -> Iterator[tuple[str, torch.Tensor | None]]:
    """What is sent. Raises TypeError for anything but a name and a tensor or None."""
    for name, tensor in adapters.stream():
        if not isinstance(name, str) or not (tensor is None or isinstance(tensor, torch.Tensor)):
            what = f"{type(name).__name__}, {type(tensor).__name__}"
            raise TypeError(f"adapters.stream() gave ({what}), expected (str, torch.Tensor or None)")
        yield name, tensor


def _digests(adapters: Adapters) -> list[list[Any]]:
    """`chunk:local`, shape and digest of every parameter and persistent buffer."""
    tensors = module_tensors(adapters.chunks())
    return [[f"{chunk}:{local}", list(of.shape), digest(copied(of))] for chunk, local, _, of in tensors]


def asked(cell: Cell) -> bool:
    """Whether a cell asks: as a policy's loss is asked for, and in bf16, where its steps have no other loss besides."""
    return policy.asked(replace(cell, dtype="float32")) and not cell.router_loss and not cell.mtp


FACET = Facet(
    name="adapters",
    protocol=Adapters,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(Step(name="adapters", ask=trained, stage=Stage.CHANGED),),
)
