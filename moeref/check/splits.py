"""The search for pipeline splits that work, for a model whose layers a layout does not divide evenly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeref.layout import Layout, LayoutError

#: The cost, in layers, of the embedding, and of the output layer with its loss.
ENDS = 1
#: How far from the even share the number of layers on the first and last rank is tried.
_NEAR = 60


@dataclass(frozen=True)
class Split:
    """A layout that works, and the number of layers of each pipeline rank."""

    layout: Layout
    per_rank: tuple[int, ...]

    @property
    def text(self) -> str:
        """What to add to the layout: `first=3,last=2`."""
        found = [f"{k}={v}" for k in ("first", "last") if (v := getattr(self.layout, k)) is not None]
        found += [f"{k}=1" for k in ("embedding", "loss") if getattr(self.layout, k)]
        if self.layout.pipeline_layout is not None:
            found.append(f"pipeline_layout={self.layout.pipeline_layout}")
        return ",".join(found) or "no first=, last=, embedding=, loss= or pipeline_layout="

    @property
    def cost(self) -> tuple[int, int]:
        """(layers of the longest pipeline rank, difference to the shortest); embedding and head count as ENDS each."""
        loads = list(self.per_rank)
        loads[0] += ENDS
        loads[-1] += ENDS
        return max(loads), max(loads) - min(loads)

    @property
    def order(self) -> tuple[bool, int, int, int, str]:
        """What needs no key comes first, then the best balanced, of these the one with fewest keys."""
        plain = self.text.startswith("no ")
        return not plain, *self.cost, self.text.count("="), self.text


def splits(layout: Layout, num_layers: int, *, mtp: int = 0, most: int = 3) -> tuple[Split, ...]:
    """The `most` best-balanced splits of `num_layers` over the stages of `layout`, in their `order`.

    The split in `layout` is ignored, and no pipeline rank is left without layers. megatron-core's three ways to divide
    unevenly are tried: the number of layers on the first and last pipeline rank, counting the embedding and the loss as
    layers, and, if neither works, a layout string.
    """
    found = []
    for candidate in _candidates(layout, num_layers):
        try:
            stages = candidate.stages(num_layers, mtp=mtp or None)
        except LayoutError:  # this split does not divide the layers either; the next may
            continue
        per_rank = [0] * layout.pp
        for (pp, _), layers in stages.layers.items():
            per_rank[pp] += len(layers)
        if all(per_rank):
            found.append(Split(candidate, tuple(per_rank)))
    if not found and (string := _string(layout, num_layers, mtp)):
        found.append(string)
    return tuple(sorted(found, key=lambda split: split.order)[:most])


def _candidates(layout: Layout, num_layers: int) -> Iterator[Layout]:
    bare = replace(layout, first=None, last=None, embedding=False, loss=False, pipeline_layout=None, vpp=layout.vpp)
    for embedding in (False, True):
        for loss in (False, True):
            yield replace(bare, embedding=embedding, loss=loss)
    if layout.pp == 1:
        return
    # A first or last rank with more than twice the even share is not worth trying.
    share = -(-num_layers // layout.pp)
    ends = [None, *range(max(1, share - _NEAR), min(num_layers, 2 * share, share + _NEAR) + 1)]
    for first in ends:
        for last in ends:
            if first is not None or last is not None:
                yield replace(bare, first=first, last=last)


def _string(layout: Layout, num_layers: int, mtp: int) -> Split | None:
    """The most even layout string, with longer stages in the middle; None if there are fewer layers than stages."""
    stages = layout.pp * layout.vpp
    if num_layers < stages:
        return None
    few, more = divmod(num_layers, stages)
    counts = [few] * stages
    begin = (stages - more) // 2
    for i in range(begin, begin + more):
        counts[i] += 1
    parts = ["t" * n for n in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * mtp + "L"
    bare = replace(layout, first=None, last=None, embedding=False, loss=False, vpp=1, pipeline_layout="|".join(parts))
    per_rank = tuple(sum(counts[pp :: layout.pp]) for pp in range(layout.pp))
    return Split(bare, per_rank)
