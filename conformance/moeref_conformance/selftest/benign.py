"""Correct but different targets: designs that real frameworks have, which no MUST may call wrong.

`benign:<id>` runs one; `tests/kit/test_benign.py` runs all. Faults that turn SHOULD rules alone red are of this kind
too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Request, RoundTrip, RoutedRows, Session, TensorMeta, Turn, World
from moeref_conformance.selftest.border import Pair, checkpoint, copied, facet, stream
from moeref_conformance.selftest.faults.base import Variant, cell
from moeref_conformance.selftest.faults.loading import unknown_skipped
from moeref_conformance.selftest.faults.roles import aliases, everywhere
from moeref_conformance.selftest.faulty import FaultyTarget


@dataclass(frozen=True, kw_only=True)
class Benign(Variant):
    """One design. `why` says who has it or what it is good for, `claims` are what it claims other than the good target,
    and `should` are the SHOULD rules that it does not follow, all of them."""

    why: str
    claims: Mapping[str, Any] = field(default_factory=dict)
    should: tuple[str, ...] = ()
    one_rank: bool = True


def _in_buckets(session: Session, cell: Cell, world: World) -> Any:
    """Tensors come as views of a buffer of up to 256 KiB, which has another memory each time."""

    def flushed(bucket: list[tuple[TensorMeta, torch.Tensor]]) -> Iterator[Pair]:
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
        ends = list(accumulate(tensor.nbytes for _, tensor in bucket))
        for (meta, like), part in zip(bucket, torch.tensor_split(flat, ends[:-1]), strict=True):
            yield meta, part.view(like.dtype).view(like.shape)

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        bucket: list[tuple[TensorMeta, torch.Tensor]] = []
        for meta, tensor in pairs:
            if tensor is None:
                yield meta, None
                continue
            bucket.append((meta, tensor))
            if sum(kept.nbytes for _, kept in bucket) > 2**18:
                yield from flushed(bucket)
                bucket.clear()
        if bucket:
            yield from flushed(bucket)

    return stream(session, rewrite)


def _surplus_warned_of(session: Session, cell: Cell, world: World) -> Any:
    """A tensor of the checkpoint that the model lacks is left out with a warning."""
    planned = {meta.name for meta in session.plan.tensors()} if session.plan else set()

    def load(folder: Path) -> None:
        if surplus := sorted(checkpoint(folder).keys() - planned):
            if world.rank == 0:
                logging.getLogger("transformers").warning("weights of the checkpoint were not used: %s", surplus)
            folder = copied(folder, world, lambda tensors: {n: t for n, t in tensors.items() if n in planned})
        session.export.load(folder)  # type: ignore[union-attr]

    return facet(session, "export", load=load)


def _contradiction_refused(session: Any, cell: Cell, world: World) -> Any:
    """A setting that is given as a field and passed through with another value is refused."""
    good = session.config

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        twice = request.fields.keys() & request.overrides.keys()
        if apart := sorted(name for name in twice if request.fields[name] != request.overrides[name]):
            raise ValueError(f"given twice with different values: {', '.join(apart)}")
        resolved: Mapping[str, Any] = good.resolve(request, role)
        return resolved

    return facet(session, "config", resolve=resolve)


def _padding_stays(session: Any, cell: Cell, world: World) -> Any:
    """Padding rows are sent to no expert."""
    good = session.dispatch

    def round_trip(rows: RoutedRows, expert: Callable[[int, torch.Tensor], torch.Tensor]) -> RoundTrip:
        kept_T = ~rows.padding_T
        mine = RoutedRows(
            x_TH=rows.x_TH[kept_T],
            weights_TK=rows.weights_TK[kept_T],
            experts_TK=rows.experts_TK[kept_T],
            padding_T=rows.padding_T[kept_T],
            experts=rows.experts,
        )
        sent = good.round_trip(mine, expert)
        y_TH = torch.zeros_like(rows.x_TH).masked_scatter(kept_T[:, None], sent.y_TH)
        return RoundTrip(y_TH=y_TH, counts_E=sent.counts_E)

    return facet(session, "dispatch", round_trip=round_trip)


def _silent(session: Session, cell: Cell, world: World) -> Any:
    """Ranks other than the writer take part in the export and yield nothing."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if world.rank == 0:
                yield meta, tensor
            del tensor

    return stream(session, rewrite)


def _no_missing_rows(session: Any, cell: Cell, world: World) -> Any:
    """Rows of -1 are refused: the engine never sends any."""
    good = session.replay

    def checked(routes: Any) -> Any:
        for sample in routes or ():
            for turn in sample if isinstance(sample, list) else [Turn(0, sample)]:
                if turn.routes.min() < 0:
                    raise ValueError("a negative expert")
        return routes

    return facet(
        session,
        "replay",
        replay=lambda tokens_BS, routes: good.replay(tokens_BS, checked(routes)),
        step=lambda tokens_BS, routes: good.step(tokens_BS, checked(routes)),
    )


_DESIGNS = (
    Benign(
        id="all-ranks-receive",
        why="engines that share the trainer's ranks load on each of them: mcore-bridge, mbridge, Megatron-Bridge",
        cell=cell("qwen3_moe", "pp2"),
        wrap=everywhere,
        claims={"receivers": "all"},
    ),
    Benign(
        id="live-parameters-lent",
        why="engines that share the trainer's memory copy what they are lent: Megatron-Bridge, mbridge, mcore-bridge",
        cell=cell("qwen3_moe", "pp2"),
        wrap=aliases,
        claims={"lends": True},
        should=("EXP-005",),
    ),
    Benign(
        id="sent-in-buckets",
        why="few large transfers instead of many small ones: verl, slime",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_in_buckets,
    ),
    Benign(
        id="non-writers-yield-nothing",
        why="mcore-bridge with only_master_rank: the other ranks have nothing to pass on",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_silent,
        claims={"non_writers": "nothing"},
    ),
    Benign(
        id="routes-without-holes",
        why="vLLM and SGLang return a route for every token that they run, so a negative expert is a mistake",
        cell=cell("qwen3_moe", "cp2", replay="R3"),
        wrap=_no_missing_rows,
        claims={"missing_rows": False},
    ),
    Benign(
        id="surplus-warned-of",
        why="transformers' from_pretrained lists unexpected weights in a warning and goes on",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_surplus_warned_of,
    ),
    Benign(
        id="modules-read-when-built",
        why="a bridge that maps and checks all parameters once, as it builds the model, and exports by that map",
        cell=cell("qwen3_moe", "pp2"),
        wrap=unknown_skipped,
        claims={"unmapped": "built"},
    ),
    Benign(
        id="contradiction-refused",
        why="of two values for one setting none is better: a launcher may refuse to choose",
        cell=cell("glm4_moe", "tp1", backend="static"),
        wrap=_contradiction_refused,
        should=("CFG-010",),
    ),
    Benign(
        id="padding-stays",
        why="a padding row needs no expert: dropping it before the exchange saves its way",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_padding_stays,
        should=("DSP-010",),
    ),
)
BENIGN: dict[str, Benign] = {design.id: design for design in _DESIGNS}


def _target(design: Benign) -> FaultyTarget:
    target = FaultyTarget(design, kind="benign")
    target.claims = replace(target.claims, **design.claims)
    return target


targets: Mapping[str, FaultyTarget] = {name: _target(design) for name, design in BENIGN.items()}

__all__ = ["BENIGN", "Benign", "targets"]
