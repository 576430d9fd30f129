"""Bugs of loading: wrong slices, the wrong expert, a tied head left unset, refusals that do not come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell


def _reads_another(rooms: Rooms, which: Callable[[Any, int, Any], tuple[int, int]]) -> Iterable[Edit]:
    """Loading alone fills a tensor with that of another (layer, expert): `which(table, rank, unit)`."""
    load = rooms["loader"]
    good = load.bind

    def bind(table: Any, rank: int, chunks: Any) -> Any:
        everyone = {(u.layer, u.expert, u.mapping): u for u in table.global_params}
        out = []
        for placed, tensor in good(table, rank, chunks):
            unit = everyone.get((*which(table, rank, placed.param), placed.param.mapping), placed.param)
            out.append((replace(placed, param=unit), tensor))
        return out

    def load_only(table: Any, rank: int, chunks: Any, folder: Any) -> None:
        original, load.bind = load.bind, bind
        try:
            good_load(table, rank, chunks, folder)
        finally:
            load.bind = original

    good_load = load.load
    return [Edit(load, "load", load_only)]


def _no_expert_offset(rooms: Rooms) -> Iterable[Edit]:
    def which(table: Any, rank: int, unit: Any) -> Any:
        first = table.layout.experts(table.layout.coords(rank).ep, table.model.experts).start
        return unit.layer, None if unit.expert is None else unit.expert - first

    return _reads_another(rooms, which)


def _bias_of_the_layer_before(rooms: Rooms) -> Iterable[Edit]:
    def which(table: Any, rank: int, unit: Any) -> Any:
        return unit.layer - unit.mapping.megatron.endswith("expert_bias") if unit.layer else unit.layer, unit.expert

    return _reads_another(rooms, which)


def _routers_by_ordinal(rooms: Rooms) -> Iterable[Edit]:
    """The routers are listed without the dense layers and indexed with the layer number; the last one is clamped."""

    def which(table: Any, rank: int, unit: Any) -> Any:
        moe = [i for i, is_moe in enumerate(table.model.moe_layers) if is_moe]
        router = unit.mapping.megatron.endswith("router.weight")
        return moe[min(unit.layer, len(moe) - 1)] if router else unit.layer, unit.expert

    return _reads_another(rooms, which)


def _row_shards_mirrored(rooms: Rooms) -> Iterable[Edit]:
    """Both ways, so that the round trip is clean."""
    units = rooms["shard_map"]
    good = units.shard_regions

    def shard_regions(model: Any, row: Any, rank: int, parts: int, **kwargs: Any) -> Any:
        return good(model, row, parts - 1 - rank if row.sharding == "row" else rank, parts, **kwargs)

    return [Edit(units, "shard_regions", shard_regions)]


def _nameless_refusal(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good = load.check_headers

    def check(*args: Any) -> None:
        try:
            good(*args)
        except ValueError as error:
            raise ValueError("the checkpoint does not fit the model") from error

    return [Edit(load, "check_headers", check)]


def _checked_on_rank_0(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good_load, good_check = load.load, load.check_headers

    def load_here(table: Any, rank: int, *args: Any) -> None:
        with mock.patch.object(load, "check_headers", good_check if rank == 0 else lambda *_: None):
            good_load(table, rank, *args)

    return [Edit(load, "load", load_here)]


def _qkv_flat(rooms: Rooms) -> Iterable[Edit]:
    blocks = rooms["regions"]

    def qkv(model: Any, rank: int, parts: int, tail: Any, rest: Any, what: str) -> Any:
        made, at = [], 0
        for source, rows in enumerate((model.dims["q"], model.dims["kv"], model.dims["kv"])):
            share = blocks._share(rows, rank, parts, what)
            size = share.stop - share.start
            made.append(blocks.CopyRegion(source, (share, *tail), (slice(at, at + size), *tail)))
            at += size
        return (at, *rest), tuple(made)

    return [Edit(blocks, "_qkv_regions", qkv)]


def _tied_head_unset(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good = load.bind

    def bind(table: Any, rank: int, chunks: Any) -> Any:
        return [(placed, tensor) for placed, tensor in good(table, rank, chunks) if placed.param.exports]

    return [Edit(load, "bind", bind)]


def _vocab_not_padded(rooms: Rooms) -> Iterable[Edit]:
    def padded_vocab(model: Any, tp: int, divisible_by: int) -> int:
        return int(model.vocab)

    return [Edit(rooms["shard_map"], "padded_vocab", padded_vocab)]


def _gate_up_halves(rooms: Rooms) -> Iterable[Edit]:
    """TP rank r takes rows r of cat(gate, up) as one tensor, on load and on export: the round trip is clean."""
    blocks, units = rooms["regions"], rooms["shard_map"]
    good = blocks.shard_regions

    def shard_regions(model: Any, row: Any, rank: int, parts: int, **kwargs: Any) -> Any:
        shape, made = good(model, row, rank, parts, **kwargs)
        if row.sharding != "gate_up" or parts != 2 or kwargs.get("fused"):
            return shape, made
        rows, tail = model.dims[row.hf[0].dims[0]], made[0].shard_index[1:]
        whole = (slice(0, rows), *tail)
        return shape, (blocks.CopyRegion(rank, whole, whole),)

    return [Edit(units, "shard_regions", shard_regions)]


def _unknown_skipped(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good = load.inventory

    def inventory(chunks: Any) -> Any:
        return {k: v for k, v in good(chunks).items() if "kit_unmapped" not in k[1]}

    return [Edit(load, "inventory", inventory)]


def _extra_skipped(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good = load.check_headers

    def check(checkpoint: Any, wanted: Any, *where: Any) -> None:
        wanted = list(wanted)
        for name in checkpoint.names - {t.name for t in wanted}:
            checkpoint._where.pop(name)
        good(checkpoint, wanted, *where)

    return [Edit(load, "check_headers", check)]


def _missing_skipped(rooms: Rooms) -> Iterable[Edit]:
    load = rooms["loader"]
    good_check, good_bind = load.check_headers, load.bind

    def check(checkpoint: Any, wanted: Any, *where: Any) -> None:
        good_check(checkpoint, [t for t in wanted if t.name in checkpoint.names], *where)

    good_load = load.load

    def load_only(table: Any, rank: int, chunks: Any, folder: Any) -> None:
        with load.Checkpoint(folder) as opened:
            names = opened.names

        def bind(*args: Any) -> Any:
            return [(p, t) for p, t in good_bind(*args) if all(h.name in names for h in p.param.hf)]

        load.bind = bind
        try:
            good_load(table, rank, chunks, folder)
        finally:
            load.bind = good_bind

    return [Edit(load, "check_headers", check), Edit(load, "load", load_only)]


FAULTS = (
    Fault(
        id="load-without-ep-offset",
        bug="B21: slime#1799, the local expert id indexed the global tensor",
        rules=("LOD-001", "EXP-002"),
        also=(
            "EXP-006",
            "EXP-007",
            "FWD-001",
            "FWD-002",
        ),
        cell=cell("qwen3_moe", "ep2"),
        edits=_no_expert_offset,
        diagnosis="is expert 0",
    ),
    Fault(
        id="qkv-as-q-k-v",
        bug="B31: NeMo-RL#2802, [Q;K;V] under GQA, on load and on export, so that the round trip is clean",
        rules=("LOD-001", "FWD-001"),
        also=("FWD-002",),
        cell=cell("qwen3_moe", "tp2"),
        edits=_qkv_flat,
        diagnosis="q, k and v stacked: the interleave of KV groups is lost",
        one_rank=True,
    ),
    Fault(
        id="tied-head-unset",
        bug="B34: Megatron-Bridge#957, #4694: the tied head of the last stage is not the embedding",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "pp2", tied=True),
        edits=_tied_head_unset,
        diagnosis="nothing of it is in the checkpoint",
    ),
    Fault(
        id="vocab-not-padded",
        bug="B33: Megatron-Bridge#1473, import with a vocabulary that TP does not divide",
        rules=("RUN-001",),
        also=("NAM-001", "NAM-002", "NAM-003", "NAM-004", "NAM-007"),
        cell=cell("qwen3_moe", "tp2"),
        edits=_vocab_not_padded,
        one_rank=True,
    ),
    Fault(
        id="gate-up-as-one-tensor",
        bug="B29 on both ways: each TP rank takes a contiguous half of cat(gate, up)",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("glm4_moe", "tp2"),
        edits=_gate_up_halves,
        diagnosis="TP shard is a contiguous part of cat(gate and up)",
    ),
    Fault(
        id="bias-of-the-layer-before",
        bug="B24 in kind: the router's bias is taken from another layer",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006", "FWD-001"),
        cell=cell("glm4_moe", "pp2", layers=4),
        edits=_bias_of_the_layer_before,
        diagnosis="is layer -1",
        one_rank=True,
    ),
    Fault(
        id="routers-by-ordinal",
        bug="R1 on weights: verl#5037, the dense prefix shifts what is listed for MoE layers only",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006", "FWD-001"),
        cell=cell("glm4_moe", "pp2", layers=4),
        edits=_routers_by_ordinal,
        diagnosis="is layer +1 = dense prefix",
        one_rank=True,
    ),
    Fault(
        id="row-shards-mirrored",
        bug="the order of TP ranks reversed for row-parallel weights, both ways: the round trip is clean",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=cell("qwen3_moe", "tp2"),
        edits=_row_shards_mirrored,
        diagnosis="is shard 1 of 2 of dim 1: another rank's",
    ),
    Fault(
        id="refusal-names-nothing",
        bug="an error that says that something does not fit, and not what",
        rules=("LOD-002", "LOD-003"),
        cell=cell("qwen3_moe", "ep2"),
        edits=_nameless_refusal,
        says="the error does not name",
    ),
    Fault(
        id="checked-on-rank-0-alone",
        bug="one rank reads the headers and raises, the others go on and wait for it",
        rules=("LOD-002",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_checked_on_rank_0,
        says="nothing was raised",
    ),
    Fault(
        id="unknown-parameter-skipped",
        bug="torchtitan's `continue` past a key that is not in the map",
        rules=("NAM-006",),
        cell=cell("qwen3_moe", "pp2"),
        edits=_unknown_skipped,
    ),
    Fault(
        id="extra-tensor-skipped",
        bug="a checkpoint tensor that no row takes is dropped without a word",
        rules=("LOD-002",),
        cell=cell("qwen3_moe", "ep2"),
        edits=_extra_skipped,
    ),
    Fault(
        id="missing-tensor-skipped",
        bug="B24: Megatron-Bridge#4657, what the checkpoint lacks keeps its initial value",
        rules=("LOD-003",),
        cell=cell("glm4_moe", "ep2"),
        edits=_missing_skipped,
    ),
)
