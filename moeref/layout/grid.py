"""Arithmetic between ranks and coordinates: a grid with named axes, its groups, and the coordinates of a rank.

megatron-core arranges the same ranks in two grids. The dense grid has the axes tp, cp, dp, pp; the expert grid has etp,
ep, edp, pp. Both follow one order string, leftmost axis fastest, and have the same pipeline groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moeref.layout.errors import LayoutError

#: From an axis in the order string to its name in each grid; None where the grid lacks the axis.
DENSE_AXES = {"tp": "tp", "cp": "cp", "ep": None, "dp": "dp", "pp": "pp"}
EXPERT_AXES = {"tp": "etp", "cp": None, "ep": "ep", "dp": "edp", "pp": "pp"}


@dataclass(frozen=True)
class Coords:
    """The coordinates of a rank in both grids. (tp, cp, dp, pp) determine the rank; so do (etp, ep, edp, pp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int

    @property
    def text(self) -> str:
        """`tp0 pp1 ep1 etp0 dp0`, then `cp1` and `edp1` where they are not 0."""
        parts = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "pp", "ep", "etp", "dp")]
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "edp") if getattr(self, axis)]
        return " ".join(parts)


@dataclass(frozen=True)
class Grid:
    """Ranks 0 … size-1 on named axes, fastest axis first."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, fastest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        product = 1
        for _, length in self.axes:
            product *= length
        return product

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        stride = 1
        for name, length in self.axes:
            if name == axis:
                return stride
            stride *= length
        raise LayoutError(f"no axis {axis!r} in this grid (axes: {', '.join(self.names)})")

    def position(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank`. Raises LayoutError outside 0 … size-1."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is outside the world of {self.size} ranks (0 to {self.size - 1})")
        position = {}
        for name, length in self.axes:
            rank, position[name] = divmod(rank, length)
        return position

    def rank(self, position: Mapping[str, int]) -> int:
        """The rank at `position`, which names every axis. Raises LayoutError outside an axis."""
        rank = 0
        for name, length in self.axes:
            if not 0 <= position[name] < length:
                raise LayoutError(f"{name}={position[name]} is outside this layout's {name} size {length}")
            rank += position[name] * self.stride(name)
        return rank

    def _spread(self, axes: Collection[str]) -> list[int]:
        """Rank offsets of all positions along `axes`, the fastest axis varying first."""
        offsets = [0]
        for name, length in self.axes:
            if name in axes:
                stride = self.stride(name)
                offsets = [offset + step * stride for step in range(length) for offset in offsets]
        return offsets

    def groups(self, axes: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`, groups and members in megatron-core's order (`RankGenerator.get_ranks`)."""
        inside = self._spread(axes)
        outside = self._spread(set(self.names) - set(axes))
        return tuple(tuple(base + offset for offset in inside) for base in outside)

    def group_of(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """The group of `groups(axes)` that contains `rank`."""
        position = self.position(rank)
        base = rank - sum(position[name] * self.stride(name) for name in axes)
        return tuple(base + offset for offset in self._spread(axes))


def build_grid(order: str, names: Mapping[str, str | None], sizes: Mapping[str, int]) -> Grid:
    """The grid with the axes of `names` in the order of `order` ("tp-cp-ep-dp-pp") and with these `sizes`.

    An axis of size 1 may be left out of `order`. Raises LayoutError for any other axis that is left out, for
    an unknown axis and for an axis named twice.
    """
    tokens = order.split("-")
    known = list(names)
    for token in tokens:
        if token not in names:
            raise LayoutError(f"order {order!r}: unknown axis {token!r} (axes: {', '.join(known)})")
        if tokens.count(token) > 1:
            raise LayoutError(f"order {order!r} names the axis {token!r} {tokens.count(token)} times; name it once")
    for token, name in names.items():
        if token not in tokens and name is not None and sizes[name] > 1:
            raise LayoutError(f"order {order!r} leaves out {token!r}, but {name}={sizes[name]}; add {token!r} to it")
    axes = [(name, sizes[name]) for token in tokens if (name := names[token]) is not None]
    axes += [(name, 1) for token, name in names.items() if name is not None and token not in tokens]
    return Grid(tuple(axes))
