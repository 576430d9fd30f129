"""Correct but different targets: designs that real frameworks have, which no MUST may call wrong.

`benign:<id>` runs one; `tests/kit/test_benign.py` runs all. Faults that turn SHOULD rules alone red are of this kind too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Pair, stream
from moeref_conformance.selftest.faults.base import Variant, cell
from moeref_conformance.selftest.faulty import FaultyTarget


@dataclass(frozen=True, kw_only=True)
class Benign(Variant):
    """One design. `why` says who has it or what it is good for, `claims` are what it claims other than the good target,
    and `should` are the SHOULD rules that it does not follow, all of them."""

    why: str
    claims: Mapping[str, Any] = field(default_factory=dict)
    should: tuple[str, ...] = ()
    one_rank: bool = True


def _everywhere(session: Session, cell: Cell, world: World) -> Any:
    """Every rank is given every tensor."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            dist.broadcast(full, src=0)
            del tensor
            yield meta, full
            del full

    return stream(session, rewrite)


_DESIGNS = (
    Benign(
        id="all-ranks-receive",
        why="engines that share the trainer's ranks load on each of them: mcore-bridge, mbridge, Megatron-Bridge",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_everywhere,
        claims={"receivers": "all"},
    ),
)
BENIGN: dict[str, Benign] = {design.id: design for design in _DESIGNS}


def _target(design: Benign) -> FaultyTarget:
    target = FaultyTarget(design, kind="benign")
    target.claims = replace(target.claims, **design.claims)
    return target


targets: Mapping[str, FaultyTarget] = {name: _target(design) for name, design in BENIGN.items()}

__all__ = ["BENIGN", "Benign", "targets"]
