"""Bugs of loading weights that a checkpoint has in FP8: which scale is whose, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.requests import quantised as request
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Tensors
from moeref_conformance.selftest.faults.base import Fault, cell

#: The end of the name of a linear's scales.
SCALES = f".weight{request.SCALES}"
#: From the name of a linear, its scales, all tensors and the rank: the scales that it is loaded with.
Change = Callable[[str, torch.Tensor, Tensors, World], torch.Tensor]


def _with(change: Change) -> border.Change:
    """A fault's `wrap`: weights are loaded with other scales."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        def changed(tensors: Tensors) -> Tensors:
            linears = [name.removesuffix(SCALES) for name in tensors if name.endswith(SCALES)]
            found = {name: change(name, tensors[f"{name}{SCALES}"], tensors, world) for name in linears}
            return tensors | {f"{name}{SCALES}": of.clone() for name, of in found.items()}

        return border.loading(session, world, changed)

    return wrap


def _without_scales_of_attention(session: Session, cell: Cell, world: World) -> Any:
    """A linear of attention that has no scales is loaded as if they were 1."""

    def filled(tensors: Tensors) -> Tensors:
        linears = [name for name, of in tensors.items() if of.dtype == torch.float8_e4m3fn and "attn" in name]
        lacking = [name for name in linears if f"{name}{request.SCALES}" not in tensors]
        like = next(of for name, of in tensors.items() if name.endswith(SCALES))
        block = request.BLOCKS[cell.family]
        shapes = {name: [-(-n // of) for n, of in zip(tensors[name].shape, block, strict=True)] for name in lacking}
        return tensors | {f"{name}{request.SCALES}": like.new_ones(shape) for name, shape in shapes.items()}

    return border.loading(session, world, filled, of="checkpoint_missing")


def _of_the_gate(name: str, scales: torch.Tensor, tensors: Tensors, world: World) -> torch.Tensor:
    return tensors.get(f"{name.replace('.up_proj', '.gate_proj')}{SCALES}", scales)


def _from_the_shards_own_start(name: str, scales: torch.Tensor, tensors: Tensors, world: World) -> torch.Tensor:
    """The second of two TP ranks counts blocks of rows from its own first row."""
    second = world.rank % 2 and name.endswith(".q_proj")
    return torch.cat([scales[: len(scales) // 2]] * 2) if second else scales


def _counted_through(name: str, scales: torch.Tensor, tensors: Tensors, world: World) -> torch.Tensor:
    """Scales of in_proj_z begin in the last block of in_proj_qkv, which does not end where the weight does."""
    above = tensors.get(f"{name.replace('.in_proj_z', '.in_proj_qkv')}{SCALES}", scales)
    return torch.cat([above[-1:], scales[:-1]]) if name.endswith(".in_proj_z") else scales


_DEEPSEEK = cell("deepseek_v3", "one", layers=3, dtype="bfloat16", fp8_checkpoint=True)
_DELTA = cell("qwen3_5_moe_text", "one", dtype="bfloat16", fp8_checkpoint=True)


def _fault(name: str, bug: str, change: Change, diagnosis: str = "their scales", of: Cell = _DEEPSEEK) -> Fault:
    return Fault(
        id=name,
        bug=bug,
        rules=("LOD-001", "EXP-002"),
        cell=of,
        wrap=_with(change),
        one_rank=True,
        diagnosis=diagnosis,
    )


#: Its checkpoint without a tensor lacks scales of attention.
OPTIONAL = cell("qwen3_moe", "one", dtype="bfloat16", fp8_checkpoint=True)


FAULTS = (
    _fault(
        "fp8-without-scales",
        "Megatron-Bridge#5851: FP8 numbers are cast to bf16, without their scales",
        lambda name, scales, tensors, world: torch.ones_like(scales),
    ),
    _fault(
        "fp8-gates-without-scales",
        "unsloth#6200: the scales of every gate_proj are dropped, and it is used as it is",
        lambda name, scales, tensors, world: scales**0 if name.endswith(".gate_proj") else scales,
    ),
    _fault(
        "fp8-divided-by-scales",
        "reported nowhere: `_scale_inv` is taken for the inverse of what weights are multiplied by",
        lambda name, scales, tensors, world: 1 / scales,
    ),
    _fault(
        "fp8-scale-of-the-gate",
        "Megatron-Bridge#5851 in kind: gate and up are joined, and both are multiplied by the first one's scales",
        _of_the_gate,
    ),
    _fault(
        "fp8-one-scale",
        "Megatron-Bridge#3778 in kind: blocks of 128 are taken for granted, whatever the config says",
        lambda name, scales, tensors, world: scales[:1, :1].expand(scales.shape),
    ),
    _fault(
        "fp8-last-block-of-rows",
        "GPTQModel#2875 in kind: the rows after the last whole block get the scales of that block",
        lambda name, scales, tensors, world: (
            torch.cat([scales[:-1], scales[-2:-1]]) if tensors[f"{name}.weight"].shape[0] % 8 else scales
        ),
    ),
    _fault(
        "fp8-scales-rounded",
        "reported nowhere: scales are rounded to bf16 before the product is",
        lambda name, scales, tensors, world: scales.bfloat16().float(),
        diagnosis="arithmetic, not movement",
    ),
    _fault(
        "fp8-delta-nets-without-scales",
        "Megatron-Bridge#5851 in kind: what joins the linears of gated delta nets casts their FP8 numbers to bf16",
        lambda name, scales, tensors, world: torch.ones_like(scales) if ".linear_attn." in name else scales,
        of=_DELTA,
    ),
    _fault(
        "fp8-blocks-through-joined-linears",
        "Megatron-Bridge#5851 in kind: in_proj_qkv and in_proj_z are joined, and blocks are counted from the first row",
        _counted_through,
        of=_DELTA,
    ),
    Fault(
        id="fp8-scales-of-attention-optional",
        bug="TensorRT-Model-Connect#1115: a linear in FP8 whose scales are missing is loaded without, and not refused",
        rules=("LOD-003",),
        cell=OPTIONAL,
        wrap=_without_scales_of_attention,
        says="self_attn.o_proj.weight_scale_inv",
    ),
    Fault(
        id="fp8-blocks-from-the-shards-start",
        bug="reported nowhere: a TP rank reads its rows and counts blocks from its own first row",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", fp8_checkpoint=True),
        wrap=_with(_from_the_shards_own_start),
        diagnosis="their scales",
    ),
)
