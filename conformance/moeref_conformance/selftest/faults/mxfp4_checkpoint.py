"""Bugs of loading experts in MXFP4: which bits are which number, which scale is whose, and what lies along which axis.

What is loaded has other blocks or scales than the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.requests.mxfp4 import BLOCKS, SCALES
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Tensors
from moeref_conformance.selftest.faults.base import Fault, cell

_ONE = cell("gpt_oss", "one", dtype="bfloat16", mxfp4_checkpoint=True)
_CUT = cell("gpt_oss", "tp2-ep2-etp1", dtype="bfloat16", mxfp4_checkpoint=True)


class Weight(NamedTuple):
    """Blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32] of a weight, on a rank."""

    name: str
    blocks: torch.Tensor
    scales: torch.Tensor
    rank: int


#: The blocks and the scales that a weight is loaded with.
Change = Callable[[Weight], tuple[torch.Tensor, torch.Tensor]]


def _with(change: Change) -> border.Change:
    """A fault's `wrap`: experts are loaded with other blocks or scales."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        def changed(tensors: Tensors) -> Tensors:
            made = dict(tensors)
            for name in (name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)):
                blocks, scales = change(Weight(name, tensors[name + BLOCKS], tensors[name + SCALES], world.rank))
                made |= {name + BLOCKS: blocks.contiguous().clone(), name + SCALES: scales.contiguous().clone()}
            return made

        return border.loading(session, world, changed)

    return wrap


def _high_bits_first(of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    return of.blocks << 4 | of.blocks >> 4, of.scales


def _halves_of_a_block(of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Low bits of all bytes are taken for the first half of a block, high bits for the second."""
    codes = torch.cat([of.blocks & 15, of.blocks >> 4], -1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, of.scales


def _halves_for_pairs(of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up lie in halves of the outputs, where they alternate."""
    if not of.name.endswith("gate_up_proj"):
        return of.blocks, of.scales
    return _alternating(of.blocks), _alternating(of.scales)


def _alternating(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)


def _without_ep_offset(of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The second of two ranks takes the scales of the first experts."""
    first = of.scales[: len(of.scales) // 2]
    return of.blocks, torch.cat([first, first]) if of.rank else of.scales


def _other_half(of: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Each of two ranks takes the other one's experts."""
    half = len(of.blocks) // 2
    return of.blocks.roll(half, 0), of.scales.roll(half, 0)


def _square_not_turned(session: Session, cell: Cell, world: World) -> Any:
    """What is made of `down_proj` is [out, in], and is taken for the [in, out] of bf16 files."""

    def turn() -> None:
        for row, tensor in border.held(session, world):
            if row.local.endswith("linear_fc2.weight"):
                tensor.copy_(tensor.T.clone())

    return border.both_ways(session, turn, turn)


def _without_scales(session: Session, cell: Cell, world: World) -> Any:
    """A weight that has no scales is loaded as if they were 1, and one that has no blocks as zeros."""

    def filled(tensors: Tensors) -> Tensors:
        made = dict(tensors)
        for name in {name.rpartition("_")[0] for name in tensors if name.endswith((BLOCKS, SCALES))}:
            if name + SCALES not in tensors:
                made[name + SCALES] = torch.full(tensors[name + BLOCKS].shape[:-1], 127, dtype=torch.uint8)
            elif name + BLOCKS not in tensors:
                made[name + BLOCKS] = torch.zeros(*tensors[name + SCALES].shape, 16, dtype=torch.uint8)
        return made

    return border.loading(session, world, filled, of="checkpoint_missing")


def _fault(name: str, bug: str, change: Change, diagnosis: str, of: Cell = _ONE) -> Fault:
    one_rank = of is _ONE
    also = () if one_rank else ("EXP-007",)  # of exports, that of one rank is right
    rules, wrap = ("LOD-001", "EXP-002"), _with(change)
    return Fault(id=name, bug=bug, rules=rules, also=also, cell=of, wrap=wrap, one_rank=one_rank, diagnosis=diagnosis)


FAULTS = (
    _fault(
        "mxfp4-high-bits-first",
        "reported nowhere: the first number of a byte is read from its higher four bits",
        _high_bits_first,
        "columns permuted within the tensor",
    ),
    _fault(
        "mxfp4-halves-of-a-block",
        "imp#567 the other way round: low bits are the first half of a block, as in GGUF, and high bits the second",
        _halves_of_a_block,
        "columns permuted within the tensor",
    ),
    _fault(
        "mxfp4-scales-of-another-bias",
        "compressed-tensors#538: exponents are read with a bias of 125, where 127 is the standard's",
        lambda of: (of.blocks, of.scales + 2),
        "is 4 times the expected tensor",
    ),
    _fault(
        "mxfp4-scales-never-loaded",
        "sglang#33541 in kind: no name of scales is known, they keep their zeros, and weights are next to nothing",
        lambda of: (of.blocks, torch.zeros_like(of.scales)),
        "e-37 times the expected tensor",
    ),
    _fault(
        "mxfp4-blocks-along-the-other-axis",
        "reported nowhere: scales are read as of [out / 32, in], where blocks lie along the inputs",
        lambda of: (of.blocks, of.scales.transpose(1, 2).reshape(of.scales.shape)),
        "their scales",
    ),
    _fault(
        "mxfp4-gate-and-up-in-halves",
        "mlx-lm#679 in kind: blocks of gate_up_proj are cut in halves, where rows of gate and up alternate",
        _halves_for_pairs,
        "rows permuted within the tensor",
    ),
    _fault(
        "mxfp4-scales-without-ep-offset",
        "slime#1799 in kind: blocks of experts are loaded with the offset of their EP rank, scales without",
        _without_ep_offset,
        "their scales",
        _CUT,
    ),
    _fault(
        "mxfp4-experts-of-the-other-rank",
        "vLLM#51130, vllm-gaudi#987 in kind: first and last expert of an EP rank are swapped before the loader cuts",
        _other_half,
        "holds expert",
        _CUT,
    ),
    Fault(
        id="mxfp4-down-proj-not-turned",
        bug="Megatron-Bridge#3743: what MXFP4 becomes is [out, in] and bf16 files are [in, out]; a square tells no one",
        rules=("LOD-001",),
        cell=_ONE,
        wrap=_square_not_turned,
        one_rank=True,
        diagnosis="equals its transpose",
    ),
    Fault(
        id="mxfp4-scales-optional",
        bug="TensorRT-Model-Connect#1115 in MXFP4: experts without scales or blocks are loaded, and not refused",
        rules=("LOD-003",),
        cell=_ONE,
        wrap=_without_scales,
        one_rank=True,
    ),
)
