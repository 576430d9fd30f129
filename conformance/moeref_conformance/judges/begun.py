"""SED-007: what the weights hold before they are loaded, from digests: replicas agree, and shards differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.findings import Finding
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, missing_records, placement, values
from moeref_conformance.oracles.cuts import cut
from moeref_conformance.oracles.placement import Unknown, plain_local

#: The Hugging Face tensor, the expert if the tensor holds several, and which of the ranks that cut it has this part.
Shard = tuple[str, int | None, int]
Row = dict[str, Any]


@judges("SED-007")
def weights_begin_as_ranks_share_them(case: Case) -> Iterator[Finding]:
    """Digests of one shard on all its ranks, and of all matrices of the model."""
    yield from missing_records(case, "begun")
    replicas: dict[Shard, tuple[int, str]] = {}
    matrices: dict[tuple[str, int | None], tuple[int, Row, Shard]] = {}
    for rank, rows in values(case, "begun"):
        for row in rows:
            if (shard := _shard(case, rank, row)) is None:
                continue
            first, digest = replicas.setdefault(shard, (rank, row["digest"]))
            if not row["finite"]:
                yield _said(case, rank, row, "holds NaN or infinity")
            elif digest != row["digest"]:
                yield _said(case, rank, row, f"begins otherwise than on rank {first}, which holds the same shard")
            elif len(row["shape"]) == 2:
                yield from _alike(case, rank, row, shard, matrices)


def _alike(
    case: Case, rank: int, row: Row, shard: Shard, matrices: dict[tuple[str, int | None], tuple[int, Row, Shard]]
) -> Iterator[Finding]:
    """A finding for a matrix that is not random, or that begins as another one does.

    Not for vectors and convolutions, some of which Megatron draws alike on all TP ranks. Nor for experts that Megatron
    draws from one seed: on a CPU those of all expert-parallel ranks, on a GPU those where pp + ep is the same.
    """
    if row["constant"]:
        yield _said(case, rank, row, "begins with one value in all places")
        return
    at, on_gpu = placement(case).coords(rank), case.cell.backend in GPU_BACKENDS
    group = None if shard[1] is None or on_gpu else at["ep"]
    first, other, its_shard = matrices.setdefault((row["digest"], group), (rank, row, shard))
    if its_shard != shard and not (on_gpu and shard[1] is not None and _one_seed(at, placement(case).coords(first))):
        yield _said(case, rank, row, f"begins as {other['local']} of rank {first} does")


def _one_seed(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether Megatron's formula (SED-005) gives the experts of two stages one seed."""
    return one["pp"] != other["pp"] and one["pp"] + one["ep"] == other["pp"] + other["ep"]


def _shard(case: Case, rank: int, row: Row) -> Shard | None:
    """Which shard a row is of; None for a tensor that the oracle does not know, which LOD-001 finds."""
    oracle, local = placement(case), plain_local(row["local"])
    try:
        held = oracle.shard(rank, row["chunk"], row["local"], row["shape"])
    except Unknown:
        return None
    expert = oracle.numbers(rank, row["chunk"], row["local"])[1]
    part = 0 if cut(local) is None else oracle.coords(rank)["tp" if expert is None else "etp"]
    # A tied head is a replica of the embedding.
    return (held.hf or ("model.embed_tokens.weight",))[0], expert, part


def _said(case: Case, rank: int, row: Row, what: str) -> Finding:
    message = f"before loading {row['local']} of chunk {row['chunk']} {what}"
    return finding(case, rank, "begun", message, local_name=row["local"])
