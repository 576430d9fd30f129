"""NAM: the names tables, against the checkpoint, megatron-core's stages and the modules of each rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moeref_conformance.contract.api import NameRow
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.export import UNMAPPED
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    name_rows,
    names_text,
    observed,
    outcome,
    placement,
    tables,
    without,
)
from moeref_conformance.oracles.placement import Placement, Unknown, hf_numbers, plain_local

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$)")
_FUSED = tuple(f".mlp.experts.{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias"))


def _row(case: Case, rank: int, row: NameRow, message: str, **more: object) -> Finding:
    hf = row.hf[0] if row.hf else ""
    return finding(case, rank, "names", message, local_name=row.local, global_name=row.global_name, hf_name=hf, **more)


@judges("NAM-001")
def tables_cover_the_checkpoint(case: Case) -> Outcome:
    """The union over all ranks."""
    findings = without(case, "names")
    want, have = set(expected(case).tensors), {h for given in tables(case) for row in given.rows for h in row.hf}
    for name in sorted(want - have):
        findings.append(finding(case, None, "names", f"no rank lists {name}", hf_name=name))
    for name in sorted(have - want):
        findings.append(finding(case, None, "names", f"{name} is not in the checkpoint", hf_name=name))
    return outcome(findings)


@judges("NAM-002")
def names_are_in_bijection(case: Case) -> Outcome:
    """One global name has one list of HF names on every rank and the other way round; and it is the right kind."""
    findings = without(case, "names")
    oracle = placement(case)
    told: dict[str, tuple[int, NameRow]] = {}
    owners: dict[str, dict[str, tuple[int, NameRow]]] = defaultdict(dict)
    for given in tables(case):
        rank, seen = given.rank, set[str]()
        for row in given.rows:
            first_rank, first = told.setdefault(row.global_name, (rank, row))
            if (first.hf, first.dtype) != (row.hf, row.dtype):
                message = f"{row.global_name} is {list(row.hf)} {row.dtype} here, {list(first.hf)} {first.dtype}"
                findings.append(_row(case, rank, row, f"{message} on rank {first_rank}"))
            if row.global_name in seen:
                findings.append(_row(case, rank, row, f"{row.global_name} is listed twice on this rank"))
            seen.add(row.global_name)
            for name in row.hf:
                owners[name].setdefault(row.global_name, (rank, row))
            findings += _right_kind(case, oracle, rank, row)
    for name, holders in owners.items():
        most = oracle.experts if name.endswith(_FUSED) else 1
        if len(holders) > most:
            rank, row = list(holders.values())[-1]
            findings.append(_row(case, rank, row, f"{name} belongs to {len(holders)} tensors: {names_text(holders)}"))
    return outcome(findings)


def _right_kind(case: Case, oracle: Placement, rank: int, row: NameRow) -> list[Finding]:
    """Compare HF names with their numbers blanked; NAM-003 and NAM-004 judge the numbers."""
    try:
        held = oracle.shard(rank, row.chunk, row.local, row.shape)
    except Unknown as error:
        return [_row(case, rank, row, str(error))] if error.what == "module" else []
    if held.hf == row.hf or {_blank(h) for h in held.hf} == {_blank(h) for h in row.hf}:
        return []
    message = f"{row.local} is made of {list(held.hf)}, the table says {list(row.hf)}"
    return [_row(case, rank, row, message, expected=str(list(held.hf)), got=str(list(row.hf)))]


def _blank(name: str) -> str:
    return re.sub(r"(layers|experts)\.\d+\.", r"\1.*.", name)


@judges("NAM-003")
def layer_numbers(case: Case) -> Outcome:
    """Numbers in HF and global names against megatron-core's stages, and every layer of the stage is there."""
    findings = without(case, "names")
    oracle = placement(case)
    for given in tables(case):
        rank, listed = given.rank, set[tuple[int, int]]()
        for row in given.rows:
            local = _LAYER.search(f".{plain_local(row.local)}")
            if local is None:
                continue
            listed.add((row.chunk, int(local[1])))
            ids = oracle.layer_ids(rank, row.chunk)
            if int(local[1]) >= len(ids):
                message = f"{row.local}: chunk {row.chunk} has only {len(ids)} layers here"
                findings.append(_row(case, rank, row, message))
                continue
            want, number = ids[int(local[1])], _LAYER.search(row.global_name)
            numbers = {int(number[1]) if number else None} | {hf_numbers(h)[0] for h in row.hf}
            if numbers != {want}:
                got = ", ".join(str(n) for n in sorted(numbers - {want}, key=str))
                message = f"{row.local} of chunk {row.chunk} is layer {want}, the table says {got}"
                told = {"layer": want, "expected": str(want), "got": got}
                findings.append(_row(case, rank, row, message, diagnosis=_shift(want, got), **told))
        chunks = {chunk for stage, chunk in oracle.layers if stage == oracle.coords(rank)["pp"]}
        for chunk in sorted(chunks):
            for local_number, layer in enumerate(oracle.layer_ids(rank, chunk)):
                if (chunk, local_number) not in listed:
                    message = f"chunk {chunk}: layer {layer} (local {local_number}) is not in the table"
                    findings.append(finding(case, rank, "names", message, layer=layer))
    return outcome(findings)


def _shift(want: int, got: str) -> str:
    return f"layer {int(got) - want:+d}" if got.isdigit() else ""


@judges("NAM-004")
def expert_numbers(case: Case) -> Outcome:
    """Numbers in HF and global names, and every expert of the rank is there in every MoE layer."""
    findings = without(case, "names")
    oracle = placement(case)
    for given in tables(case):
        rank, listed = given.rank, set[tuple[int | None, int | None, bool]]()
        for row in given.rows:
            local = _EXPERT.search(row.local)
            if local is None:
                continue
            try:
                layer, want = oracle.numbers(rank, row.chunk, row.local)
            except Unknown as error:
                if error.what == "expert":
                    findings.append(_row(case, rank, row, str(error)))
                continue
            listed.add((layer, want, "linear_fc1" in row.local))
            number = _EXPERT.search(row.global_name)
            numbers = {int(number[1] or number[2]) if number else None}
            numbers |= {hf_numbers(h)[1] for h in row.hf if not h.endswith(_FUSED)}
            if numbers != {want}:
                got = ", ".join(str(n) for n in sorted(numbers - {want}, key=str))
                message = f"{row.local} is expert {want} (ep_rank · E/EP + local), the table says {got}"
                more = {"expert": want, "expected": str(want), "got": got}
                findings.append(_row(case, rank, row, message, **more))
        stage = oracle.coords(rank)["pp"]
        mine = [i for (pp, _), ids in oracle.layers.items() if pp == stage for i in ids if i in oracle.moe_layers]
        for layer in mine:
            for expert in oracle.expert_range(rank):
                if not {(layer, expert, True), (layer, expert, False)} <= listed:
                    message = f"layer {layer}: expert {expert} is not in the table, or not whole"
                    findings.append(finding(case, rank, "names", message, layer=layer, expert=expert))
    return outcome(findings)


@judges("NAM-005")
def tables_match_the_modules(case: Case) -> Outcome:
    """Names, shapes and dtypes of the table against named_parameters and persistent buffers."""
    findings = without(case, "names", "inventory")
    for record in observed(case).ranks:
        if record.has("names") and record.has("inventory"):
            findings += _against_modules(case, record)
    return outcome(findings)


def _against_modules(case: Case, record: RankRecord) -> list[Finding]:
    findings: list[Finding] = []
    table: dict[tuple[int, str], NameRow] = {}
    for row in name_rows(record):
        if (row.chunk, row.local) in table:
            findings.append(_row(case, record.rank, row, f"chunk {row.chunk}: {row.local} is listed twice"))
        table[row.chunk, row.local] = row
    held = {(t["chunk"], t["local"]): t for t in record.value("inventory")}
    for (chunk, local), tensor in held.items():
        if (chunk, local) in table:
            findings += _against_tensor(case, record.rank, table[chunk, local], tensor)
        else:
            message = f"chunk {chunk}: {tensor['kind']} {local} is not in the table"
            findings.append(finding(case, record.rank, "names", message, local_name=local))
    for key, row in table.items():
        if key not in held:
            findings.append(_row(case, record.rank, row, f"chunk {row.chunk} has no tensor {row.local}"))
    return findings


def _against_tensor(case: Case, rank: int, row: NameRow, tensor: Mapping[str, Any]) -> list[Finding]:
    pairs = (("shape", tensor["shape"], list(row.shape)), ("dtype", tensor["dtype"], row.dtype))
    return [
        _row(
            case,
            rank,
            row,
            f"chunk {row.chunk}: {what} of {row.local} is {want}, the table says {got}",
            expected=str(want),
            got=str(got),
        )
        for what, want, got in pairs
        if want != got
    ]


@judges("NAM-006")
def unmapped_parameter_is_refused(case: Case) -> Outcome:
    """Every rank raised, and the message names the parameter."""
    return refusal(case, "refuse_parameter", f"{UNMAPPED}.weight", f"a parameter {UNMAPPED}.weight was added")


def refusal(case: Case, step: str, name: str, what: str) -> Outcome:
    """Every rank must have raised in `step` with a message that holds `name`."""
    findings = []
    have = {record.rank: record for record in observed(case).ranks}
    ended = {crash.rank: f": it {crash.kind} in step {crash.step}" for crash in observed(case).crashes}
    for rank in range(case.cell.layout.world):
        record = have.get(rank)
        error = record.error(step) if record else None
        if error is not None and name not in error["message"]:
            message = f"the error does not name {name}: {error['type']}: {error['message'][:300]}"
            findings.append(finding(case, rank, step, message, expected=name))
        elif error is None and record is not None and record.has(step):
            findings.append(
                finding(case, rank, step, f"{what}, and nothing was raised", expected=f"an error with {name}")
            )
        elif error is None:
            findings.append(finding(case, rank, step, f"no record of step {step}{ended.get(rank, '')}"))
    return outcome(findings)
