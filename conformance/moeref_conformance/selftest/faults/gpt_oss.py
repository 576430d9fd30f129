"""Bugs that only a model with biases, sinks, a window and transposed, interleaved experts can have."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, Tensors, each, loaded, read_as, rearranged
from moeref_conformance.selftest.faults.base import Fault, cell

_EXPERT = re.compile(r"local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)$")


def _halves_taken_for_pairs(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """An expert's fc1 has its rows in the file's order, in which gate and up alternate."""
    expert = _EXPERT.search(row.local)
    return torch.arange(rows).view(2, -1).T.flatten() if expert and expert[2] == "1" else None


def _down_not_transposed(session: Any, cell: Cell, world: World) -> Any:
    """The mistake is in the table, on load and on export; tensors that are not square fail on load."""

    def is_down(row: NameRow) -> bool:
        return bool(_EXPERT.search(row.local)) and row.local.endswith("linear_fc2.weight")

    def transpose() -> None:
        for row, tensor in border.held(session, world):
            if is_down(row):
                tensor.copy_(tensor.T.clone())

    wrong = border.both_ways(session, transpose, transpose)
    stored = border.each_row(lambda row: replace(row, shape=row.shape[::-1]) if is_down(row) else row)
    return border.loads_by_table(stored(wrong, cell, world), world)


def _down_exported_as_held(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if not meta.name.endswith(".experts.down_proj"):
        return meta, tensor
    turned = tensor.mT.contiguous()
    return replace(meta, shape=tuple(turned.shape)), turned


def _biases_without_ep_offset(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    expert = _EXPERT.search(row.local)
    if expert is None or expert[3] != "bias":
        return None
    bias = tensors[row.hf[0]][int(expert[1])]
    return bias.view(-1, 2).T.flatten() if expert[2] == "1" else bias  # gate and up alternate in the file


def _biases_never_loaded(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    return torch.zeros(row.shape) if _EXPERT.search(row.local) and row.local.endswith("linear_fc2.bias") else None


def _sinks_of_the_first_heads(row: NameRow, tensors: Tensors, cell: Cell) -> torch.Tensor | None:
    return tensors[row.hf[0]][: row.shape[0]] if row.local.endswith("softmax_offset") else None


def _window_one_too_wide(cell: Cell, world: World) -> tuple[Cell, World]:
    """The model is built from a config whose window has one token more."""
    return cell, read_as(world, lambda config: {"sliding_window": config["sliding_window"] + 1})


def _by_interval(cell: Cell, world: World) -> tuple[Cell, World]:
    """The place of the first layer with full attention is taken for a period."""

    def periodic(config: dict[str, Any]) -> dict[str, Any]:
        kinds = config["layer_types"]
        every = kinds.index("full_attention") + 1
        return {"layer_types": [kinds[0] if (layer + 1) % every else "full_attention" for layer in range(len(kinds))]}

    return cell, read_as(world, periodic)


FAULTS = (
    Fault(
        id="gate-up-not-deinterleaved",
        bug="fused gate and up read as two halves where columns alternate, both ways: the round trip is clean",
        rules=("LOD-001", "FWD-001"),
        cell=cell("gpt_oss", "ep2"),
        wrap=rearranged(_halves_taken_for_pairs),
        diagnosis="rows permuted within the tensor",
        one_rank=True,
    ),
    Fault(
        id="down-proj-not-transposed",
        bug="B43, Megatron-Bridge#3743, #3250: [in, out] taken for [out, in], by a square of which no shape tells",
        rules=("LOD-001", "FWD-001"),
        cell=cell("gpt_oss", "ep2"),
        wrap=_down_not_transposed,
        diagnosis="equals its transpose",
        one_rank=True,
    ),
    Fault(
        id="down-proj-exported-untransposed",
        bug="B43: Megatron-Bridge#3278, as above on export alone",
        rules=("EXP-002",),
        cell=cell("gpt_oss", "ep2"),
        wrap=each(_down_exported_as_held),
        diagnosis="equals its transpose",
        one_rank=True,
    ),
    Fault(
        id="expert-biases-without-ep-offset",
        bug="slime#1799 in kind: weights of experts are loaded with the offset of their EP rank, biases without",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007", "FWD-001", "FWD-002"),
        cell=cell("gpt_oss", "ep2"),
        wrap=loaded(_biases_without_ep_offset),
        diagnosis="holds expert 0",
    ),
    Fault(
        id="expert-biases-never-loaded",
        bug="B24 in kind: Megatron-Bridge#4657, a tensor beside the weights keeps its initial value",
        rules=("LOD-001", "EXP-002"),
        also=("FWD-001",),
        cell=cell("gpt_oss", "pp2"),
        wrap=loaded(_biases_never_loaded),
        diagnosis="all zero",
        one_rank=True,
    ),
    Fault(
        id="sinks-not-sharded",
        bug="every TP rank takes the sinks of the first heads",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-007", "FWD-001", "FWD-002"),
        cell=cell("gpt_oss", "tp2-etp1"),
        wrap=loaded(_sinks_of_the_first_heads),
        diagnosis="is shard 0 of 2 of dim 0: another rank's",
    ),
    Fault(
        id="window-one-too-wide",
        bug="transformers counts the query's own token in the window, megatron-core the tokens before it",
        rules=("CFG-001", "FWD-001"),
        cell=cell("gpt_oss", "pp2"),
        given=_window_one_too_wide,
        one_rank=True,
    ),
    Fault(
        id="layer-types-by-interval",
        bug="Megatron-Bridge#4790, #4843, vLLM#33594: the first layer with full attention is taken for a period",
        rules=("CFG-001", "FWD-001"),
        cell=cell("gpt_oss", "one", layers=3, batch="pairs"),
        given=_by_interval,
        one_rank=True,
        says="window_attn_skip_freq",
    ),
)
