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
    one sample and for packed samples; `microbatch.batched` makes others. `holes_TL` is True where a GIVEN row has no
    route in one layer; None if there is no such hole. `depth` is the number of decoder layers, where a `Spec` said it.
    """

    idx_TLK: Index
    layers: tuple[int, ...]
    experts: int
    kind_T: Kind
    versions_T: npt.NDArray[np.int32]
    start: int = 0
    batch: int = 1
    holes_TL: npt.NDArray[np.bool_] | None = None
    depth: int | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.idx_TLK.shape[0])

    @property
    def top_k(self) -> int:
        """K."""
        return int(self.idx_TLK.shape[2])

    @property
    def missing_TL(self) -> npt.NDArray[np.bool_]:
        """Where the router's own choice is taken: in MISSING rows, and in holes of single layers."""
        missing_TL = np.broadcast_to((self.kind_T == MISSING)[:, None], self.idx_TLK.shape[:2])
        return missing_TL if self.holes_TL is None else missing_TL | self.holes_TL

    def equals(self, other: Routes) -> bool:
        """Whether both have the same experts in the same order, layers, kinds, holes, versions, start and batch."""
        return (
            (self.layers, self.experts, self.start, self.batch)
            == (other.layers, other.experts, other.start, other.batch)
            and self.idx_TLK.shape == other.idx_TLK.shape
            and bool((self.idx_TLK == other.idx_TLK).all())
            and bool((self.kind_T == other.kind_T).all())
            and bool((self.missing_TL == other.missing_TL).all())
            and bool((self.versions_T == other.versions_T).all())
        )

    def take(self, rows: Any, *, start: int | None = None) -> Routes:
        """The rows that a slice or an index array selects."""
        return replace(
            self,
            idx_TLK=self.idx_TLK[rows],
            kind_T=self.kind_T[rows],
            versions_T=self.versions_T[rows],
            holes_TL=None if self.holes_TL is None else self.holes_TL[rows],
            start=self.start if start is None else start,
        )


def routes(
    idx_TLK: Any, *, layers: Sequence[int], experts: int, version: int = 0, start: int = 0, zeros: bool = False
) -> Routes:
    """Check the routes of an engine or a router, and cast them to `index_dtype`.

    A row of -1 in every layer is MISSING; -1 in some layers is a hole in these. With `zeros`, a route of zeros is taken
    for -1: an engine leaves them where it captured nothing, and with a top-k over 1 they are no choice of a router.

    Raises RouteError, with the first bad place, for

    - a version that is no integer of 32 bits;
    - a shape that is not [T, L, K], or layers that are not L ascending numbers;
    - a type that is not an integer, or too narrow for `experts`: values may have wrapped when they were cast to it;
    - an expert outside 0 … experts-1, or -1 beside experts in one route;
    - an expert twice in one route: dropless dispatchers count T·K routes.
    """
    if isinstance(version, bool) or not isinstance(version, int | np.integer):
        raise RouteError(f"version={version!r} of the weights is no integer")
    if not -(2**31) <= version < 2**31:
        raise RouteError(f"version={version} of the weights is not a 32-bit number")
    given = np.asarray(idx_TLK)
    _check_form(given, layers, experts, start)
    tokens, depth, top_k = given.shape
    missing_TL = _missing(given, layers, experts, start, zeros=zeros and top_k > 1)
    if given.size and int(given.max()) >= experts:
        _refuse_range(given >= experts, given, layers, experts, start)
    dtype = index_dtype(experts)
    narrow = given.astype(dtype, copy=given.dtype != dtype)
    kind_T, holes_TL = np.zeros(tokens, np.uint8), None
    if missing_TL is not None:
        narrow = np.where(missing_TL[..., None], spread_experts(tokens, depth, top_k, experts), narrow)
        kind_T = np.where(missing_TL.all(axis=1), MISSING, GIVEN)
        holes_TL = missing_TL & (kind_T == GIVEN)[:, None]
    check_distinct(narrow, layers, start)
    versions_T = np.full(tokens, version, np.int32)
    holes_TL = holes_TL if holes_TL is not None and holes_TL.any() else None
    return Routes(narrow, tuple(layers), experts, kind_T, versions_T, start, holes_TL=holes_TL)


def _check_form(given: npt.NDArray[Any], layers: Sequence[int], experts: int, start: int) -> None:
    if given.ndim != 3 or given.dtype.kind not in "iu":
        raise RouteError(f"routes are integers [tokens, layers, top-k], not {given.dtype} {list(given.shape)}")
    _, depth, top_k = given.shape
    if len(layers) != depth or list(layers) != sorted(set(layers)) or (layers and layers[0] < 0):
        raise RouteError(f"layers={list(layers)} must be {depth} ascending layer numbers, one for each of axis 1")
    if not top_k:
        raise RouteError(f"routes of top-k 0: {list(given.shape)} has no experts on its last axis")
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


def _missing(
    given: npt.NDArray[Any], layers: Sequence[int], experts: int, start: int, *, zeros: bool
) -> npt.NDArray[np.bool_] | None:
    """Where a route is -1, or zero if `zeros`; None if nowhere. RouteError for other negative numbers."""
    missing_TL = (given == 0).all(axis=2) if zeros else np.zeros(given.shape[:2], np.bool_)
    if given.dtype.kind == "i" and given.size and given.min() < 0:
        absent_TLK = given == -1
        missing_TL |= absent_TLK.all(axis=2)
        absent_TLK[missing_TL] = False
        if absent_TLK.any():
            at = _first(absent_TLK)
            raise RouteError(f"token {start + at[0]}, layer {layers[at[1]]}: -1 beside experts in one route")
        if (given < -1).any():
            _refuse_range(given < -1, given, layers, experts, start)
    return missing_TL if missing_TL.any() and given.shape[1] else None


def spread_experts(rows: int, layers: int, top_k: int, experts: int, first: int = 0) -> Index:
    """[rows, layers, top_k] experts for rows without a route of their own.

    They are distinct in a row, as dropless dispatchers count T·K routes, and spread evenly over all experts, so that
    padding does not overload one of them. `first` is the number of rows spread before these.
    """
    number = np.arange(first, first + rows)[:, None] * top_k + np.arange(top_k)
    spread = np.broadcast_to((number % experts)[:, None, :], (rows, layers, top_k))
    return np.ascontiguousarray(spread.astype(index_dtype(experts)))


def missing_rows(rows: int, like: Routes, kind: np.uint8 = MISSING) -> Routes:
    """`rows` rows of `kind` for the layers of `like`."""
    return replace(
        like,
        idx_TLK=spread_experts(rows, len(like.layers), like.top_k, like.experts),
        kind_T=np.full(rows, kind, np.uint8),
        versions_T=np.full(rows, -1, np.int32),
        start=0,
        holes_TL=None,
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
        holes_TL=joined_holes(parts, 0),
    )


def joined_holes(parts: Sequence[Routes], axis: int) -> npt.NDArray[np.bool_] | None:
    """The holes of all parts along one axis; None if no part has any."""
    if all(part.holes_TL is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(p.idx_TLK.shape[:2], np.bool_) if p.holes_TL is None else p.holes_TL for p in parts], axis=axis
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
