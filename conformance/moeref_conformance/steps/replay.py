"""Facet `replay`: forwards and training steps under given or recorded routes, observed at the experts.

Data-parallel replicas take rows and routes of their own, except in the phases `SHARED`. Between them come forwards that
are not replayed, other routes, and changed routers, as in a training run. Logprobs, which are asked for before, are of
forwards under routes too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Replay, Turn
from moeref_conformance.contract.requests.logprobs import TEMPERATURE
from moeref_conformance.contract.requests.replay import AGAIN, SHORTER, WHOLE
from moeref_conformance.contract.requests.sequences import shorter
from moeref_conformance.steps.facet import Context, Facet, Stage, Step, refusal
from moeref_conformance.steps.hidden_states import entering_norms
from moeref_conformance.steps.observed_routes import moe_layers, observed
from moeref_conformance.steps.recompute import recomputing

Routes = np.ndarray[Any, Any]
#: Routes of a sample, whole or in turns.
Sample = Routes | list[Turn]


def run(replay: Replay, context: Context) -> None:
    """All phases of the cell's mode, saved as `replay`."""
    phases = _Phases(replay, context)
    if context.cell.replay == "R2":
        phases.recorded()
    else:
        phases.given(given(context, "a"), given(context, "b"))
    context.save("replay", phases.observed)


def refuse(replay: Replay, context: Context) -> dict[str, Any]:
    """The errors for malformed routes, by defect. The last step: a rank may wait for ever for one that refuses.

    On one rank also those of training steps, and how far a forward without replay is then off the same one before,
    relative to the largest logit.
    """
    if context.cell.replay == "R2":
        return {"refused": {}}
    tokens_BS, wrong = load_file(context.input("tokens"))["tokens"], malformed(given(context, "a"))
    alone = context.cell.layout.world == 1  # of several ranks some may still wait for one that refused
    native = partial(context.facet("forward").logits, tokens_BS[: context.cell.rows]) if alone else lambda: None
    before = native()
    refused = {defect: refusal(replay.replay, tokens_BS, rows) for defect, rows in wrong.items()}
    if alone:
        refused |= {f"{defect} in a step": refusal(replay.step, tokens_BS, rows) for defect, rows in wrong.items()}
    after = native()
    if before is None or after is None:
        return {"refused": refused}
    return {"refused": refused, "off": float((after - before).abs().max() / before.abs().max())}


def given(context: Context, name: str, missing: bool = True) -> list[Routes]:
    """The routes of this name, without missing rows where these are not asked for or the target does not claim them."""
    kind = "" if missing and context.claims.missing_rows else WHOLE
    return read_routes(context.inputs["routes"])[f"{kind}{name}"]


class _Phases:
    """Forwards and steps by name, in the order of PHASES, each observed at the experts."""

    def __init__(self, replay: Replay, context: Context) -> None:
        self._replay, self._forward = replay, context.facet("forward")
        gives = "logprobs" in context.claims.facets and not context.cell.precision
        self._logprobs = context.facet("logprobs") if gives else None
        self._chunks = list(context.facet("export").chunks())
        self.tokens_BS = load_file(context.input("tokens"))["tokens"]
        self._cell = context.cell
        self._own = topology.step_rows(context.cell, context.rank, len(self.tokens_BS))
        self._rows_BS = self.tokens_BS[self._own]
        # An evaluation has another number of microbatches than a step.
        self._one_BS = self.tokens_BS[: context.cell.rows]
        self._recomputed = recomputing(context.cell)
        self.observed: dict[str, torch.Tensor] = {}

    def recorded(self) -> None:
        """R2: routes that the target itself records."""
        replay, rows_BS = self._replay, self._rows_BS
        self._take("record", replay.record, rows_BS)
        self._take("replay", replay.replay, rows_BS, None)
        with negated_routers(self._chunks):
            self._take("changed-native", self._forward.logits, self._one_BS)
            with self._recomputed(self._chunks):
                self._take("recompute", replay.step, rows_BS, None)
            self._take("record-changed", replay.record, rows_BS)
        self._take("step-changed", replay.step, rows_BS, None)

    def given(self, a: list[Routes], b: list[Routes]) -> None:
        """R3: routes that an engine sends, two sets of them; there is more than one sample."""
        replay, rows_BS = self._replay, self._rows_BS
        self._take("native-before", self._forward.logits, self._one_BS)
        self._take("replay-a", replay.replay, self.tokens_BS, [resumed(a[0], b[0]), *a[1:-1], aborted(a[-1])])
        self._take("native-between", self._forward.logits, self._one_BS)
        if length := shorter(self.tokens_BS.shape[1], self._cell):
            begun = [sent_again(a[row][: length - 1], b[row]) for row in range(self._cell.rows)]
            self._take(SHORTER, replay.replay, self._one_BS[:, :length].contiguous(), begun)
        if self._cell.bias_update:
            self._uncounted([np.repeat(b[0][:1], len(sample), axis=0) for sample in b])
        self._take("step-a", replay.step, rows_BS, in_turns(*([routes[row] for row in self._own] for routes in (a, b))))
        with self._recomputed(self._chunks):
            self._take("recompute-b", replay.step, rows_BS, [b[row] for row in self._own])
        self._take(AGAIN, replay.replay, self.tokens_BS, a)
        self._take("native-after", self._forward.logits, self._one_BS)

    def _uncounted(self, routes: list[Routes]) -> None:
        """Forwards whose tokens do not count in a later step: all take the same experts, so that these would show."""
        self._replay.replay(self.tokens_BS, routes)
        if self._logprobs:
            under(self._logprobs.logprobs, self.tokens_BS, TEMPERATURE, routes=routes)

    def _take(self, phase: str, call: Callable[..., Any], *arguments: Any) -> None:
        norms = entering_norms(self._chunks, self.observed, f"{phase}.norms") if phase == "replay-a" else nullcontext()
        with observed(self._chunks, self.observed, phase), norms:
            answer = call(*arguments)
        if isinstance(answer, torch.Tensor):
            self.observed[f"{phase}.logits"] = answer.detach().cpu().clone()
        elif answer is not None:
            for (chunk, local), gradient in answer.items():
                self.observed[f"{phase}.gradients.{chunk}:{local}"] = gradient.detach().cpu().clone()


def read_routes(file: str) -> dict[str, list[Routes]]:
    """Route sets by name from a file that the oracle wrote; one read-only array a sample."""
    sets: dict[str, dict[int, Routes]] = {}
    for key, tensor in load_file(file).items():
        name, _, number = key.partition(".")
        sets.setdefault(name, {})[int(number)] = routes = tensor.numpy()
        routes.setflags(write=False)
    return {name: [samples[i] for i in sorted(samples)] for name, samples in sets.items()}


def resumed(whole: Routes, recomputed: Routes) -> list[Turn]:
    """`whole` as the turns of a rollout that was interrupted in the middle.

    The engine that continued it recomputed two tokens that were sampled before, and chose other experts for them.
    """
    cut = len(whole) // 2
    later = np.concatenate([recomputed[cut - 2 : cut], whole[cut:]])
    return [Turn(0, whole[:cut]), Turn(cut - 2, later)]


def in_turns(whole: Sequence[Routes], recomputed: Sequence[Routes]) -> list[Sample]:
    """The same routes; those of the first sample come as the turns of a rollout that was interrupted."""
    return [resumed(whole[0], recomputed[0]), *whole[1:]]


def sent_again(whole: Routes, recomputed: Routes) -> list[Turn]:
    """`whole` as two turns, of which the later begins at the first token again: the engine had kept nothing."""
    cut = len(whole) // 2
    return [Turn(0, whole[:cut]), Turn(0, np.concatenate([recomputed[:cut].astype(whole.dtype), whole[cut:]]))]


def aborted(whole: Routes) -> list[Turn]:
    """`whole` as three turns that follow each other, and one before the last that was aborted before it had a row."""
    first, second = len(whole) // 3, len(whole) * 2 // 3
    middle, none = Turn(first, whole[first:second]), Turn(second, whole[second:second])
    return [Turn(0, whole[:first]), middle, none, Turn(second, whole[second:])]


def malformed(routes: Sequence[Routes]) -> dict[str, list[Routes]]:
    """Routes that replay must refuse, by what is wrong with them."""
    first_TLK = routes[0]
    row_K = first_TLK[3, -1]
    absent = next(expert for expert in range(len(row_K) + 1) if expert not in row_K)

    def put(expert: int) -> list[Routes]:
        wrong_TLK = first_TLK.copy()
        wrong_TLK[3, -1, 0] = expert
        return [wrong_TLK, *routes[1:]]

    return {
        "three rows too few": [first_TLK[:-3], *routes[1:]],
        "three rows too many": [np.concatenate([first_TLK, first_TLK[:3]]), *routes[1:]],
        "a layer too few": [first_TLK[:, 1:-1], *routes[1:]],
        "a layer too many": [np.concatenate([first_TLK, first_TLK[:, -1:]], axis=1), *routes[1:]],
        "an expert that does not exist": put(255),
        "an expert that wraps to one in 8 bits": put(256 + absent),
        "an expert twice in a row": put(row_K[1]),
        "an expert that wraps to one in 16 bits": put(65536 + absent),
        "a negative expert among others": put(-1),
        "a negative expert that wraps to one in 8 bits": put(absent - 256),
        "an expert too few in each row": [rows_TLK[..., :-1] for rows_TLK in routes],
        "an expert too many in each row": [_one_more(rows_TLK) for rows_TLK in routes],
        "a sample too few": list(routes[:-1]),
        "a sample too many": [*routes, routes[-1]],
    }


def _one_more(rows_TLK: Routes) -> Routes:
    """Each row with the first expert that it lacks at its end; rows of zeros or -1 with one more of these."""
    absent_TLE = (rows_TLK[..., None] != np.arange(rows_TLK.shape[-1] + 1)).all(-2)
    routed_TL = rows_TLK.max(-1) > rows_TLK.min(-1)
    more_TL = np.where(routed_TL, absent_TLE.argmax(-1), rows_TLK[..., 0]).astype(rows_TLK.dtype)
    return np.concatenate([rows_TLK, more_TL[..., None]], axis=-1)


def under(call: Callable[..., Any], *arguments: Any, routes: Sequence[Any]) -> Any:
    """What `call` gives for the arguments, and routes as the last one. Raises TypeError if it takes no routes."""
    try:
        inspect.signature(call).bind(*arguments, routes)
    except ValueError:  # a callable without a signature
        return call(*arguments, routes)
    except TypeError as error:
        name = getattr(call, "__name__", "the method")
        problem = f"{name}() is given `routes` as its last argument in a cell with replay R3, and does not take it"
        raise TypeError(f"{problem}: {error}") from error
    return call(*arguments, routes)


@contextmanager
def negated_routers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Negate every router's weight, as if trained since: every token's own choice of experts changes."""
    routers = [layer.router.weight for chunk in chunks for _, layer in moe_layers(chunk)]
    for weight in routers:
        weight.data.neg_()
    try:
        yield
    finally:
        for weight in routers:
            weight.data.neg_()


FACET = Facet(
    name="replay",
    protocol=Replay,
    needs=frozenset({"export"}),
    asked_in=lambda cell: cell.replay != "off",
    steps=(
        Step(name="replay", ask=run, stage=Stage.LOADED),
        Step(name="refuse_routes", ask=refuse, stage=Stage.CHANGED, refusal=True),
    ),
)
