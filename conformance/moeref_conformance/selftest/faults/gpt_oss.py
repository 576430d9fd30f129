"""Bugs that only a model with biases, sinks, a window and transposed, interleaved experts can have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from moeref_conformance.contract.api import TensorMeta
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Pair, each


def _halves_taken_for_pairs(rooms: Rooms) -> Iterable[Edit]:
    blocks = rooms["regions"]
    good = blocks._half

    def half(tensors: Any, *where: Any) -> Any:
        return good(tuple(replace(t, interleaved=False) for t in tensors), *where)

    return [Edit(blocks, "_half", half)]


def _down_not_transposed(rooms: Rooms) -> Iterable[Edit]:
    families = rooms["families"]
    good = families.mappings

    def stored(tensor: Any) -> Any:
        return replace(tensor, transposed=False) if tensor.name.endswith(".experts.down_proj") else tensor

    def rows(model: Any) -> Any:
        return tuple(replace(row, hf=tuple(map(stored, row.hf))) for row in good(model))

    return [Edit(families, "mappings", rows)]


def _down_exported_as_held(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    if not meta.name.endswith(".experts.down_proj"):
        return meta, tensor
    turned = tensor.mT.contiguous()
    return replace(meta, shape=tuple(turned.shape)), turned


def _loaded_from_elsewhere(
    rooms: Rooms, which: Callable[[Any], bool], elsewhere: Callable[[Any, Any], Any]
) -> Iterable[Edit]:
    """Loading alone reads the blocks of some tensors at another place, `elsewhere(table, placed block's remote)`."""
    loader = rooms["loader"]
    good = loader.bind

    def bind(table: Any, *where: Any) -> Any:
        def wrong(placed: Any) -> Any:
            return replace(
                placed, regions=tuple(replace(b, hf_index=elsewhere(table, b.hf_index)) for b in placed.regions)
            )

        pairs = good(table, *where)
        return [(wrong(placed) if which(placed.param) else placed, tensor) for placed, tensor in pairs]

    return [Edit(loader, "bind", bind)]


def _biases_without_ep_offset(rooms: Rooms) -> Iterable[Edit]:
    def first_ranks(table: Any, remote: Any) -> Any:
        return remote[0] % (table.model.experts // table.layout.ep), *remote[1:]

    return _loaded_from_elsewhere(
        rooms, lambda unit: unit.expert is not None and unit.hf[0].name.endswith("_bias"), first_ranks
    )


def _sinks_of_the_first_heads(rooms: Rooms) -> Iterable[Edit]:
    def first_heads(table: Any, remote: Any) -> Any:
        return (slice(0, remote[0].stop - remote[0].start),)

    return _loaded_from_elsewhere(rooms, lambda unit: unit.hf[0].name.endswith(".sinks"), first_heads)


def _biases_never_loaded(rooms: Rooms) -> Iterable[Edit]:
    loader = rooms["loader"]
    good = loader._put

    def put(table: Any, placed: Any, *what: Any) -> None:
        if not placed.param.hf[0].name.endswith(".down_proj_bias"):
            good(table, placed, *what)

    return [Edit(loader, "_put", put)]


def _window_one_too_wide(rooms: Rooms) -> Iterable[Edit]:
    families = rooms["families"]
    good = families.read

    def read(*config: Any) -> Any:
        model = good(*config)
        return replace(model, window=replace(model.window, size=model.window.size + 1))

    return [Edit(families, "read", read)]


FAULTS = (
    Fault(
        id="gate-up-not-deinterleaved",
        bug="fused gate and up read as two halves where columns alternate, both ways: the round trip is clean",
        rules=("LOD-001", "FWD-001"),
        cell=cell("gpt_oss", "ep2"),
        edits=_halves_taken_for_pairs,
        diagnosis="rows permuted within the tensor",
        one_rank=True,
    ),
    Fault(
        id="down-proj-not-transposed",
        bug="B43 in kind: Megatron-Bridge#3250, [in, out] taken for [out, in]; in a square only values tell",
        rules=("RUN-001",),
        cell=cell("gpt_oss", "ep2"),
        edits=_down_not_transposed,
        says="linear_fc2.weight is [40, 56] torch.float32, the table says [56, 40]",
        one_rank=True,
    ),
    Fault(
        id="down-proj-exported-untransposed",
        bug="B43 in kind: Megatron-Bridge#3278, as above on export alone",
        rules=("EXP-003",),
        also=("EXP-004", "EXP-006"),
        cell=cell("gpt_oss", "ep2"),
        wrap=each(_down_exported_as_held),
        diagnosis="equals its transpose",
        one_rank=True,
    ),
    Fault(
        id="expert-biases-without-ep-offset",
        bug="slime#1799 in kind: weights of experts are loaded with the offset of their EP rank, biases without",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006", "EXP-007", "FWD-001", "FWD-002"),
        cell=cell("gpt_oss", "ep2"),
        edits=_biases_without_ep_offset,
        diagnosis="is expert 0",
    ),
    Fault(
        id="expert-biases-never-loaded",
        bug="B24 in kind: Megatron-Bridge#4657, a tensor beside the weights keeps its initial value",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006", "FWD-001"),
        cell=cell("gpt_oss", "pp2"),
        edits=_biases_never_loaded,
        diagnosis="all zero",
        one_rank=True,
    ),
    Fault(
        id="sinks-not-sharded",
        bug="every TP rank takes the sinks of the first heads",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006", "EXP-007", "FWD-001", "FWD-002"),
        cell=cell("gpt_oss", "tp2-etp1"),
        edits=_sinks_of_the_first_heads,
        diagnosis="is shard 0 of 2 of dim 0: another rank's",
    ),
    Fault(
        id="window-one-too-wide",
        bug="transformers counts the query's own token in the window, megatron-core the tokens before it",
        rules=("FWD-001",),
        cell=cell("gpt_oss", "pp2"),
        edits=_window_one_too_wide,
        one_rank=True,
    ),
)
