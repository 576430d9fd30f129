"""NAM-007: the shards of one replica hold every element of the checkpoint once, by counting elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import NameRow
from moeref_conformance.contract.findings import Finding
from moeref_conformance.diagnosis.compare import dtype_name
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import NamesTable, expected, finding, missing_records, tables
from moeref_conformance.oracles.cuts import VOCABULARY, cut, shard, whole
from moeref_conformance.oracles.placement import hf_numbers, plain_local


@judges("NAM-007")
def shards_cover_the_checkpoint(case: Case) -> Iterator[Finding]:
    """Shapes and dtypes of every rank, then elements over a replica's ranks. Names that no rank lists are NAM-001's."""
    yield from missing_records(case, "names")
    shapes = {name: tuple(tensor.shape) for name, tensor in expected(case).tensors.items()}
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in expected(case).tensors.items()}
    held: Counter[str] = Counter()
    for given in tables(case):
        dense, expert = _replicas(case, given)
        at = topology.coords(case.cell.layout, given.rank)
        for row in given.rows:
            parts = _parts(shapes, row)
            if not parts:
                continue
            yield from _shape(case, given.rank, row, parts)
            yield from _dtype(case, given.rank, row, {name: dtypes[name] for name in parts})
            held.update(dict.fromkeys(parts, 0))  # of what another replica alone lists, the first holds none
            if first := expert if _is_expert(row) else dense:
                for name, share in _held(at, row, parts).items():
                    held[name] += share * first
    for name, number in held.items():
        if number != (size := prod(shapes[name])):
            message = f"{name}: the ranks of one replica hold {number:,} of its {size:,} elements"
            yield finding(case, None, "names", message, hf_name=name, expected=size, got=number)


def _is_expert(row: NameRow) -> bool:
    return ".experts." in row.local


def _replicas(case: Case, given: NamesTable) -> tuple[int, int]:
    """How many of the ranks are in the first replica of the dense grid, and of the expert grid."""
    at = [topology.coords(case.cell.layout, rank) for rank in given.ranks]
    return sum(a["dp"] == a["cp"] == 0 for a in at), sum(a["edp"] == 0 for a in at)


def _parts(full: Mapping[str, tuple[int, ...]], row: NameRow) -> dict[str, tuple[int, ...]]:
    """The Hugging Face tensors of a row by name, with the shape of the part that belongs to one expert.

    Copies in multi-token prediction layers are left out, and names that the checkpoint lacks, which NAM-001 reports.
    """
    names = row.hf[:1] if plain_local(row.local) in VOCABULARY else row.hf
    shapes = {name: full[name] for name in names if name in full}
    # A tensor of all experts has them first.
    return {name: shape[1:] if _of_all_experts(row, name) else shape for name, shape in shapes.items()}


def _of_all_experts(row: NameRow, name: str) -> bool:
    return _is_expert(row) and hf_numbers(name)[1] is None


def _shape(case: Case, rank: int, row: NameRow, parts: dict[str, tuple[int, ...]]) -> Iterator[Finding]:
    """The shard's shape, where Megatron lays a tensor out as Hugging Face does; else its number of elements."""
    local, layout = plain_local(row.local), case.cell.layout
    size = layout.expert_tp if _is_expert(row) else layout.tp
    full, dim = whole(list(parts.values())), cut(local)
    if local in VOCABULARY:
        if full is None:
            raise ValueError(f"{local}: the vocabulary has no one shape among {sorted(parts)}")
        good = row.shape[1:] == full[1:] and row.shape[0] * size >= full[0]
        want = f"at least [{-(-full[0] // size)}, {', '.join(str(n) for n in full[1:])}]"
    elif full is None or any(_of_all_experts(row, name) for name in parts):
        number = sum(prod(p) for p in parts.values()) // (1 if dim is None else size)
        good, want = prod(row.shape) == number, f"{number} elements"
    else:
        right = shard(full, dim, size)
        good, want = row.shape == right, str(list(right))
    if not good:
        message = f"{row.local} is {list(row.shape)} here, a shard of {' and '.join(parts)} is {want}"
        names = {"local_name": row.local, "global_name": row.global_name, "hf_name": next(iter(parts))}
        yield finding(case, rank, "names", message, **names, expected=want, got=list(row.shape))


def _dtype(case: Case, rank: int, row: NameRow, parts: Mapping[str, str]) -> Iterator[Finding]:
    """The shard's dtype is that of its Hugging Face tensors, by name in `parts`."""
    name, want = next(iter(parts.items()))
    if row.dtype not in parts.values():
        names = {"local_name": row.local, "global_name": row.global_name, "hf_name": name}
        message = f"{row.local} is {row.dtype} here, {name} is {want}"
        yield finding(case, rank, "names", message, **names, expected=want, got=row.dtype)


def _held(at: Mapping[str, int], row: NameRow, parts: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """How many elements of each Hugging Face tensor one rank contributes: none of what an earlier TP rank holds too."""
    local = plain_local(row.local)
    index = at["etp"] if _is_expert(row) else at["tp"]
    if cut(local) is None and index:
        return {}
    if local in VOCABULARY:
        # Megatron builds the embedding once more where the multi-token prediction layers are.
        if "embedding" in local and (at["pp"], row.chunk) != (0, 0):
            return {}
        (name, full), rows = next(iter(parts.items())), row.shape[0]
        return {name: max(0, min(full[0] - index * rows, rows)) * prod(full[1:])}
    total = sum(prod(p) for p in parts.values())
    return {name: prod(row.shape) * prod(part) // total for name, part in parts.items()}
