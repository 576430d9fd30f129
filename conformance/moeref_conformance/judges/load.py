"""LOD: the shards of every rank after loading, and checkpoints that must be refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.diagnosis.compare import compare, same
from moeref_conformance.diagnosis.diagnose import diagnose
from moeref_conformance.diagnosis.matching import Candidates
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    candidates,
    changed,
    expected,
    finding,
    less_one,
    missing_records,
    placement,
    records,
    values,
)
from moeref_conformance.judges.refusals import refused_by_name, refused_somewhere
from moeref_conformance.oracles.cuts import VOCABULARY
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown, plain_local


@judges("LOD-001", exact=True)
def shards_are_right(case: Case) -> Iterator[Finding]:
    """Every parameter and persistent buffer of every rank, and no tensor of the checkpoint without a home."""
    yield from missing_records(case, "inventory", "shards")
    oracle, whole = placement(case), candidates(case)
    for record in records(case, "inventory", "shards"):
        yield from _rank(case, oracle, record, whole)
    for rank, value in values(case, "own"):
        for key in value["stale"]:
            chunk, _, local = key.partition(":")
            diagnosis = "left as it was by a second load"
            message = f"chunk {chunk}: {local}: loaded again, and not what it was after the first load"
            yield finding(case, rank, "own", message, local_name=local, diagnosis=diagnosis)


def _rank(case: Case, oracle: Placement, record: RankRecord, whole: Candidates) -> Iterator[Finding]:
    shards, rank, known = record.tensors("shards"), record.rank, list[tuple[str, str, ExpectedShard]]()
    for item in record.value("inventory"):
        chunk, local = item["chunk"], item["local"]
        try:
            known.append((chunk, local, oracle.shard(rank, chunk, local, item["shape"])))
        except Unknown as error:
            yield finding(case, rank, "shards", str(error), local_name=local)
            continue
        if f"{chunk}:{local}" not in shards:
            yield finding(case, rank, "shards", f"no record of {local}", local_name=local)
    for name in sorted(oracle.hf_names(rank).difference(*(held.hf for _, _, held in known))):
        yield finding(case, rank, "shards", f"no tensor of this rank holds {name}", hf_name=name)
    near = None
    for chunk, local, held in known:
        got = shards.get(f"{chunk}:{local}", held.tensor)
        if (difference := compare(held.tensor, got, held.rows)) is None or less_one(case, local, held, got):
            continue
        # A diagnosis first looks for a wrong shard among the expected shards of this rank.
        near = near or Candidates(
            {_global(name, shard): shard.tensor for _, name, shard in known},
            whole.dense_prefix,
            behind=whole,
            parts={_global(name, shard): shard.hf for _, name, shard in known},
        )
        rows = held.rows if held.tensor.shape == got.shape else None
        name = _global(local, held)
        diagnosis = diagnose(name, held.tensor[:rows], got[:rows], near)
        names = {"local_name": local, "global_name": name, "hf_name": held.hf[0] if held.hf else ""}
        more = {**names, **difference.told, "layer": held.layer, "expert": held.expert, "diagnosis": diagnosis}
        yield finding(case, rank, "shards", f"chunk {chunk}: {local}: {difference.text}", **more)


def _global(local: str, held: ExpectedShard) -> str:
    """A local name with global layer and expert numbers, for diagnoses."""
    name = local if held.layer is None else re.sub(r"\blayers\.\d+", f"layers.{held.layer}", local, count=1)
    return name if held.expert is None else re.sub(r"\blocal_experts\.\d+", f"experts.{held.expert}", name)


@judges("LOD-002")
def surplus_tensor_is_named(case: Case) -> Iterator[Finding]:
    """Every rank raised an error that names the tensor, or none raised and one warned of it."""
    extra, step = expected(case).extra, "refuse_extra"
    loaded = [value for _, value in values(case, step)]
    none_refused = len(loaded) == case.cell.layout.world
    if not none_refused or not any(extra in text for value in loaded for text in (value or {}).get("warned", ())):
        yield from refused_by_name(case, step, extra, f"the checkpoint has {extra}, which the model lacks")


@judges("LOD-003")
def missing_tensor_is_refused(case: Case) -> Iterator[Finding]:
    """A rank raised, and all ended the step."""
    return refused_somewhere(case, "refuse_missing", f"the checkpoint lacks {expected(case).missing}")


@judges("LOD-004")
def missing_tensor_is_named(case: Case) -> Iterator[Finding]:
    """Every rank raised, and the message names the tensor."""
    missing = expected(case).missing
    return refused_by_name(case, "refuse_missing", missing, f"the checkpoint lacks {missing}")


@judges("LOD-006")
def unlike_tensor_is_refused(case: Case) -> Iterator[Finding]:
    """A rank raised, and all ended the step."""
    return refused_somewhere(case, "refuse_unlike", f"the checkpoint has {expected(case).unlike} in another shape")


@judges("LOD-007")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What loads have changed beside weights, by kind: the first one, and those that are refused."""
    yield from missing_records(case, "around_loads")
    for rank, value in values(case, "around_loads"):
        for name, rows in value.items():
            yield from changed(case, rank, "around_loads", f"load of {name}", rows)


@judges("LOD-005")
def padded_rows_are_numbers(case: Case) -> Iterator[Finding]:
    """Rows past the end of the vocabulary, against those of the first rank that holds the same shard."""
    yield from missing_records(case, "inventory", "shards")
    first: dict[tuple[str, int], tuple[int, torch.Tensor]] = {}
    for record in records(case, "inventory", "shards"):
        for local, padding in _padding(case, record):
            if not bool(padding.isfinite().all()):
                message = f"{int((~padding.isfinite()).sum())} values of the rows that pad {local} are NaN or infinite"
                yield finding(case, record.rank, "shards", message, local_name=local)
                continue
            key = plain_local(local), placement(case).coords(record.rank)["tp"]
            rank, other = first.setdefault(key, (record.rank, padding))
            if not same(padding, other):
                message = f"the rows that pad {local} are not those of rank {rank}, which holds the same shard"
                yield finding(case, record.rank, "shards", message, local_name=local)


def _padding(case: Case, record: RankRecord) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and padded rows of every shard of the vocabulary that a rank holds."""
    for item in record.value("inventory"):
        chunk, local = item["chunk"], item["local"]
        if plain_local(local) not in VOCABULARY:
            continue
        got = record.tensor("shards", f"{chunk}:{local}")
        with contextlib.suppress(Unknown):  # LOD-001 finds a module that is elsewhere in Megatron
            held = placement(case).shard(record.rank, chunk, local, item["shape"])
            if got is not None:
                yield local, got[held.rows :]
