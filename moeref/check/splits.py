"""Owns the search for stage splits that work, for a model whose layers a layout cannot divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeref.layout import Layout, LayoutError

#: Layers that the embedding, or the output layer with its loss, count for when stages are compared.
ENDS = 1


@dataclass(frozen=True)
class Split:
    """A layout that works, and the layers of its pipeline ranks."""

    layout: Layout
    per_rank: tuple[int, ...]

    @property
    def text(self) -> str:
        """What to add to the layout: `first=3,last=2`."""
        found = [f"{k}={v}" for k in ("first", "last") if (v := getattr(self.layout, k)) is not None]
        found += [f"{k}=1" for k in ("embedding", "loss") if getattr(self.layout, k)]
        if self.layout.pipeline_layout is not None:
            found.append(f"layout={self.layout.pipeline_layout}")
        return ",".join(found) or "no first=, last=, embedding=, loss= or pipeline_layout="

    @property
    def cost(self) -> tuple[int, int]:
        """The longest pipeline rank, the ends counting as ENDS layers each, then how far the shortest is from it."""
        loads = list(self.per_rank)
        loads[0] += ENDS
        loads[-1] += ENDS
        return max(loads), max(loads) - min(loads)


def splits(layout: Layout, num_layers: int, *, mtp: int = 0, most: int = 3) -> tuple[Split, ...]:
    """The best-balanced splits of `num_layers` over the stages of `layout`, its own split left aside; best first.

    Tried are megatron-core's three ways to divide unevenly: layers of the first and last pipeline rank, the embedding
    and the loss counted as layers, and, where neither works, a layout string.
    """
    found = []
    for candidate in _candidates(layout, num_layers):
        try:
            stages = candidate.stages(num_layers, mtp=mtp or None)
        except LayoutError:
            continue
        per_rank = [0] * layout.pp
        for (pp, _), layers in stages.layers.items():
            per_rank[pp] += len(layers)
        found.append(Split(candidate, tuple(per_rank)))
    if not found and (string := _string(layout, num_layers, mtp)):
        found.append(string)
    return tuple(sorted(found, key=lambda split: (*split.cost, split.text))[:most])


def _candidates(layout: Layout, num_layers: int) -> Iterator[Layout]:
    bare = replace(layout, first=None, last=None, embedding=False, loss=False, pipeline_layout=None, vpp=layout.vpp)
    for embedding in (False, True):
        for loss in (False, True):
            yield replace(bare, embedding=embedding, loss=loss)
    if layout.pp == 1:
        return
    # A first or last rank with more than twice the even share is no split that anybody wants.
    ends = [None, *range(1, min(num_layers, 2 * -(-num_layers // layout.pp)) + 1)]
    for first in ends:
        for last in ends:
            if first is not None or last is not None:
                yield replace(bare, first=first, last=last)


def _string(layout: Layout, num_layers: int, mtp: int) -> Split | None:
    """The most even layout string, longer stages in the middle."""
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
