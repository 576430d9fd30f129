"""`Routes`: which experts each token went to in each layer, plus the metadata to interpret it.

Shape suffixes: T tokens (rows), L layers, K experts of a token (router top-k). Routes are numpy arrays of the narrowest
unsigned type that holds every expert: torch has few kernels for uint16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moeref.dtypes import index_bytes

Index = npt.NDArray[np.unsignedinteger[Any]]
Kind = npt.NDArray[np.uint8]

#: Kinds of rows. A MISSING row takes the router's own top-k; a PAD row belongs to no token of the data.
GIVEN, MISSING, PAD = np.uint8(0), np.uint8(1), np.uint8(2)


class RouteError(ValueError):
    """Routes are malformed, or do not fit the tokens, layers or model they are used with."""


def index_dtype(experts: int) -> np.dtype[Any]:
    """uint8 up to 256 experts, uint16 up to 65536. Raises RouteError for other numbers."""
    if not 1 <= experts <= 65536:
        raise RouteError(f"experts={experts} must be from 1 to 65536")
    return np.dtype(np.uint8 if index_bytes(experts) == 1 else np.uint16)


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of T tokens in L layers, in the router's own order.

    `layers` are the global numbers, from 0, of the layers on the second axis; multi-token prediction layers follow the
    decoder's. MISSING and PAD rows hold the experts of `spread_experts`, which any dispatcher accepts. `start` is the
    position of the first row in its sequence. `versions_T` is the version of the weights that routed each row.

    `batch` is the order of the rows: row s·batch + b is token s of column b of a router's input [S, B, H]. It is 1 for
    one sample and for packed samples; `microbatch.batched` makes others.
    """

    idx_TLK: Index
    layers: tuple[int, ...]
    experts: int
    kind_T: Kind
    versions_T: npt.NDArray[np.int32]
    start: int = 0
    batch: int = 1

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.idx_TLK.shape[0])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.idx_TLK.shape[2])

    def equals(self, other: Routes) -> bool:
        """The same experts in the same order, layers, kinds, versions, start and batch."""
        return (
            (self.layers, self.experts, self.start, self.batch)
            == (other.layers, other.experts, other.start, other.batch)
            and self.idx_TLK.shape == other.idx_TLK.shape
            and bool((self.idx_TLK == other.idx_TLK).all())
            and bool((self.kind_T == other.kind_T).all())
            and bool((self.versions_T == other.versions_T).all())
        )

    def take(self, rows: Any, *, start: int | None = None) -> Routes:
        """The rows that a slice or an index array selects."""
        return replace(
            self,
            idx_TLK=self.idx_TLK[rows],
            kind_T=self.kind_T[rows],
            versions_T=self.versions_T[rows],
            start=self.start if start is None else start,
        )


def routes(
    idx_TLK: Any, *, layers: Sequence[int], experts: int, version: int = 0, start: int = 0, distinct: bool = True
) -> Routes:
    """Check the routes of an engine or a router, and cast them to `index_dtype`.

    A row of -1 in every layer is MISSING. Raises RouteError, with the first bad place, for

    - a shape that is not [T, L, K], or layers that are not L ascending numbers;
    - a type that is not an integer, or too narrow for `experts`: values may have wrapped when they were cast to it;
    - an expert outside 0 … experts-1, or a row that is -1 in some layers only;
    - an expert twice in one row, if `distinct`: dropless dispatchers count T·K routes.
    """
    given = np.asarray(idx_TLK)
    _check_form(given, layers, experts, start)
    tokens, depth, top_k = given.shape
    kind_T = np.zeros(tokens, np.uint8)
    if given.dtype.kind == "i" and given.size and given.min() < 0:
        kind_T = _missing_kinds(given, layers, experts, start)
    if given.size and int(given.max()) >= experts:
        _refuse_range(given >= experts, given, layers, experts, start)
    dtype = index_dtype(experts)
    narrow = given.astype(dtype, copy=given.dtype != dtype)
    absent = np.flatnonzero(kind_T == MISSING)
    if absent.size:
        narrow[absent] = spread_experts(absent.size, depth, top_k, experts)
    if distinct:
        check_distinct(narrow, layers, start)
    return Routes(narrow, tuple(layers), experts, kind_T, np.full(tokens, version, np.int32), start)


def _check_form(given: npt.NDArray[Any], layers: Sequence[int], experts: int, start: int) -> None:
    if given.ndim != 3 or given.dtype.kind not in "iu":
        raise RouteError(f"routes are integers [tokens, layers, top-k], not {given.dtype} {list(given.shape)}")
    _, depth, top_k = given.shape
    if len(layers) != depth or list(layers) != sorted(set(layers)) or (layers and layers[0] < 0):
        raise RouteError(f"layers={list(layers)} must be {depth} ascending layer numbers, one for each of axis 1")
    if top_k > experts:
        raise RouteError(f"top-k {top_k} of {experts} experts cannot be distinct")
    if start < 0:
        raise RouteError(f"start={start} must be at least 0")
    dtype = index_dtype(experts)
    if np.iinfo(given.dtype).max < experts - 1:
        raise RouteError(
            f"routes of {given.dtype}, which does not hold {experts} experts; those over {np.iinfo(given.dtype).max} "
            f"wrapped when they were cast to it: send {dtype.name}, or a wider type"
        )


def _missing_kinds(given: npt.NDArray[Any], layers: Sequence[int], experts: int, start: int) -> Kind:
    """The kind of each row; RouteError for a row that is -1 in some layers only, and for other negative numbers."""
    absent_TLK = given == -1
    kind_T = np.where(absent_TLK.all(axis=(1, 2)), MISSING, GIVEN)
    absent_TLK[kind_T == MISSING] = False
    if absent_TLK.any():
        at = _first(absent_TLK)
        raise RouteError(f"token {start + at[0]}, layer {layers[at[1]]}: -1 in a row that is given elsewhere")
    if (given < -1).any():
        _refuse_range(given < -1, given, layers, experts, start)
    return kind_T


def spread_experts(rows: int, layers: int, top_k: int, experts: int, first: int = 0) -> Index:
    """[rows, layers, top_k] experts for rows without a route of their own.

    They are distinct in a row, as dropless dispatchers count T·K routes, and spread evenly over all experts, so that
    padding does not overload one of them. `first` is the number of rows spread before these.
    """
    number = np.arange(first, first + rows)[:, None] * top_k + np.arange(top_k)
    found = np.broadcast_to((number % experts)[:, None, :], (rows, layers, top_k))
    return np.ascontiguousarray(found.astype(index_dtype(experts)))


def missing_rows(rows: int, like: Routes, kind: np.uint8 = MISSING) -> Routes:
    """`rows` rows of `kind` for the layers of `like`."""
    return replace(
        like,
        idx_TLK=spread_experts(rows, len(like.layers), like.top_k, like.experts),
        kind_T=np.full(rows, kind, np.uint8),
        versions_T=np.full(rows, -1, np.int32),
        start=0,
    )


def concat(parts: Sequence[Routes]) -> Routes:
    """The rows of all parts in order. Raises RouteError if layers, experts, top-k or batch differ."""
    if not parts:
        raise RouteError("no routes to join")
    first = parts[0]
    for number, part in enumerate(parts[1:], 1):
        if (part.layers, part.experts, part.top_k) != (first.layers, first.experts, first.top_k):
            raise RouteError(
                f"part {number} has layers {list(part.layers)}, {part.experts} experts, top-{part.top_k}; the first "
                f"has {list(first.layers)}, {first.experts}, top-{first.top_k}"
            )
        if part.batch != first.batch:
            raise RouteError(f"part {number} has rows of {part.batch} samples in turn, the first of {first.batch}")
    return replace(
        first,
        idx_TLK=np.concatenate([p.idx_TLK for p in parts]),
        kind_T=np.concatenate([p.kind_T for p in parts]),
        versions_T=np.concatenate([p.versions_T for p in parts]),
    )


def check_distinct(idx_TLK: Index, layers: Sequence[int], start: int = 0) -> None:
    """Raise RouteError, with the place, if a row names an expert twice."""
    _, depth, top_k = idx_TLK.shape
    # One contiguous array per place in a row: three times as fast to compare as strided columns.
    planes = np.ascontiguousarray(idx_TLK.reshape(-1, top_k).T)
    for a in range(top_k):
        for b in range(a + 1, top_k):
            same = planes[a] == planes[b]
            if same.any():
                token, layer = divmod(int(same.argmax()), depth)
                raise RouteError(
                    f"token {start + token}, layer {layers[layer]}: expert {idx_TLK[token, layer, a]} twice in "
                    f"{idx_TLK[token, layer].tolist()}; the dispatcher would count one route too few"
                )


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape))


def _refuse_range(
    wrong: npt.NDArray[np.bool_], given: npt.NDArray[Any], layers: Sequence[int], experts: int, start: int
) -> None:
    at = _first(wrong)
    raise RouteError(
        f"token {start + at[0]}, layer {layers[at[1]]}: expert {given[at]} is outside 0 to {experts - 1}; was it cast "
        f"to a type that wraps, or counted over another model's experts?"
    )
