"""`Layout`: the parallel sizes of a run, the checks that refuse impossible ones, and what follows from them.

The checks are those of megatron-core 0.19.2 (`initialize_model_parallel`, `TransformerConfig`,
`PipelineParallelLayerLayout`) that concern ranks, stages and experts. What the schedule requires is not checked here,
such as `overlap_p2p_comm` for interleaving at pp=2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from moeref.layout import stages as split
from moeref.layout import text as text_form
from moeref.layout.errors import LayoutError
from moeref.layout.grid import DENSE_AXES, EXPERT_AXES, Coords, Grid, build_grid
from moeref.layout.pattern import read_pattern

_ALIASES = {"mp": "tp-pp"}


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LayoutError(f"{name}={value!r} must be an integer of at least {least}")


class _ExpertTensorSize:
    """The field `etp`: None is stored as `tp`, which is set before it, so reading always gives an int."""

    @overload
    def __get__(self, layout: None, owner: type) -> None: ...
    @overload
    def __get__(self, layout: object, owner: type) -> int: ...
    def __get__(self, layout: object | None, owner: type) -> int | None:
        size: int | None = None if layout is None else layout.__dict__["etp"]
        return size

    def __set__(self, layout: object, value: int | None) -> None:
        layout.__dict__["etp"] = layout.__dict__["tp"] if value is None else value


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout. Raises LayoutError if it is impossible.

    `vpp` is the number of virtual stages per pipeline rank (1: none). `etp` defaults to `tp`. `first` and `last` are
    megatron-core's `num_layers_in_{first,last}_pipeline_stage`; `embedding` and `loss` are
    `account_for_{embedding,loss}_in_pipeline_split`; `pipeline_layout` is `pipeline_model_parallel_layout`, which
    implies `vpp`. `order` names the axes, fastest first.

    `world` 0 means the smallest number of ranks that both grids divide: the least common multiple of tp·cp·pp and
    etp·ep·pp. After construction `etp`, `world` and `vpp` have their final values, which `dataclasses.replace` keeps.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: _ExpertTensorSize = _ExpertTensorSize()
    cp: int = 1
    world: int = 0
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    pipeline_layout: str | None = None
    order: str = text_form.DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp", "cp"):
            _require_int(name, getattr(self, name), 1)
        _require_int("world", self.world, 0)
        for name in ("first", "last"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        for name in ("embedding", "loss"):
            if not isinstance(getattr(self, name), bool):
                raise LayoutError(f"{name}={getattr(self, name)!r} must be True or False")
        if not self.world:
            object.__setattr__(self, "world", math.lcm(self._dense_size, self._expert_size))
        self._check_world()
        self._check_pipeline()
        self._check_pipeline_groups()

    # Checks

    def _check_world(self) -> None:
        wrong = [
            f"world={self.world} is not divisible by {formula} = {size} ({grid} grid)"
            for grid, formula, size in (
                ("dense", f"tp·cp·pp = {self.tp}·{self.cp}·{self.pp}", self._dense_size),
                ("expert", f"etp·ep·pp = {self.etp}·{self.ep}·{self.pp}", self._expert_size),
            )
            if self.world % size
        ]
        if wrong:
            both = math.lcm(self._dense_size, self._expert_size)
            raise LayoutError("; ".join(wrong) + f". Use a multiple of {both}")

    def _check_pipeline(self) -> None:
        ends = [f"{n}={v}" for n, v in (("first", self.first), ("last", self.last)) if v is not None]
        counted = [f"{n}=1" for n, v in (("embedding", self.embedding), ("loss", self.loss)) if v]
        if ends and counted:
            raise LayoutError(
                f"{', '.join(ends)} cannot go with {', '.join(counted)}; keep one of the two ways, or pipeline_layout="
            )
        if self.pipeline_layout is not None:
            if ends or counted:
                both = ", ".join(ends + counted)
                raise LayoutError(f"pipeline_layout={self.pipeline_layout} cannot go with {both}; drop them")
            _, implied = read_pattern(self.pipeline_layout, self.pp)
            if self.vpp not in (1, implied):
                raise LayoutError(
                    f"vpp={self.vpp}, but pipeline_layout={self.pipeline_layout} at pp={self.pp} means vpp={implied}; "
                    "drop vpp="
                )
            object.__setattr__(self, "vpp", implied)
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} virtual stages need pp > 1, but pp=1; drop them or raise pp")

    def _check_pipeline_groups(self) -> None:
        dense, expert = self._dense_grid, self._expert_grid
        if self.pp == 1 or (
            dense.stride("pp") == expert.stride("pp") and (self.order.endswith("pp") or self.dp == self.edp)
        ):
            return
        raise LayoutError(
            f"order {self.order!r} does not end with pp, so the pipeline groups of the dense grid (dp={self.dp}, "
            f"stride {dense.stride('pp')}) and of the expert grid (edp={self.edp}, stride {expert.stride('pp')}) must "
            f"agree; put pp last, or choose sizes that make dp and edp equal"
        )

    # Text

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `tp=2,pp=2,ep=2,etp=1,world=8,first=3,embedding=1,pipeline_layout=Et|tt|tt|ttL`; keys in any order.

        `pipeline_layout=` comes last and takes the rest, commas included. Raises LayoutError for an unknown key
        (naming the nearest one), for a key given twice and for a value that is not a number.
        """
        return cls(**text_form.read(text))

    @property
    def text(self) -> str:
        """Sizes and world, then other fields unlike their defaults. `Layout.parse(layout.text) == layout`."""
        return text_form.write(self)

    # Ranks

    @property
    def _dense_size(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def _expert_size(self) -> int:
        return self.etp * self.ep * self.pp

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense grid."""
        return self.world // self._dense_size

    @property
    def edp(self) -> int:
        """Data-parallel size of the expert grid."""
        return self.world // self._expert_size

    @cached_property
    def _dense_grid(self) -> Grid:
        return build_grid(self.order, DENSE_AXES, {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp})

    @cached_property
    def _expert_grid(self) -> Grid:
        return build_grid(self.order, EXPERT_AXES, {"etp": self.etp, "ep": self.ep, "edp": self.edp, "pp": self.pp})

    def coords(self, rank: int) -> Coords:
        """The coordinates of `rank` in both grids. Raises LayoutError for a rank outside the world."""
        return Coords(**{**self._expert_grid.position(rank), **self._dense_grid.position(rank)})

    def rank_of(self, *, tp: int, pp: int, cp: int = 0, dp: int = 0) -> int:
        """The rank at these coordinates of the dense grid. Raises LayoutError for one outside its axis."""
        return self._dense_grid.rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def expert_rank_of(self, *, etp: int, ep: int, pp: int, edp: int = 0) -> int:
        """The rank at these coordinates of the expert grid. Raises LayoutError for one outside its axis."""
        return self._expert_grid.rank({"etp": etp, "ep": ep, "edp": edp, "pp": pp})

    def groups(self, kind: str) -> tuple[tuple[int, ...], ...]:
        """All process groups of `kind`, in the order of megatron-core's `RankGenerator.get_ranks`.

        A kind is an axis, or several axes of one grid joined by `-` in any order. Dense grid: tp, cp, dp, pp, dp-cp,
        tp-cp, …, and mp for tp-pp. Expert grid: etp, ep, edp, etp-ep, etp-ep-pp, …

        Raises LayoutError for axes of no grid or of both, and for an axis named twice.
        """
        grid, axes = self._axes(kind)
        return grid.groups(axes)

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The members of `rank`'s group of `kind`, in group order. Raises LayoutError as `groups` and `coords` do."""
        grid, axes = self._axes(kind)
        return grid.group_of(axes, rank)

    def _axes(self, kind: str) -> tuple[Grid, tuple[str, ...]]:
        axes = tuple(_ALIASES.get(kind, kind).split("-"))
        for grid in (self._dense_grid, self._expert_grid):
            if set(axes) <= set(grid.names):
                if len(set(axes)) < len(axes):
                    raise LayoutError(f"group kind {kind!r} names an axis twice")
                return grid, axes
        raise LayoutError(
            f"group kind {kind!r} is no set of axes of one grid; the dense has {', '.join(self._dense_grid.names)}, "
            f"the expert {', '.join(self._expert_grid.names)}; write etp and edp for the expert grid's tp and dp"
        )

    # Stages

    def stages(self, num_layers: int, *, mtp: int | None = None) -> split.Stages:
        """The decoder layers of every stage of a model with `num_layers` of them.

        `mtp` is the number of multi-token prediction layers (`mtp_num_layers`); None takes the number in the layout
        string. Without a layout string they are on the last stage. Raises LayoutError where megatron-core refuses the
        split, and where it accepts a split that does not hold every layer exactly once.
        """
        _require_int("num_layers", num_layers, 1)
        if mtp is not None:
            _require_int("mtp", mtp, 0)
        if self.pipeline_layout is not None:
            return self._stages_of_pattern(self.pipeline_layout, num_layers, mtp)
        if self.first is not None or self.last is not None:
            counts = split.counts_uneven(num_layers, pp=self.pp, vpp=self.vpp, first=self.first, last=self.last)
        else:
            counts = split.counts_even(num_layers, pp=self.pp, vpp=self.vpp, embedding=self.embedding, loss=self.loss)
        made = split.deal(counts, num_layers, self.pp, self.text)
        return replace(made, mtp=(self.pp - 1, self.vpp - 1), mtp_layers=mtp) if mtp else made

    def _stages_of_pattern(self, pattern: str, num_layers: int, mtp: int | None) -> split.Stages:
        written, _ = read_pattern(pattern, self.pp)
        for letter, name, wanted in (("t", "num_layers", num_layers), ("m", "mtp", mtp)):
            found = "".join(written).count(letter)
            if wanted is not None and found != wanted:
                raise LayoutError(
                    f"pipeline_layout={pattern} has {found} {letter}, but {name}={wanted}; make them equal"
                )
        made = split.deal([stage.count("t") for stage in written], num_layers, self.pp, self.text)
        holders = [index for index, stage in enumerate(written) if "m" in stage]
        if not holders:
            return made
        stage = holders[0] % self.pp, holders[0] // self.pp
        return replace(made, mtp=stage, mtp_layers=written[holders[0]].count("m"))

    def has_embedding(self, pp: int, vp: int = 0) -> bool:
        """Whether (pp, vp) builds the word embedding: always the first, even if a layout string has E elsewhere."""
        self._check_stage(pp, vp)
        return (pp, vp) == (0, 0)

    def has_head(self, pp: int, vp: int = 0) -> bool:
        """Whether (pp, vp) builds the output layer: always the last, even if a layout string has L elsewhere."""
        self._check_stage(pp, vp)
        return (pp, vp) == (self.pp - 1, self.vpp - 1)

    def _check_stage(self, pp: int, vp: int) -> None:
        if not (0 <= pp < self.pp and 0 <= vp < self.vpp):
            raise LayoutError(f"no stage (pp {pp}, vp {vp}) in a layout with pp={self.pp}, vpp={self.vpp}")

    # Experts

    def experts(self, ep_rank: int, num_experts: int) -> range:
        """The global experts of `ep_rank`, the same on every pipeline rank. LayoutError unless ep divides them."""
        _require_int("num_experts", num_experts, 1)
        if num_experts % self.ep:
            raise LayoutError(f"num_experts={num_experts} is not divisible by ep={self.ep}; use an ep that divides it")
        if not 0 <= ep_rank < self.ep:
            raise LayoutError(f"ep rank {ep_rank} is outside ep={self.ep} (0 to {self.ep - 1})")
        local = num_experts // self.ep
        return range(ep_rank * local, (ep_rank + 1) * local)
