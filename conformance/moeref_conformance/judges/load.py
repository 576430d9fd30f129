"""LOD: the shards of every rank after loading, and checkpoints that must be refused."""

from __future__ import annotations

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.diagnosis.diagnose import diagnose
from moeref_conformance.diagnosis.matching import Context
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import context, expected, finding, observed, outcome, placement, without
from moeref_conformance.judges.names import refusal
from moeref_conformance.oracles.placement import ExpectedShard, Placement, Unknown


@judges("LOD-001")
def shards_are_right(case: Case) -> Outcome:
    """Every parameter and persistent buffer of every rank, and no tensor of the checkpoint without a home."""
    findings = without(case, "inventory", "shards")
    oracle, whole = placement(case), context(case)
    for record in observed(case).ranks:
        if record.has("inventory") and record.has("shards"):
            findings += _rank(case, oracle, record, whole)
    return outcome(findings)


def _rank(case: Case, oracle: Placement, record: RankRecord, whole: Context) -> list[Finding]:
    findings: list[Finding] = []
    shards, homes, trouble = record.tensors("shards"), set(), []
    for item in record.value("inventory"):
        chunk, local = item["chunk"], item["local"]
        try:
            held = oracle.shard(record.rank, chunk, local, item["shape"])
        except Unknown as error:
            findings.append(finding(case, record.rank, "shards", str(error), local_name=local))
            continue
        homes |= set(held.hf)
        got = shards.get(f"{chunk}:{local}")
        if got is None:
            findings.append(finding(case, record.rank, "shards", f"no record of {local}", local_name=local))
        elif compare(held.tensor, got, held.rows):
            trouble.append((chunk, local, held, got))
    for name in sorted(oracle.hf_names(record.rank) - homes):
        message = f"no tensor of this rank holds {name}"
        findings.append(finding(case, record.rank, "shards", message, hf_name=name))
    if trouble:
        near = _local_context(oracle, record, whole)
        findings += [_differs(case, record.rank, near, *one) for one in trouble]
    return findings


def _local_context(oracle: Placement, record: RankRecord, whole: Context) -> Context:
    """The expected shards of this rank: a diagnosis first looks for a wrong shard among its neighbours."""
    right, parts = {}, {}
    for item in record.value("inventory"):
        try:
            held = oracle.shard(record.rank, item["chunk"], item["local"], item["shape"])
        except Unknown:
            continue  # already a finding
        name = _global(item["local"], held)
        right[name], parts[name] = held.tensor, held.hf
    return Context(right, whole.dense_prefix, behind=whole, parts=parts)


def _global(local: str, held: ExpectedShard) -> str:
    """A local name with global layer and expert numbers, for diagnoses."""
    parts = local.split(".")
    if held.layer is not None and "layers" in parts:
        parts[parts.index("layers") + 1] = str(held.layer)
    name = ".".join(parts)
    if held.expert is not None and "local_experts" in parts:
        parts[parts.index("local_experts") + 1] = str(held.expert)
        name = ".".join(parts)
    return name.replace("local_experts.", "experts.") if held.expert is not None else name


def _differs(
    case: Case, rank: int, near: Context, chunk: int, local: str, held: ExpectedShard, got: torch.Tensor
) -> Finding:
    difference = compare(held.tensor, got, held.rows)
    if difference is None:
        raise ValueError(f"rank {rank}: {local} does not differ")
    name = _global(local, held)
    want, have = held.tensor, got
    if held.rows is not None and want.shape == have.shape:
        want, have = want[: held.rows], have[: held.rows]
    return finding(
        case,
        rank,
        "shards",
        f"chunk {chunk}: {local}: {difference.text}",
        local_name=local,
        global_name=name,
        hf_name=held.hf[0] if held.hf else "",
        layer=held.layer,
        expert=held.expert,
        index=difference.index,
        expected=difference.expected,
        got=difference.got,
        diagnosis=diagnose(name, want, have, near),
    )


@judges("LOD-002")
def surplus_tensor_is_refused(case: Case) -> Outcome:
    """Every rank raised, and the message names the tensor."""
    extra = expected(case).extra
    return refusal(case, "refuse_extra", extra, f"the checkpoint has {extra}, which the model lacks")


@judges("LOD-003")
def missing_tensor_is_refused(case: Case) -> Outcome:
    """Every rank raised, and the message names the tensor."""
    missing = expected(case).missing
    return refusal(case, "refuse_missing", missing, f"the checkpoint lacks {missing}")
