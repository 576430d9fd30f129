"""Which decoder layers every pipeline stage (pp, vp) builds, and why a split is impossible.

The order of stages is virtual stage by virtual stage, pipeline rank fastest: (pp 0, vp 0), (pp 1, vp 0), …, (pp 0,
vp 1), …. The rules give the number of layers of each stage; the layers are then dealt out in that order, so every layer
is in exactly one stage. megatron-core computes offsets by separate formulas (`get_transformer_layer_offset`). Where
they disagree with the counts, its stages overlap or leave layers out, and the split is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeref.layout.errors import LayoutError


@dataclass(frozen=True)
class Stages:
    """The decoder layers (0-based, global) of every stage. Keys are (pp, vp).

    `offsets` are megatron-core's layer offsets; stages without layers have one too. `mtp` is the stage with the
    `mtp_layers` multi-token prediction layers, or None.
    """

    num_layers: int
    layers: Mapping[tuple[int, int], tuple[int, ...]]
    offsets: Mapping[tuple[int, int], int]
    mtp: tuple[int, int] | None = None
    mtp_layers: int = 0

    def offset(self, pp: int, vp: int = 0) -> int:
        """Global index of the first layer of stage (pp, vp); local layer i there is global layer offset + i.

        Raises LayoutError for a stage that does not exist.
        """
        if (pp, vp) not in self.offsets:
            last_pp, last_vp = max(self.offsets)
            raise LayoutError(f"no stage (pp {pp}, vp {vp}): pp goes from 0 to {last_pp}, vp from 0 to {last_vp}")
        return self.offsets[pp, vp]

    def owner(self, layer: int) -> tuple[int, int]:
        """The stage (pp, vp) that builds the global `layer`. Raises LayoutError for a layer that does not exist."""
        for stage, layers in self.layers.items():
            if layer in layers:
                return stage
        raise LayoutError(f"layer {layer} does not exist: the model has layers 0 to {self.num_layers - 1}")


def deal(counts: Sequence[int], num_layers: int, pp: int, layout: str) -> Stages:
    """Give layers 0 … num_layers-1 in order to stages with these `counts`. layout: its text, for the error.

    Raises LayoutError if a count is negative or the counts do not add up to `num_layers`.
    """
    if min(counts) < 0 or sum(counts) != num_layers:
        stages = ", ".join(f"(pp {i % pp}, vp {i // pp}): {n}" for i, n in enumerate(counts))
        raise LayoutError(
            f"{layout} with num_layers={num_layers}: the stages cannot hold every layer exactly once, they would "
            f"have {stages} layers. megatron-core builds this silently; lower first= or last="
        )
    layers, offsets, start = {}, {}, 0
    for index, count in enumerate(counts):
        stage = index % pp, index // pp
        layers[stage] = tuple(range(start, start + count))
        offsets[stage] = start
        start += count
    return Stages(num_layers, layers, offsets)


def counts_even(num_layers: int, *, pp: int, vpp: int, embedding: bool, loss: bool) -> list[int]:
    """Layers per stage when all stages are equal; the embedding and the loss count as a layer each if set."""
    total = num_layers + embedding + loss
    counted = "".join(f" + 1 for {name}=1" for name, on in (("embedding", embedding), ("loss", loss)) if on)
    said = f"num_layers={num_layers}{counted}"
    if total % pp:
        raise LayoutError(
            f"{f'{said} = {total}' if counted else total} layers are not divisible by pp={pp}: {total % pp} left over. "
            f"Make it a multiple of {pp} with embedding=1 or loss=1, or use first=, last= or pipeline_layout="
        )
    if total // pp % vpp:
        raise LayoutError(
            f"{said} over pp={pp} is {total // pp} layers a pipeline rank, not divisible by vpp={vpp}; use a vpp "
            f"that divides {total // pp}, or pipeline_layout="
        )
    counts = [total // pp // vpp] * (pp * vpp)
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def counts_uneven(num_layers: int, *, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    """Layers per stage when the first or last pipeline rank has its own number and the others share the rest."""
    given = {name: value for name, value in (("first", first), ("last", last)) if value is not None}
    said = " and ".join(f"{name}={value}" for name, value in given.items())
    rest, middle = num_layers - sum(given.values()), pp - len(given)
    if pp == 1 and middle < 0 and last != num_layers:
        raise LayoutError(
            f"{said} at pp=1: the only pipeline rank is first and last at once, and megatron-core would build "
            f"{last} of num_layers={num_layers} layers silently; drop both"
        )
    if bool(rest) != bool(middle):
        raise LayoutError(
            f"{said} leave {rest} of num_layers={num_layers} layers for {middle} other pipeline ranks (pp={pp}); "
            + (f"leave at least {middle} layers" if not rest else "give the remaining layers to a pipeline rank")
        )
    if middle and rest % middle:
        raise LayoutError(
            f"{said} leave {rest} of num_layers={num_layers} layers, not divisible by the {middle} other "
            f"pipeline ranks (pp={pp}); raise first= or last= by {rest % middle}, or use pipeline_layout="
        )
    if vpp > 1 and not middle:
        raise LayoutError(
            f"{said} leave no other pipeline rank at pp={pp}, and with vpp={vpp} megatron-core divides by their number "
            f"(ZeroDivisionError); give only one of first= and last=, or use pipeline_layout="
        )
    per_rank = [rest // middle if middle > 0 else 0] * pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    for rank, count in enumerate(per_rank):
        if count % vpp:
            raise LayoutError(
                f"{said} with num_layers={num_layers} give pipeline rank {rank} {count} layers, not divisible by "
                f"vpp={vpp}; use a vpp that divides {count}, or pipeline_layout="
            )
    return [count // vpp for _ in range(vpp) for count in per_rank]
