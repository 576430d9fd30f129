"""Bugs of loading experts in INT4: the order of numbers in a word, what is added to them, and which scale is whose.

What is loaded has other words or scales than the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.requests.int4 import GROUP, PACKED, SCALE, SHAPE
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Tensors
from moeref_conformance.selftest.faults.base import Fault, cell

_ONE = cell("kimi_k25", "one", dtype="bfloat16", int4_checkpoint=True)
_CUT = cell("kimi_k25", "etp2", dtype="bfloat16", int4_checkpoint=True)


class Weight(NamedTuple):
    """A weight of the checkpoint, whose other tensors are `tensors`, on a rank."""

    name: str
    words: torch.Tensor
    scales: torch.Tensor
    tensors: Tensors
    rank: int


#: The words or the scales that a weight is loaded with.
Change = Callable[[Weight], torch.Tensor]


def _with(change: Change, end: str) -> border.Change:
    """A fault's `wrap`: experts are loaded with other words or scales, as `end` says."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        def changed(tensors: Tensors) -> Tensors:
            names = [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]
            weights = (Weight(n, tensors[n + PACKED], tensors[n + SCALE], tensors, world.rank) for n in names)
            return tensors | {of.name + end: change(of).contiguous().clone() for of in weights}

        return border.loading(session, world, changed)

    return wrap


def _in_order(*order: int) -> Change:
    """Words whose number i is number `order[i]` of the right ones."""

    def changed(weight: Weight) -> torch.Tensor:
        made = torch.zeros_like(weight.words)
        for at, of in enumerate(order):
            made |= ((weight.words >> (4 * of)) & 15) << (4 * at)
        return made

    return changed


def _as_signed(weight: Weight) -> torch.Tensor:
    """The highest bit of a number is its sign: what was 0 is -8, and what was -8 is 0."""
    return weight.words ^ torch.tensor(-0x77777778, dtype=torch.int32)


def _of_the_gate(weight: Weight) -> torch.Tensor:
    return weight.tensors[weight.name.replace(".up_proj", ".gate_proj") + SCALE]


def _from_the_shards_start(weight: Weight) -> torch.Tensor:
    """The second of two ranks counts groups of columns from its own first column."""
    first, scales = int(weight.tensors[weight.name + SHAPE][1]) // 2 // GROUP, weight.scales
    if weight.rank == 0 or not weight.name.endswith(".down_proj.weight"):
        return scales
    return torch.cat([scales[:, :first], scales[:, first + 1 :], scales[:, -1:]], 1)


def _without_scales(session: Session, cell: Cell, world: World) -> Any:
    """An expert that has no scales is loaded as if they were 1."""

    def filled(tensors: Tensors) -> Tensors:
        names = [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]
        sizes = {name: tensors[name + SHAPE].tolist() for name in names if name + SCALE not in tensors}
        ones = {n + SCALE: torch.ones(rows, -(-columns // GROUP)).bfloat16() for n, (rows, columns) in sizes.items()}
        return tensors | ones

    return border.loading(session, world, filled, of="checkpoint_missing")


def _fault(name: str, bug: str, change: Change, end: str, of: Cell = _ONE, diagnosis: str = "their scales") -> Fault:
    also = () if of is _ONE else ("EXP-007",)  # of exports, that of one rank is right
    rules, wrap = ("LOD-001", "EXP-002"), _with(change, end)
    one_rank = of is _ONE
    return Fault(id=name, bug=bug, rules=rules, also=also, cell=of, wrap=wrap, one_rank=one_rank, diagnosis=diagnosis)


FAULTS = (
    _fault(
        "int4-numbers-reversed",
        "llama.cpp#17083: the numbers of a word are read from its highest bits on",
        _in_order(7, 6, 5, 4, 3, 2, 1, 0),
        PACKED,
        diagnosis="columns permuted within the tensor",
    ),
    _fault(
        "int4-numbers-as-awq-has-them",
        "llm-compressor#1613 in kind: the numbers of a word are read in the order of AWQ",
        _in_order(0, 4, 1, 5, 2, 6, 3, 7),
        PACKED,
        diagnosis="columns permuted within the tensor",
    ),
    _fault(
        "int4-numbers-without-offset",
        "sglang-jax#1637 in kind: numbers are taken for two's complements, where 8 is to be taken off each",
        _as_signed,
        PACKED,
        diagnosis="every number has the other sign",
    ),
    _fault(
        "int4-one-scale-for-a-row",
        "colibri#225 in kind: a row has one scale, where each group of its columns has one",
        lambda of: of.scales[:, :1].expand(of.scales.shape),
        SCALE,
    ),
    _fault(
        "int4-scale-of-the-gate",
        "Megatron-Bridge#5851 in INT4: gate and up are joined, and both are multiplied by the first one's scales",
        lambda of: _of_the_gate(of) if of.name.endswith(".up_proj.weight") else of.scales,
        SCALE,
    ),
    _fault(
        "int4-groups-along-the-other-axis",
        "reported nowhere: scales are read along the rows of a matrix, and lie along its columns",
        lambda of: of.scales.T.reshape(of.scales.shape),
        SCALE,
    ),
    _fault(
        "int4-groups-from-the-shards-start",
        "transformers#45630 in kind: a shard is read as a matrix of its own, whose groups begin with its first column",
        _from_the_shards_start,
        SCALE,
        _CUT,
    ),
    _fault(
        "int4-scales-in-fp8",
        "rtp-llm#942 in kind: scales are rounded to e4m3 on their way",
        lambda of: of.scales.to(torch.float8_e4m3fn).bfloat16(),
        SCALE,
    ),
    Fault(
        id="int4-scales-optional",
        bug="TensorRT-Model-Connect#1115 in INT4: an expert without scales is loaded, and not refused",
        rules=("LOD-003",),
        cell=_ONE,
        wrap=_without_scales,
        one_rank=True,
    ),
)
