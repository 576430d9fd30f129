"""Bugs that only Qwen3-Next's fused linears and zero-centred norms can have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell
from moeref_conformance.selftest.faults.rewrite import Pair, Rewritten


def _as_in_the_file(rooms: Rooms) -> Iterable[Edit]:
    """The rows of a rank's heads as they lie in in_proj_qkvz, then those in in_proj_ba."""

    def delta_in(delta: Any, heads: range) -> Iterator[tuple[int, int, int]]:
        for source, rows in enumerate((delta.dims["gdn_qkvz"], delta.dims["gdn_ba"])):
            yield source, heads.start * rows // delta.key_heads, len(heads) * rows // delta.key_heads

    return [Edit(rooms["regions"].gated_delta_net, "gdn_in_proj", delta_in)]


def _channels_in_one_run(rooms: Rooms) -> Iterable[Edit]:
    def delta_conv(delta: Any, heads: range) -> Iterator[tuple[int, int, int]]:
        rows = delta.dims["gdn_qkv"]
        yield 0, heads.start * rows // delta.key_heads, len(heads) * rows // delta.key_heads

    return [Edit(rooms["regions"].gated_delta_net, "gdn_conv1d", delta_conv)]


def _gates_after_all_queries(rooms: Rooms) -> Iterable[Edit]:
    """q_proj is read as [all queries | all gates], where a head's query and gate follow one another."""
    delta = rooms["regions"].gated_delta_net
    good = delta.gated_qkv

    def gated_qkv(model: Any, groups: range) -> Iterator[tuple[int, int, int]]:
        d = model.head_dim
        for source, start, rows in good(model, groups):
            head, half = divmod(start // d, 2)
            yield source, (half * model.heads + head) * d if source == 0 else start, rows

    return [Edit(delta, "gated_qkv", gated_qkv)]


class _Shifted(Rewritten):
    """Gated delta nets whose own norms are held zero-centred, as w - 1, and exported as that plus 1."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, self._add_one)
        self.load = self._load_less_one

    def _load_less_one(self, checkpoint: Path) -> None:
        self._good.load(checkpoint)
        for chunk in self.chunks():
            for name, module in chunk.named_modules():
                if name.endswith("self_attention.out_norm"):
                    module.zero_centered = True
                    module.weight.data -= 1

    @staticmethod
    def _add_one(stream: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in stream:
            shifted = tensor is not None and meta.name.endswith("linear_attn.norm.weight")
            yield meta, tensor + 1 if shifted and tensor is not None else tensor
            del tensor


def _norms_shifted(session: Session, cell: Cell, world: World) -> Any:
    return _Shifted(session)


_CELL = cell("qwen3_next", "tp2")
FAULTS = (
    Fault(
        id="delta-heads-left-interleaved",
        bug="B31 in kind: in_proj_qkvz and in_proj_ba per key head taken for [q; k; v; z; b; a], both ways",
        rules=("LOD-001", "FWD-001"),
        also=("FWD-002",),
        cell=_CELL,
        edits=_as_in_the_file,
        diagnosis="as they lie in the file",
        one_rank=True,
    ),
    Fault(
        id="delta-channels-not-rechunked",
        bug="B29 in kind: each TP rank takes a contiguous part of conv1d's [q | k | v] channels, both ways",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=_CELL,
        edits=_channels_in_one_run,
        diagnosis="as they lie in the file",
    ),
    Fault(
        id="gates-after-all-queries",
        bug="q_proj taken for [queries; gates] where heads have one after the other, both ways",
        rules=("LOD-001", "FWD-001"),
        cell=_CELL,
        edits=_gates_after_all_queries,
        diagnosis="rows",
        one_rank=True,
    ),
    Fault(
        id="norms-held-less-one",
        bug="Megatron-Bridge's Qwen3-Next: w - 1 on load and + 1 on export, which rounds where |w| < 0.5",
        rules=("LOD-001", "EXP-002"),
        also=("EXP-006",),
        cell=_CELL,
        wrap=_norms_shifted,
        diagnosis="arithmetic, not movement",
        one_rank=True,
    ),
)
