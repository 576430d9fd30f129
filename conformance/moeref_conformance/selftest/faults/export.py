"""Exporter bugs after gathering: padding, rounding, transposing, names and metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, TensorMeta, World
from moeref_conformance.selftest.border import Pair, each
from moeref_conformance.selftest.faults.base import Fault, cell


def _padding_exported(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if "embed_tokens" not in meta.name and "lm_head" not in meta.name:
        return meta, tensor
    more = 256 - tensor.shape[0]
    return replace(meta, shape=(256, tensor.shape[1])), torch.cat([tensor, tensor.new_zeros(more, tensor.shape[1])])


def _bias_in_bf16(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return (meta, tensor.bfloat16().float()) if meta.name.endswith("e_score_correction_bias") else (meta, tensor)


def _everything_in_bf16(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return replace(meta, dtype="bfloat16"), tensor.bfloat16()


def _fused_transposed(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if tensor.ndim != 3:
        return meta, tensor
    turned = tensor.transpose(1, 2).contiguous()
    return replace(meta, shape=tuple(turned.shape)), turned


def _longer_side_first(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """Takes the longer side of gate and up together for their rows."""
    by_length = tensor.ndim != 3 or not meta.name.endswith("gate_up_proj") or tensor.shape[1] > tensor.shape[2]
    return (meta, tensor) if by_length else _fused_transposed(meta, tensor)


def _gate_for_up(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    name = meta.name
    if ".experts." in name and "shared" not in name:
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for part, other in swap.items():
            if part in name:
                return replace(meta, name=name.replace(part, other)), tensor
    return meta, tensor


def _o_proj_transposed(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if not meta.name.endswith("o_proj.weight"):
        return meta, tensor
    return replace(meta, shape=(meta.shape[1], meta.shape[0])), tensor.T.contiguous()


def _dtype_misstated(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return replace(meta, dtype="float16"), tensor


def _nothing_sent(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """The call succeeds and the receiver reads what its buffer held before."""
    noise = torch.Generator().manual_seed(len(meta.name) + tensor.numel())
    return meta, torch.rand(tensor.shape, generator=noise).to(tensor.dtype)


def _not_transposed_under_ep(session: Any, cell: Cell, world: World) -> Any:
    """Experts gathered over EP miss the transpose that the path without EP applies."""
    return each(_fused_transposed)(session, cell, world) if cell.layout.ep > 1 else session


FAULTS = (
    Fault(
        id="padded-vocabulary-exported",
        bug="B32: Megatron-Bridge#5375",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=each(_padding_exported),
        diagnosis="125 rows of zeros appended (padding not trimmed)",
        one_rank=True,
    ),
    Fault(
        id="bias-rounded-to-bf16",
        bug="B41: miles#811, the router bias goes through bf16",
        rules=("EXP-002",),
        cell=cell("glm4_moe", "pp2"),
        wrap=each(_bias_in_bf16),
        diagnosis="bf16-rounded fp32",
        one_rank=True,
    ),
    Fault(
        id="everything-cast-to-bf16",
        bug="B41: sglang#37133, one dtype for all tensors",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("glm4_moe", "tp2"),
        wrap=each(_everything_in_bf16),
        diagnosis="rounded from float32 to bfloat16",
        one_rank=True,
    ),
    Fault(
        id="everything-cast-to-the-models-dtype",
        bug="ISEEKYAN/Megatron-LM#81: in bf16 all is sent in bf16, the experts' bias of families with latents too",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("glm4_moe_lite", "tp2", dtype="bfloat16", norms="fused", experts="grouped"),
        wrap=each(_everything_in_bf16),
        diagnosis="rounded from float32 to bfloat16",
        one_rank=True,
    ),
    Fault(
        id="fused-experts-transposed",
        bug="B43: Megatron-Bridge#3278, fused experts as [in, out]",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "ep2", expert_format="fused"),
        wrap=each(_fused_transposed),
        diagnosis="equals its transpose (last two dimensions swapped)",
        one_rank=True,
    ),
    Fault(
        id="fused-experts-turned-by-length",
        bug="unsloth-zoo#779 in kind: the longer side of gate_up_proj is taken for its rows; narrow experts are turned",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "ep2", expert_format="fused"),
        wrap=each(_longer_side_first),
        diagnosis="equals its transpose (last two dimensions swapped)",
        one_rank=True,
    ),
    Fault(
        id="gate-and-up-swapped",
        bug="slime#1840 in kind: the halves of fc1 under each other's names",
        rules=("EXP-002",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=each(_gate_for_up),
        diagnosis="gate and up swapped",
        one_rank=True,
    ),
    Fault(
        id="fused-not-transposed-under-ep",
        bug="training-gym#100: transpose_on_export missing at EP>1",
        rules=("EXP-003", "EXP-007"),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "ep2", expert_format="fused"),
        wrap=_not_transposed_under_ep,
        diagnosis="equals its transpose",
    ),
    Fault(
        id="o-proj-transposed",
        bug="slime#1840 in kind: a transpose too many, which square shapes hide",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_o_proj_transposed),
        diagnosis="equals its transpose",
        one_rank=True,
    ),
    Fault(
        id="dtype-misstated",
        bug="W4 in kind: the metadata names a dtype that the tensor does not have",
        rules=("EXP-003",),
        also=("EXP-004",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_dtype_misstated),
        says="the metadata says dtype float16, expected float32",
        one_rank=True,
    ),
    Fault(
        id="nothing-sent",
        bug="W16: tokenspeed#1373, the answer is 200, nothing was sent, and uninitialised memory is loaded",
        rules=("EXP-002",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_nothing_sent),
        diagnosis="nothing of it is in the checkpoint",
        one_rank=True,
    ),
)
