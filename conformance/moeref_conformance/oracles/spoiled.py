"""Checkpoints that a target must not take as they are: one tensor too few, one too many, or one in another shape.

A loader may look for experts and not for norms, so every kind has its variants, which cost nothing more.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.requests import int4, mxfp4
from moeref_conformance.contract.requests.quantised import SCALES
from moeref_conformance.oracles import mtp_names
from moeref_conformance.oracles.expected import EXTRA
from moeref_conformance.oracles.shares import ROUTERS

#: Families with biases beside weights or in routers, and those whose published files end with layers for MTP.
_BIASED = (
    *("glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "kimi_k25"),
    "minimax_m2",
)
_PREDICTING = ("glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
#: Families without biases in routers, whose last layer may have no attention.
_HYBRID = ("qwen3_next", "qwen3_5_moe_text")
#: An expert of the second half, which EP 2 does not give to its first rank.
_ONE = {"mixtral": 5}
_VALUES, _SHARED = (".v_proj.weight", ".kv_b_proj.weight"), (".shared_experts.up_proj.weight",)
_OUTPUTS = (".self_attn.o_proj.weight", ".linear_attn.out_proj.weight")
_OF_OUTPUTS = tuple(f"{name}{SCALES}" for name in _OUTPUTS)


def missing_kinds(cell: Cell) -> list[str]:
    """Kinds of tensors of the cell's checkpoint: of microbatches of several samples, parts that loaders join."""
    if cell.fp8_checkpoint:
        return ["scales", "scales of attention"]
    if cell.int4_checkpoint:
        return ["scales of INT4", "numbers"]
    if cell.mxfp4_checkpoint:
        return ["scales of MXFP4", "blocks"]
    if cell.batch != "single" and cell.family not in _HYBRID:
        return ["values"] + ["shared expert"] * (cell.family in ("glm4_moe", "deepseek_v3"))
    kinds = ["expert", "norm", "final norm", "router"]
    kinds += ["head"] * (not cell.tied) + ["bias"] * (cell.family in _BIASED) + ["mtp"] * bool(cell.mtp)
    return kinds


def surplus_kinds(cell: Cell) -> list[str]:
    """Kinds of tensors that the cell's checkpoint could have too many."""
    kinds = ["module", "norm", "head"]
    kinds += ["expert"] * (_per_expert(cell) and not cell.int4_checkpoint)
    kinds += ["bias"] * (cell.family not in ("gpt_oss", *_HYBRID))
    kinds += ["router"] * (cell.family not in _BIASED) + ["layer"] * (cell.family not in _PREDICTING)
    return kinds


def chosen(cell: Cell, kinds: Sequence[str]) -> str:
    """The kind for the cell's variant."""
    return kinds[zlib.crc32(cell.variant.encode()) % len(kinds)]


def missing(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> str:
    """The name that a checkpoint of the cell's variant lacks. RuntimeError if transformers writes no such tensor."""
    kind, layer = chosen(cell, missing_kinds(cell)), f"model.layers.{cell.layers - 1}."
    fixed = {
        "expert": _expert(cell, _ONE.get(cell.family, 11)),
        "scales": f"{_expert(cell, 11)}{SCALES}",
        "scales of INT4": f"{_expert(cell, 11)}{int4.SCALE}",
        "numbers": f"{_expert(cell, 11)}{int4.PACKED}",
        "scales of MXFP4": f"{_expert(cell, 11)}{mxfp4.SCALES}",
        "blocks": f"{_expert(cell, 11)}{mxfp4.BLOCKS}",
        "norm": f"{layer}{'self_attn.q_norm' if _norms_heads(cell) else 'input_layernorm'}.weight",
        "final norm": "model.norm.weight",
        "head": "lm_head.weight",
        "mtp": mtp_names.in_files(cell.family, cell.layers, 0, "eh_proj.weight"),
    }
    # Of two biases GLM-4.5 lacks one with separate norms and the other with fused ones.
    biases = ("e_score_correction_bias",) if cell.norms == "fused" and cell.family != "gpt_oss" else ("bias",)
    ends = {
        "router": ROUTERS,
        "bias": biases,
        "scales of attention": _OF_OUTPUTS,
        "values": _VALUES,
        "shared expert": _SHARED,
    }.get(kind, ())
    name = fixed.get(kind) or next((n for n in reversed(list(tensors)) if n.startswith(layer) and n.endswith(ends)), "")
    if name not in tensors:
        raise RuntimeError(f"cell {cell.id}: transformers wrote no {name or kind}; the recipe of `missing` is outdated")
    return name


def is_listed(cell: Cell) -> bool:
    """Whether the index still names the missing tensor, as where a save left a part of a shard out."""
    return chosen(cell, missing_kinds(cell)) in ("expert", "router", "values")


def surplus(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> tuple[str, tuple[int, ...]]:
    """Name and shape of what a checkpoint of the cell's variant has too many."""
    kind, layer = chosen(cell, surplus_kinds(cell)), f"model.layers.{cell.layers - 1}."
    vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
    experts = next(len(t) for n, t in tensors.items() if n.startswith(layer) and n.endswith(ROUTERS))
    if kind == "expert":
        return _expert(cell, experts), tuple(tensors[_expert(cell, _ONE.get(cell.family, 11))].shape)
    return {
        "module": (EXTRA, (3, 5)),
        "norm": (f"{layer}post_feedforward_layernorm.weight", (hidden,)),
        "head": ("lm_head.bias", (vocabulary,)),
        "bias": (f"{layer}self_attn.o_proj.bias", (hidden,)),
        "router": (f"{layer}mlp.gate.e_score_correction_bias", (experts,)),
        "layer": (f"model.layers.{cell.layers}.input_layernorm.weight", (hidden,)),
    }[kind]


def unlike_kinds(cell: Cell) -> list[str]:
    """Kinds of tensors that the cell's checkpoint could have in another shape."""
    if cell.int4_checkpoint:
        return ["scales of INT4"]
    if cell.mxfp4_checkpoint:
        return ["scales of MXFP4"]
    return ["scales"] if cell.fp8_checkpoint else ["norm", "expert", "output"]


def unlike(cell: Cell, tensors: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Name and values of what a checkpoint of the cell's variant has in another shape.

    A norm has one value, which copying broadcasts; others are longer by one along the side that TP or ETP cuts, where
    a cut to the size of a shard fits.
    """
    kind, layer = chosen(cell, unlike_kinds(cell)), f"model.layers.{cell.layers - 1}."
    expert = _expert(cell, _ONE.get(cell.family, 11))
    names = {"norm": f"{layer}input_layernorm.weight", "expert": expert, "scales": f"{expert}{SCALES}"}
    names |= {"scales of INT4": f"{expert}{int4.SCALE}", "scales of MXFP4": f"{expert}{mxfp4.SCALES}"}
    name = names.get(kind) or next(n for n in tensors if n.startswith(layer) and n.endswith(_OUTPUTS))
    tensor, dim = tensors[name], 0 if kind == "expert" and _per_expert(cell) else -1
    if kind == "norm":
        return name, tensor[:1].clone()
    return name, torch.cat([tensor, -tensor.narrow(dim, 0, 1)], dim)


def _norms_heads(cell: Cell) -> bool:
    """Whether the missing norm is that of queries: in bf16, of families that have one in the last layer."""
    return cell.dtype == "bfloat16" and cell.family in ("glm4_moe", "minimax_m2", "qwen3_moe")


def _per_expert(cell: Cell) -> bool:
    return cell.expert_format == "per_expert" and cell.family != "gpt_oss"


def _expert(cell: Cell, number: int) -> str:
    layer = f"model.layers.{cell.layers - 1}."
    if not _per_expert(cell):
        return f"{layer}mlp.experts.down_proj"
    return layer + (
        f"block_sparse_moe.experts.{number}.w3.weight"
        if cell.family in ("mixtral", "minimax_m2")
        else f"mlp.experts.{number}.up_proj.weight"
    )
