"""Padding plans: to how many rows a sample, a packed sequence and an expert group are padded, and why.

Every factor of a plan names the level at which it must hold: `sample` (each sample of a packed sequence), `total` (the
packed sequence), `cp` (the rows of one context parallel rank), `rank` (the rows of one rank after context and sequence
parallelism) or `group` (the rows of every rank of an etp·ep group: equal, and a multiple). Factors are combined by
least common multiple, so all of them hold. Other systems pad for other levels; `compat` has their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from moeref.dispatcher.setup import Choice
from moeref.layout import Layout

Level = Literal["sample", "total", "cp", "rank", "group"]

#: The multiple of rows that a quantised GEMM needs, by recipe. For fp8, 16 and 32 are from megatron-core's
#: `get_fp8_align_size`, and 128 is the block of blockwise scaling (NVIDIA-NeMo/RL 7ea279ab
#: nemo_rl/models/megatron/data.py). For fp4, 32 is what the hardware needs according to `get_fp4_align_size`, which
#: returns 128 for speed.
RECIPES = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 32}
#: Rows in a block of fused attention (modelscope/ms-swift 3602360 swift/megatron/utils/utils.py).
FUSED_ATTENTION = 64


class PaddingError(ValueError):
    """An impossible length or plan; the message names the numbers."""


@dataclass(frozen=True)
class Factor:
    """The rows at `level` are a multiple of `multiple`; `why` is the reason."""

    multiple: int
    level: Level
    why: str


def round_up(length: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class Packed:
    """Padded lengths of a packed sequence: of each sample, in total, and the rows on one rank.

    `samples` sum to at most `total`; the difference is padding after the last sample.
    """

    samples: tuple[int, ...]
    total: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """To what a packed sequence is padded. Made by `plan`.

    `cp` and `tp` are the sizes over which rows are split (tp 1 without sequence parallelism). If `fixed` is set, every
    packed sequence is padded to this length, rounded up to keep the factors.
    """

    factors: tuple[Factor, ...]
    cp: int = 1
    tp: int = 1
    fixed: int | None = None

    def at(self, level: Level) -> int:
        """The least common multiple of the factors at `level`."""
        return math.lcm(1, *(factor.multiple for factor in self.factors if factor.level == level))

    @property
    def sample(self) -> int:
        """The multiple of each sample's length."""
        return self.at("sample")

    @property
    def rows_per_unit(self) -> dict[Level, int]:
        """Rows of the packed sequence for each row at a level."""
        return {"sample": 1, "total": 1, "cp": self.cp, "rank": self.cp * self.tp, "group": self.cp * self.tp}

    @property
    def multiple(self) -> int:
        """The multiple of the packed sequence's length that keeps every factor and divides over the ranks."""
        units = self.rows_per_unit
        return math.lcm(self.cp * self.tp, *(factor.multiple * units[factor.level] for factor in self.factors))

    @property
    def grouped(self) -> bool:
        """Whether the ranks of an etp·ep group need equal rows."""
        return any(factor.level == "group" for factor in self.factors)

    def padded(self, length: int) -> int:
        """The padded length of a packed sequence of `length` rows: the least that keeps every factor.

        With `fixed` it is `fixed` rounded up. Raises PaddingError for a negative length and for one that exceeds this.
        """
        _require(length)
        if self.fixed is None:
            return round_up(length, self.multiple)
        target = round_up(self.fixed, self.multiple)
        if length > target:
            raise PaddingError(f"length {length} exceeds the fixed length {self.fixed} (padded: {target})")
        return target

    def pack(self, lengths: Sequence[int]) -> Packed:
        """Pad each sample, then the packed sequence. Raises PaddingError as `padded` does."""
        for length in lengths:
            _require(length)
        samples = tuple(round_up(length, self.sample) for length in lengths)
        total = self.padded(sum(samples))
        return Packed(samples, total, total // (self.cp * self.tp))

    def group(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Padded lengths of the packed sequences on the ranks of one etp·ep group, one entry per rank.

        If the plan needs equal rows, all entries are the padded longest one, so every rank needs the lengths of all
        ranks. Otherwise each is padded on its own. Raises PaddingError for no lengths, and as `padded` does.
        """
        if not lengths:
            raise PaddingError("a group has at least one rank")
        padded = tuple(self.padded(length) for length in lengths)
        return (max(padded),) * len(padded) if self.grouped else padded


def _require(length: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise PaddingError(f"length {length!r} must be an integer of at least 0")


@dataclass(frozen=True)
class Asked:
    """The arguments of `plan` that may contradict one another."""

    layout: Layout
    dispatcher: Choice
    sequence_parallel: bool
    equal_rows: bool | None

    @property
    def exchanges_equal_pieces(self) -> bool:
        """Whether the dispatcher can exchange equal pieces only."""
        backend = self.dispatcher.row
        return self.dispatcher == Choice.ALLGATHER or (backend is not None and backend.equal_rows)


@dataclass(frozen=True)
class PaddingRule:
    """A combination that is refused, in the form of the tables of dispatchers and settings."""

    id: str
    text: str
    fix: str
    source: str
    refuses: Callable[[Asked], bool]


RULES: tuple[PaddingRule, ...] = (
    PaddingRule(
        "sp-needs-tp",
        "sequence parallelism needs tp > 1",
        "turn it off or raise tp", "ModelParallelConfig.__post_init__",
        lambda ask: ask.sequence_parallel and ask.layout.tp == 1,
    ),
    PaddingRule(
        "equal-pieces-need-equal-rows",
        "the dispatcher exchanges equal pieces only",
        "drop equal_rows=False, or use alltoall", "gather_from_sequence_parallel_region, hybrid_ep_dispatch",
        lambda ask: ask.exchanges_equal_pieces and ask.equal_rows is False,
    ),
)  # fmt: skip


def _check(asked: Asked) -> None:
    """Raise PaddingError with every contradiction."""
    if found := [f"{rule.text}; {rule.fix} [{rule.id}]" for rule in RULES if rule.refuses(asked)]:
        raise PaddingError(f"{asked.dispatcher} under {asked.layout.text}: " + "\n  ".join(found))


def _check_values(recipe: str | None, quantised_at: str, fixed: int | None) -> None:
    if recipe is not None and recipe not in RECIPES:
        raise PaddingError(f"recipe {recipe!r} is none of {', '.join(RECIPES)}")
    if quantised_at not in ("total", "cp", "rank"):
        raise PaddingError(f"quantised_at={quantised_at!r} is none of total, cp, rank")
    if fixed is not None and fixed < 1:
        raise PaddingError(f"fixed={fixed} must be at least 1")


def plan(
    layout: Layout,
    *,
    sequence_parallel: bool | None = None,
    recipe: str | None = None,
    quantised_at: Literal["total", "cp", "rank"] = "rank",
    zigzag: bool = True,
    fused_attention: bool = False,
    dispatcher: Choice | str = Choice.ALLTOALL,
    equal_rows: bool | None = None,
    fixed: int | None = None,
) -> Plan:
    """The padding plan of a run.

    sequence_parallel: by default tp > 1.
    recipe: one of RECIPES; None without quantisation.
    quantised_at: the level of its rows. `rank` is safe: sequence parallel shards are quantised before the gather.
    zigzag: context parallelism splits every sample into 2·cp chunks if True, into cp contiguous chunks if False.
    equal_rows: by default what the dispatcher needs: allgather and some flex backends exchange equal pieces only.
    fixed: pad every packed sequence to this length instead of the least one.

    Raises PaddingError for an unknown recipe, dispatcher or level, for sequence parallelism without tp, for unequal
    rows with a dispatcher that needs equal ones, and for a `fixed` below 1.
    """
    if sequence_parallel is None:
        sequence_parallel = layout.tp > 1
    _check_values(recipe, quantised_at, fixed)
    try:
        dispatcher = Choice(dispatcher)
    except ValueError:
        raise PaddingError(f"dispatcher {dispatcher!r} is none of {', '.join(Choice)}") from None
    _check(Asked(layout, dispatcher, sequence_parallel, equal_rows))
    backend = dispatcher.row
    factors = []
    if layout.cp > 1:
        chunks = 2 * layout.cp if zigzag else layout.cp
        factors.append(Factor(chunks, "sample", f"context parallelism cuts each sample into {chunks} chunks"))
    if sequence_parallel:
        factors.append(Factor(layout.tp, "cp", f"sequence parallelism splits rows over {layout.tp} ranks"))
    if recipe is not None:
        factors.append(Factor(RECIPES[recipe], quantised_at, f"{recipe} GEMMs take {RECIPES[recipe]} rows at a time"))
    if fused_attention:
        factors.append(Factor(FUSED_ATTENTION, "cp", "fused attention takes 64 rows at a time, on every tp rank"))
    if backend and backend.equal_rows:
        factors.append(Factor(backend.rows_multiple, "group", backend.rows_why))
    elif equal_rows or (equal_rows is None and dispatcher == Choice.ALLGATHER):
        factors.append(Factor(1, "group", "allgather exchanges equal pieces" if equal_rows is None else "asked for"))
    return Plan(tuple(factors), layout.cp, layout.tp if sequence_parallel else 1, fixed)


def pad_experts(row: int, topk: int, experts: int) -> tuple[int, ...]:
    """The experts of padding row number `row`: topk distinct ones that follow those of the previous row.

    For any number of consecutive padding rows, the rows per expert differ by at most one. Padding rows have weight zero
    and must not enter expert counts or bias updates (megatron-core's `padding_mask`, True for padding). Indices of zero
    would overload one expert, and repeated indices break the T·topk rows of dropless dispatch.

    Raises PaddingError for a topk that is not in 1 … experts, and for a negative row.
    """
    if not 1 <= topk <= experts:
        raise PaddingError(f"topk={topk} distinct experts out of {experts}")
    if row < 0:
        raise PaddingError(f"row {row} must be at least 0")
    return tuple((row * topk + i) % experts for i in range(topk))
