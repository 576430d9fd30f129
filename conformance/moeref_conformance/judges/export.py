"""EXP: the exported stream against the checkpoint, the plan, the other ranks and the one-rank run. PLN: the plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moeref_conformance.contract.api import TensorMeta
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord, digest
from moeref_conformance.contract.requests.export import CHANGE
from moeref_conformance.contract.requests.optimizer import BEHIND, LOADED, RELOADED, SENT, Behind
from moeref_conformance.diagnosis.compare import compare
from moeref_conformance.diagnosis.diagnose import diagnose
from moeref_conformance.diagnosis.matching import Candidates
from moeref_conformance.judges import Case, Untested, judges
from moeref_conformance.judges.common import (
    ITSELF,
    NO_BASELINE,
    aliases,
    candidates,
    changed,
    expected,
    finding,
    less_one,
    missing_records,
    names_text,
    once_each,
    outcome,
    parameters,
    records,
    shape_and_dtype,
    unanswered,
    values,
)
from moeref_conformance.oracles.placement import ExpectedShard, Placement

KINDS = ("shape", "dtype", "bytes")
#: What is said of a tensor that is missing, and of one that came several times.
_SENT = ("was never sent", "was sent")
Answer = Outcome | Iterable[Finding]


@dataclass
class _Together(RankRecord):
    """The records of ranks that were each given a share, as that of one rank that was given all of them."""

    records: tuple[RankRecord, ...]

    def value(self, step: str) -> Any:
        if not step.startswith("export"):
            return super().value(step)
        seen, again = set[str](), []
        for record in self.records:
            mine = [row for row in record.value(step) if row["materialised"]]
            again += [row for row in mine if row["name"] in seen]
            seen.update(row["name"] for row in mine)
        return [{**row, "materialised": row["name"] in seen} for row in self._listed(step)] + again

    def _listed(self, step: str) -> list[dict[str, Any]]:
        """The rows of the first rank, and what it does not name of the others: a rank may know its share alone."""
        listed = list[dict[str, Any]]()
        for record in self.records:
            have = {row["name"] for row in listed}
            listed += [row for row in record.value(step) if row["name"] not in have]
        return listed

    def tensors(self, step: str) -> dict[str, torch.Tensor]:
        return {name: tensor for record in self.records for name, tensor in record.tensors(step).items()}


def _writer(case: Case, step: str = "export", *, baseline: bool = False) -> RankRecord | None:
    """The lowest rank that was given a tensor in this step; where ranks receive shares, all of them as one."""
    run = case.baseline if baseline else case.observation
    ranks = [r for r in run.ranks if r.has(step)] if run else []
    given = [r for r in ranks if any(row["materialised"] for row in r.value(step))]
    if given and case.claims.receivers == "share":
        return _Together(given[0].rank, given[0].dir, tuple(given))
    return next(iter(given), None)


def _no_writer(case: Case, step: str = "export") -> list[Finding]:
    return missing_records(case, step) or [finding(case, None, step, "no rank was given a tensor")]


def _of_writer(step: str) -> Callable[[Callable[[Case, RankRecord], Answer]], Callable[[Case], Answer]]:
    """Call a judge with the record of the step's writer as well. Without a writer that is the finding."""

    def called(judge: Callable[[Case, RankRecord], Answer]) -> Callable[[Case], Answer]:
        @functools.wraps(judge)
        def judged(case: Case) -> Answer:
            record = _writer(case, step)
            return _no_writer(case, step) if record is None else judge(case, record)

        return judged

    return called


def _against_one_rank(judge: Callable[[Case, RankRecord, RankRecord], Answer]) -> Callable[[Case], Answer]:
    """Call a judge with the writers' records of the export and of the baseline's, if there is one to compare with."""

    @functools.wraps(judge)
    def judged(case: Case) -> Answer:
        if case.baseline is None:
            return NO_BASELINE
        if case.baseline is case.observation:
            return Outcome(met=ITSELF)
        one = _writer(case, baseline=True)
        if one is None:
            return Outcome(untested="the one-rank run exported nothing")
        return _of_writer("export")(lambda case, record: judge(case, record, one))(case)

    return judged


def _unlike(
    case: Case,
    record: RankRecord,
    whole: Candidates,
    *,
    step: str = "export",
    kinds: tuple[str, ...] = ("bytes",),
    stale: Mapping[str, torch.Tensor] | None = None,
) -> list[Finding]:
    """Tensors that differ from those of `whole` in one of these kinds (as in `compare`), with diagnoses, by layer.

    `stale` is what the tensors held before the last change.
    """
    there = record.tensors(step)
    lost = [row["name"] for row in record.value(step) if row["materialised"] and row["name"] not in there]
    findings = [finding(case, record.rank, step, f"{name}: no record of its values", hf_name=name) for name in lost]
    for name, got in there.items():
        # A tensor that was sent again is recorded as name#2.
        want = whole.tensors.get(name, whole.tensors.get(aliases(case).get(name, "")))
        if want is None:
            continue
        difference = compare(want, got)
        if difference is None or difference.kind not in kinds:
            continue
        diagnosis = diagnose(name, want, got, whole, stale.get(name) if stale else None)
        message, more = f"{name}: {difference.text}", difference.told
        findings.append(finding(case, record.rank, step, message, hf_name=name, diagnosis=diagnosis, **more))
    return sorted(findings, key=lambda f: (f.layer or 0, f.expert or 0, f.hf_name))


@judges("EXP-001")
@_of_writer("export")
def every_tensor_once(case: Case, record: RankRecord) -> Iterable[Finding]:
    """The writer's names against the checkpoint's."""
    return _complete(case, record, "export")


def _complete(case: Case, record: RankRecord, step: str) -> Iterator[Finding]:
    sent = (row["name"] for row in record.value(step) if row["materialised"])
    return once_each(case, record.rank, step, sent, *_SENT)


@judges("EXP-002", exact=True)
@_of_writer("export")
def bytes_are_the_checkpoints(case: Case, record: RankRecord) -> Answer:
    """Bytes of every tensor that is there; names, shapes and dtypes have rules of their own.

    No pass where a tensor has another shape or dtype.
    """
    if findings := _unlike(case, record, candidates(case)):
        return findings
    others = _unlike(case, record, candidates(case), kinds=("shape", "dtype"))
    return Outcome(untested=f"{names_text(one.hf_name for one in others)}: EXP-003") if others else []


@judges("EXP-003")
@_of_writer("export")
def shapes_and_dtypes(case: Case, record: RankRecord) -> list[Finding]:
    """Of the tensors at the writer, and of the metadata that came with them."""
    want = expected(case).tensors
    want = {**want, **{name: want[original] for name, original in aliases(case).items()}}
    findings = _unlike(case, record, candidates(case), kinds=("shape", "dtype"))
    there, wrong = record.tensors("export"), {one.hf_name for one in findings}
    for row in record.value("export"):
        # Metadata of a wrong tensor may say so: then it is one mistake.
        own = dict(shape_and_dtype(there[row["name"]])) if row["name"] in wrong else {}
        for what, right in shape_and_dtype(want[row["name"]]) if row["name"] in want else ():
            if row[what] not in (right, own.get(what)):
                message = f"{row['name']}: the metadata says {what} {row[what]}, expected {right}"
                more = {"hf_name": row["name"], "expected": right, "got": row[what]}
                findings.append(finding(case, record.rank, "export", message, **more))
    return findings


def _metas(record: RankRecord, step: str) -> list[tuple[str, str]]:
    """Name, and all of the metadata as text, of every entry of a stream or plan."""
    return [(row["name"], f"{row['name']} {row['dtype']}{list(row['shape'])}") for row in record.value(step)]


def _first_unlike(case: Case, record: RankRecord, step: str, other: list[tuple[str, str]], whose: str) -> list[Finding]:
    """One finding on the first entry whose metadata are not those of the other list."""
    mine = _metas(record, step)
    for i, ((name, got), (_, want)) in enumerate(zip(mine, other, strict=False)):
        if got != want:
            message = f"entry {i} of {step} is {got}, {whose} has {want}"
            return [finding(case, record.rank, step, message, hf_name=name, expected=want, got=got)]
    if len(mine) != len(other):
        have, right = Counter(name for name, _ in mine), Counter(name for name, _ in other)
        names = names_text((have - right) + (right - have))
        message = f"{len(mine)} entries in {step}, {whose} has {len(other)}: {names}"
        return [finding(case, record.rank, step, message)]
    return []


@judges("EXP-004")
def one_order_everywhere(case: Case) -> Outcome:
    """Plan and both streams of every rank, against the first rank's export; a target without a plan records None."""
    findings, ranks = missing_records(case, "plan", "export", "export_changed"), records(case, "export")
    silent = case.claims.non_writers == "nothing"
    writer = _writer(case) if silent else None
    for record in ranks:
        if isinstance(writer, _Together):
            findings += _of_its_share(case, record, writer)
        else:
            findings += _of_all(case, record, writer or ranks[0], silent)
    plan = all(r.value("plan") is not None for r in ranks if r.has("plan"))
    return outcome(findings, met="" if plan else "without a plan: the target claims none")


def _of_all(case: Case, record: RankRecord, one: RankRecord, silent: bool) -> Iterator[Finding]:
    """What a rank says of all tensors, in each step, against the export of `one`; if `silent`, streams may be empty."""
    first, whose = _metas(one, "export"), f"the export of rank {one.rank}"
    for step in ("plan", "export", "export_changed"):
        rows = record.value(step) if record.has(step) else None
        if rows is not None and not (silent and rows == [] and step != "plan"):
            yield from _first_unlike(case, record, step, first, whose)


def _of_its_share(case: Case, record: RankRecord, together: _Together) -> Iterator[Finding]:
    """What a rank names in an export, of its own share, and its plan, of that or of all shares, in the same order."""
    own, everyone = _metas(record, "export"), _metas(together, "export")
    if record.has("export_changed"):
        yield from _first_unlike(case, record, "export_changed", own, f"the export of rank {record.rank}")
    if not record.has("plan") or record.value("plan") is None:
        return
    plan = _metas(record, "plan")
    have, want = Counter(plan), Counter(everyone)
    if have not in (Counter(own), want):
        names = names_text({name for name, _ in (have - want) + (want - have)})
        message = f"the plan is neither of this rank's share nor of all of them: {names}"
        yield finding(case, record.rank, "plan", message)
        return
    yield from _first_unlike(case, record, "export", _among(plan, own), "its plan")


def _among(entries: list[tuple[str, str]], these: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of `entries` that are among `these`."""
    kept = set(these)
    return [entry for entry in entries if entry in kept]


@judges("EXP-005")
def one_writer_one_tensor(case: Case) -> Iterator[Finding]:
    """Full tensors on one rank only, one at a time."""
    yield from (missing := missing_records(case, "export"))
    full = {rank: sum(row["materialised"] for row in rows) for rank, rows in values(case, "export")}
    writers = [rank for rank, count in full.items() if count]
    if not writers and not missing:
        yield finding(case, None, "export", "no rank was given a tensor")
    for rank in writers[1:]:
        message = f"{full[rank]} full tensors are materialised here too; the writer is rank {writers[0]}"
        yield finding(case, rank, "export", message)
    for rank, rows in values(case, "export"):
        for row in rows:
            if row["alive"]:
                message = f"{row['alive']} earlier tensors are still alive when {row['name']} comes"
                yield finding(case, rank, "export", message, hf_name=row["name"])


@judges("EXP-006", exact=True)
@_of_writer("export_changed")
def changed_weights_are_sent(case: Case, record: RankRecord) -> Iterable[Finding]:
    """After every weight was multiplied by a constant, the whole stream again, and later once more as it is."""
    step, stale = "export_changed", expected(case).tensors
    if missing := missing_records(case, step):
        return missing
    changed = candidates(case, CHANGE)
    findings = [*_complete(case, record, step), *_unlike(case, record, changed, step=step, kinds=KINDS, stale=stale)]
    findings += _unchanged(case)
    before = _wrong_before(case) if findings else set()
    new = [finding for finding in findings if finding.hf_name not in before or "stale" in finding.diagnosis]
    if findings and not new:
        raise Untested("the tensors that are wrong were so in the first export, see EXP-001, EXP-002 and EXP-003")
    return [*new, *(one for behind in BEHIND for one in _behind_a_step(case, behind)), *_behind_a_load(case)]


def _behind_a_step(case: Case, behind: Behind) -> Iterator[Finding]:
    """Tensors that are lost after a step of the optimizer, and shards that no rank holds as they were sent then.

    Not of tensors that were wrong in the first export, nor where a target takes no such step.
    """
    stepped = [(record, record.tensors(behind.record)) for record in _stepped(case, behind)]
    if not stepped:
        return
    want, marked = expected(case).tensors, {name: tensor for _, tensors in stepped for name, tensor in tensors.items()}
    sent = {name: marked[f"{SENT}.{name}"] for name in want if f"{SENT}.{name}" in marked}
    wrong = _wrong_before(case)
    lost = [name for name, right in want.items() if name not in sent or sent[name].shape != right.shape]
    for name in (name for name in lost if name not in wrong):
        how = "in another shape" if name in sent else "never"
        yield finding(case, None, behind.record, f"{name} was {how} sent after {behind.text}", hf_name=name)
    wrong.update(lost)
    placed = Placement(case.cell, expected(case).config, {**want, **sent})
    # Of replicas that hold other values OPT-002 tells.
    shards = dict[tuple[str, ...], Finding | None]()
    for record, tensors in stepped:
        for key, (held,) in parameters(record, placed):
            if held.hf and not wrong.intersection(held.hf) and f"{behind.moved}.{key}" in tensors:
                still, moved = (tensors.get(f"{when}.{key}", torch.empty(0)) for when in (behind.before, behind.moved))
                shard = *held.hf, digest(held.tensor.contiguous())
                other = _sent_otherwise(case, behind, record.rank, key, held, still, moved)
                shards[shard] = other and shards.get(shard, other)
    yield from filter(None, shards.values())


def _behind_a_load(case: Case) -> Iterator[Finding]:
    """Tensors of the first export that another stream lacks or has otherwise, once the checkpoint is loaded again.

    Steps of an optimizer are between the two. Nothing where a target takes none, or refuses to load twice.
    """
    held = [record.tensors("optimizer") for record in records(case, "optimizer")]
    if not any(name.startswith(f"{RELOADED}.") for tensors in held for name in tensors):
        return
    every = {name: tensor for tensors in held for name, tensor in tensors.items()}
    first = {name: of for record in records(case, "export") for name, of in record.tensors("export").items()}
    wrong = _wrong_before(case)
    for name in (name for name in expected(case).tensors if name in first and name not in wrong):
        got = every.get(f"{LOADED}.{SENT}.{name}")
        if got is None:
            message = f"{name} was not sent after the checkpoint was loaded again"
            yield finding(case, None, "optimizer", message, hf_name=name)
        elif difference := compare(first[name], got):
            stale = compare(every.get(f"{SENT}.{name}", torch.empty(0)), got) is None
            diagnosis = "stale: what was sent before that load" if stale else ""
            message = f"{name}: after the checkpoint was loaded again what is sent differs: {difference.text}"
            more = {"hf_name": name, "diagnosis": diagnosis, **difference.told}
            yield finding(case, None, "optimizer", message, **more)


def _stepped(case: Case, behind: Behind) -> list[RankRecord]:
    """The ranks that have taken this step; none of a target that does not claim to."""
    held = records(case, "inventory", behind.record)
    return [record for record in held if record.value(behind.record) is not None]


def _sent_otherwise(
    case: Case, behind: Behind, rank: int, key: str, held: ExpectedShard, still: torch.Tensor, moved: torch.Tensor
) -> Finding | None:
    """The finding of a parameter that does not hold what was sent after a step."""
    difference = compare(held.tensor, moved, held.rows)
    if difference is None or less_one(case, key, held, moved):
        return None
    diagnosis = "stale: what it held before the step" if compare(held.tensor, still, held.rows) is None else ""
    message = f"{key}: after {behind.text} it is not what is sent as {names_text(held.hf)}"
    more = {"local_name": key.partition(":")[2], "hf_name": held.hf[0], "diagnosis": diagnosis, **difference.told}
    return finding(case, rank, behind.record, f"{message}: {difference.text}", **more)


def _unchanged(case: Case) -> Iterator[Finding]:
    """Names that were missing, surplus or repeated when nothing had changed since the last stream."""
    for rank, value in values(case, "own"):
        if value["again"] is not None:  # one rank alone streams once more
            yield from once_each(case, rank, "own", value["again"], *_SENT)


def _wrong_before(case: Case) -> set[str]:
    """Names that the first export lacked or repeated, or gave other tensors for."""
    if (record := _writer(case)) is None:
        return set()
    wrong = [*_complete(case, record, "export"), *_unlike(case, record, candidates(case), kinds=KINDS)]
    return {finding.hf_name for finding in wrong}


@judges("EXP-007", exact=True)
@_against_one_rank
def export_is_the_one_rank_export(case: Case, record: RankRecord, one: RankRecord) -> list[Finding]:
    """Names, shapes, dtypes and bytes against the baseline, in whatever order they come."""
    whole = candidates(case, of=one.tensors("export"))
    return [*_other_entries(case, record, one), *_unlike(case, record, whole, kinds=KINDS)]


def _other_entries(case: Case, record: RankRecord, one: RankRecord) -> Iterator[Finding]:
    """One finding on names and metadata that only one of two exports has."""
    mine, right = (Counter(text for _, text in _metas(each, "export")) for each in (record, one))
    if mine != right:
        here, there = (names_text(more.elements()) or "nothing" for more in (mine - right, right - mine))
        message = f"only this export has {here}; only the one-rank export has {there}"
        yield finding(case, record.rank, "export", message)


@judges("EXP-008")
def tensors_are_the_receivers(case: Case) -> Iterator[Finding]:
    """Which tensors changed while the receiver zeroed every tensor that it was given, and which hold a graph."""
    yield from missing_records(case, "export", "own")
    for rank, rows in values(case, "export"):
        for name in [row["name"] for row in rows if row.get("graph")]:
            message = f"{name} holds an autograd graph, and what that was made of"
            yield finding(case, rank, "export", message, hf_name=name, diagnosis="part of a graph")
    for rank, value in values(case, "own"):
        for key in value["changed"]:
            chunk, _, local = key.partition(":")
            message = f"writing to the exported tensors changed {local} of chunk {chunk}"
            yield finding(case, rank, "own", message, local_name=local, diagnosis="aliases a live parameter")
        for name in value["later"]:
            message = f"writing to earlier tensors changed {name}, which came later"
            diagnosis = "shares memory with an earlier one"
            yield finding(case, rank, "own", message, hf_name=name, diagnosis=diagnosis)


@judges("EXP-012", exact=True)
def kept_tensors_stay(case: Case) -> Iterator[Finding]:
    """Tensors that a receiver kept to the end of the stream, and that held something else by then."""
    yield from missing_records(case, "kept")
    for rank, value in values(case, "kept"):
        for name in value["overwritten"]:
            message = f"{name} held other values at the end of the stream than when it was given"
            yield finding(case, rank, "kept", message, hf_name=name, diagnosis="overwritten by a later one")


@judges("EXP-014")
def training_goes_on(case: Case) -> Iterator[Finding]:
    """What an export has changed beside its stream, by kind."""
    yield from missing_records(case, "export", "left", "broken_off", "export_changed", "kept")
    for rank, value in values(case, "left"):
        yield from changed(case, rank, "left", "export", value)
    for rank, value in values(case, "broken_off"):
        yield from changed(case, rank, "broken_off", "export that broke off", value)
    for rank, value in values(case, "kept"):
        yield from changed(case, rank, "kept", "second export", value["left"])


@judges("EXP-013", exact=True)
def moved_weights_are_sent(case: Case) -> Iterator[Finding]:
    """Tensors that are lost or not what the modules hold, once these were given new memory and changed again."""
    yield from missing_records(case, "move", "own")
    for rank, value in values(case, "own"):
        for name in value["outdated"]:
            message = f"{name} is not what the modules hold in new memory"
            yield finding(case, rank, "own", message, hf_name=name, diagnosis="read from the memory of before")
        for name in value["lost"]:
            yield finding(case, rank, "own", f"{name} was not sent from new memory", hf_name=name)


@judges("EXP-009", exact=True)
def receivers_are_given_the_same(case: Case) -> Iterator[Finding]:
    """The tensors of every other rank that was given some, against the writer's, in both exports."""
    yield from missing_records(case, "export") if _writer(case) else _no_writer(case)
    for step in ("export", "export_changed"):
        if writer := _writer(case, step):
            yield from _of_receivers(case, writer, step)


def _of_receivers(case: Case, writer: RankRecord, step: str) -> Iterator[Finding]:
    """Findings where the ranks that were given tensors in this step lack some, or have others than the writer."""
    want: Candidates | None = None
    for record in records(case, step):
        if case.claims.receivers == "all":
            yield from _complete(case, record, step)
        if record.rank != writer.rank and any(row["materialised"] for row in record.value(step)):
            want = want or candidates(case, of=writer.tensors(step))
            stale = expected(case).tensors if step == "export_changed" else None
            yield from _unlike(case, record, want, step=step, kinds=KINDS, stale=stale)


@judges("EXP-010")
@_against_one_rank
def order_is_the_one_rank_export_s(case: Case, record: RankRecord, one: RankRecord) -> Iterator[Finding]:
    """Names in order against the baseline; where each rank names its share alone, each share's."""
    silent = case.claims.non_writers == "nothing"
    whole = _metas(one, "export")
    for each in record.records if silent and isinstance(record, _Together) else (record,):
        right = _among(whole, _metas(each, "export")) if each is not record else whole
        yield from _first_unlike(case, each, "export", right, "the one-rank export")


@judges("EXP-011")
@_of_writer("export")
def no_tensor_is_repeated(case: Case, record: RankRecord) -> Iterable[Finding]:
    """The writer's names against those that a checkpoint leaves out."""
    sent = {row["name"] for row in record.value("export")}
    return [
        finding(case, record.rank, "export", f"{name} was sent, which repeats {original}", hf_name=name)
        for name, original in aliases(case).items()
        if name in sent
    ]


@judges("PLN-001")
def the_plan_is_the_checkpoint(case: Case) -> Iterator[Finding]:
    """Of a plan made without a module: names once each, shapes, dtypes. The order is the target's, as in an export."""
    ranks, want = records(case, "plan"), expected(case).tensors
    if not ranks:
        yield from unanswered(case, "plan")
        return
    metas: tuple[TensorMeta, ...] = ranks[0].value("plan")
    yield from once_each(case, 0, "plan", (meta.name for meta in metas), "is not planned", "is planned")
    for meta in metas:
        given = {"shape": list(meta.shape), "dtype": meta.dtype}
        for what, right in shape_and_dtype(want[meta.name]) if meta.name in want else ():
            if right != given[what]:
                message = f"{what} of {meta.name} is {right}, the plan says {given[what]}"
                yield finding(case, 0, "plan", message, hf_name=meta.name, expected=right, got=given[what])
