"""EXP: the exported stream against the checkpoint, the plan, the other ranks and the one-rank run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation, RankRecord
from moeref_conformance.contract.requests.export import CHANGE
from moeref_conformance.diagnosis.compare import compare, dtype_name
from moeref_conformance.diagnosis.diagnose import diagnose
from moeref_conformance.diagnosis.matching import Context
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import context, expected, finding, names_text, observed, outcome, without
from moeref_conformance.oracles.placement import hf_numbers


def _writer(run: Observation, step: str = "export") -> RankRecord | None:
    """The lowest rank that was given a tensor in this step."""
    writers = (r for r in run.ranks if r.has(step) and any(row["materialised"] for row in r.value(step)))
    return next(writers, None)


def _no_writer(case: Case, step: str = "export") -> list[Finding]:
    return without(case, step) or [finding(case, None, step, "no rank was given a tensor")]


def _got(record: RankRecord, step: str = "export") -> dict[str, torch.Tensor]:
    return {name: t for name, t in record.tensors(step).items() if "#" not in name}


def _unlike(
    case: Case, rank: int, step: str, name: str, pair: tuple[torch.Tensor, torch.Tensor], *how: Any
) -> Finding | None:
    """A finding with a diagnosis if the pair (expected, got) differs. `how`: the context, then any stale tensor."""
    difference = compare(*pair)
    if difference is None:
        return None
    return finding(
        case,
        rank,
        step,
        f"{name}: {difference.text}",
        hf_name=name,
        index=difference.index,
        expected=difference.expected,
        got=difference.got,
        diagnosis=diagnose(name, *pair, *how),
    )


def _complete(case: Case, record: RankRecord, step: str, want: Mapping[str, Any]) -> list[Finding]:
    """Missing, surplus and repeated names of the writer's stream."""
    sent = Counter(row["name"] for row in record.value(step) if row["materialised"])
    findings = []
    for name in want:
        if not sent[name]:
            findings.append(finding(case, record.rank, step, f"{name} was never sent", hf_name=name))
    for name, times in sent.items():
        if name not in want:
            findings.append(finding(case, record.rank, step, f"{name} is not in the checkpoint", hf_name=name))
        elif times > 1:
            findings.append(finding(case, record.rank, step, f"{name} was sent {times} times", hf_name=name))
    return findings


@judges("EXP-001")
def every_tensor_once(case: Case) -> Outcome:
    """The writer's names against the checkpoint's."""
    record = _writer(observed(case))
    if record is None:
        return outcome(_no_writer(case))
    return outcome(_complete(case, record, "export", expected(case).tensors))


@judges("EXP-002")
def bytes_are_the_checkpoints(case: Case) -> Outcome:
    """Bytes of every tensor that is there; names, shapes and dtypes have rules of their own."""
    record = _writer(observed(case))
    if record is None:
        return outcome(_no_writer(case))
    want, got, whole = expected(case).tensors, _got(record), context(case)
    findings = []
    for name in want.keys() & got.keys():
        if want[name].shape == got[name].shape and want[name].dtype == got[name].dtype:
            findings.append(_unlike(case, record.rank, "export", name, (want[name], got[name]), whole))
    return outcome(_sorted(findings))


def _sorted(findings: list[Finding | None]) -> list[Finding]:
    return sorted((f for f in findings if f is not None), key=lambda f: (f.layer or 0, f.expert or 0, f.hf_name))


@judges("EXP-003")
def shapes_and_dtypes(case: Case) -> Outcome:
    """Of the tensors at the writer, and of the metadata that came with them."""
    record = _writer(observed(case))
    if record is None:
        return outcome(_no_writer(case))
    want, got, whole = expected(case).tensors, _got(record), context(case)
    findings: list[Finding | None] = []
    for row in record.value("export"):
        name = row["name"]
        if name not in want:
            continue
        if name in got:
            difference = compare(want[name], got[name])
            if difference is not None and difference.kind != "bytes":
                findings.append(_unlike(case, record.rank, "export", name, (want[name], got[name]), whole))
        for what, right in (("shape", list(want[name].shape)), ("dtype", dtype_name(want[name].dtype))):
            if row[what] != right:
                message = f"{name}: the metadata says {what} {row[what]}, expected {right}"
                more = {"expected": str(right), "got": str(row[what])}
                findings.append(finding(case, record.rank, "export", message, hf_name=name, **more))
    return outcome([f for f in findings if f is not None])


def _metas(record: RankRecord, step: str) -> list[tuple[str, tuple[int, ...], str]]:
    return [(row["name"], tuple(row["shape"]), row["dtype"]) for row in record.value(step)]


def _first_unlike(case: Case, rank: int, step: str, mine: list[Any], other: list[Any], whose: str) -> list[Finding]:
    """One finding on the first entry in which two lists of metadata differ."""
    for i, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            message = f"entry {i} of {step} is {_told(a)}, {whose} has {_told(b)}"
            return [finding(case, rank, step, message, hf_name=a[0], expected=_told(b), got=_told(a))]
    if len(mine) != len(other):
        have, want = Counter(m[0] for m in mine), Counter(m[0] for m in other)
        missing = (have - want) + (want - have)
        message = f"{len(mine)} entries in {step}, {whose} has {len(other)}: {names_text(missing)}"
        return [finding(case, rank, step, message)]
    return []


def _told(meta: tuple[str, tuple[int, ...], str]) -> str:
    return f"{meta[0]} {meta[2]}{list(meta[1])}"


@judges("EXP-004")
def one_order_everywhere(case: Case) -> Outcome:
    """Plan and both streams of every rank, against the first rank's export; a target without a plan records None."""
    findings = without(case, "plan", "export", "export_changed")
    ranks = [r for r in observed(case).ranks if r.has("export")]
    for record in ranks:
        first = _metas(ranks[0], "export")
        for step in ("plan", "export", "export_changed"):
            if record.has(step) and record.value(step) is not None:
                whose = f"the export of rank {ranks[0].rank}"
                findings += _first_unlike(case, record.rank, step, _metas(record, step), first, whose)
    plan = all(r.value("plan") is not None for r in ranks if r.has("plan"))
    return outcome(findings, met="exact" if plan else "exact, without a plan: the target claims none")


@judges("EXP-005")
def one_writer_one_tensor(case: Case) -> Outcome:
    """Full tensors on one rank only, one at a time."""
    findings = without(case, "export")
    holders = {
        r.rank: sum(row["materialised"] for row in r.value("export")) for r in observed(case).ranks if r.has("export")
    }
    writers = [rank for rank, count in holders.items() if count]
    if not writers and not findings:
        findings.append(finding(case, None, "export", "no rank was given a tensor"))
    for rank in writers[1:]:
        message = f"{holders[rank]} full tensors are materialised here too; the writer is rank {writers[0]}"
        findings.append(finding(case, rank, "export", message))
    for record in observed(case).ranks:
        for row in record.value("export") if record.has("export") else []:
            if row["alive"]:
                message = f"{row['alive']} earlier tensors are still alive when {row['name']} comes"
                findings.append(finding(case, record.rank, "export", message, hf_name=row["name"]))
    return outcome(findings)


@judges("EXP-006")
def changed_weights_are_sent(case: Case) -> Outcome:
    """After every weight was multiplied by a constant, the whole stream again."""
    record = _writer(observed(case), "export_changed")
    if record is None:
        return outcome(_no_writer(case, "export_changed"))
    whole = expected(case).tensors
    findings = _complete(case, record, "export_changed", whole)
    got, changed = _got(record, "export_changed"), context(case, CHANGE)
    unlike: list[Finding | None] = []
    for name in whole.keys() & got.keys():
        pair = (changed.tensors[name], got[name])
        unlike.append(_unlike(case, record.rank, "export_changed", name, pair, changed, whole[name]))
    return outcome(findings + _sorted(unlike))


@judges("EXP-007")
def export_is_the_one_rank_export(case: Case) -> Outcome:
    """Names, order, shapes, dtypes and bytes against the baseline."""
    if case.baseline is None:
        return Outcome(untested="there is no one-rank run of this variant to compare with")
    one, record = _writer(case.baseline), _writer(observed(case))
    if one is None:
        return Outcome(untested="the one-rank run exported nothing")
    if case.baseline is case.observation:
        return Outcome(met="the one-rank run itself")
    if record is None:
        return outcome(_no_writer(case))
    findings = _first_unlike(
        case, record.rank, "export", _metas(record, "export"), _metas(one, "export"), "the one-rank export"
    )
    want, got = _got(one), _got(record)
    whole = Context(want, int(expected(case).config.get("first_k_dense_replace") or 0))
    unlike = [
        _unlike(case, record.rank, "export", name, (want[name], got[name]), whole) for name in want.keys() & got.keys()
    ]
    return outcome(findings + _sorted(unlike))


@judges("EXP-008")
def tensors_are_the_receivers(case: Case) -> Outcome:
    """Which tensors changed while the receiver zeroed every tensor that it was given."""
    findings = without(case, "own")
    for record in observed(case).ranks:
        if not record.has("own"):
            continue
        value = record.value("own")
        for key in value["changed"]:
            chunk, _, local = key.partition(":")
            message = f"writing to the exported tensors changed {local} of chunk {chunk}"
            findings.append(
                finding(case, record.rank, "own", message, local_name=local, diagnosis="aliases a live parameter")
            )
        for name in value.get("later", []):
            layer, expert = hf_numbers(name)
            message = f"writing to earlier tensors changed {name}, which came later"
            more = {"hf_name": name, "layer": layer, "expert": expert, "diagnosis": "shares memory with an earlier one"}
            findings.append(finding(case, record.rank, "own", message, **more))
    return outcome(findings)
