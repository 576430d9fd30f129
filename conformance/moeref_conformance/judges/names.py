"""NAM: the names tables, against the checkpoint, megatron-core's stages and the modules of each rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from moeref_conformance.contract.api import NameRow
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.contract.requests.export import UNMAPPED
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    expected,
    finding,
    missing_records,
    name_rows,
    names_text,
    placement,
    records,
    tables,
)
from moeref_conformance.judges.refusals import refused_by_name, refused_somewhere
from moeref_conformance.oracles.cuts import VOCABULARY
from moeref_conformance.oracles.placement import Placement, Unknown, hf_numbers, plain_local

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$)")
_FUSED = tuple(f".mlp.experts.{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias"))


def _row(case: Case, rank: int, row: NameRow, message: str, **more: object) -> Finding:
    hf = row.hf[0] if row.hf else ""
    return finding(case, rank, "names", message, local_name=row.local, global_name=row.global_name, hf_name=hf, **more)


@judges("NAM-001")
def tables_cover_the_checkpoint(case: Case) -> Iterator[Finding]:
    """The union over all ranks."""
    yield from missing_records(case, "names")
    want, have = set(expected(case).tensors), {h for given in tables(case) for row in given.rows for h in row.hf}
    for name in sorted(want - have):
        yield finding(case, None, "names", f"no rank lists {name}", hf_name=name)
    for name in sorted(have - want):
        yield finding(case, None, "names", f"{name} is not in the checkpoint", hf_name=name)


@judges("NAM-002")
def names_are_in_bijection(case: Case) -> Iterator[Finding]:
    """One global name has one list of HF names on every rank and the other way round; and it is the right kind."""
    yield from missing_records(case, "names")
    oracle = placement(case)
    firsts: dict[str, tuple[int, NameRow]] = {}
    owners: dict[str, dict[str, tuple[int, NameRow]]] = defaultdict(dict)
    for given in tables(case):
        rank, seen = given.rank, set[str]()
        for row in given.rows:
            first_rank, first = firsts.setdefault(row.global_name, (rank, row))
            if (first.hf, first.dtype) != (row.hf, row.dtype):
                message = f"{row.global_name} is {list(row.hf)} {row.dtype} here, {list(first.hf)} {first.dtype}"
                yield _row(case, rank, row, f"{message} on rank {first_rank}")
            if row.global_name in seen:
                yield _row(case, rank, row, f"{row.global_name} is listed twice on this rank")
            seen.add(row.global_name)
            for name in row.hf:
                owners[name].setdefault(row.global_name, (rank, row))
            yield from _right_kind(case, oracle, rank, row)
    for name, holders in owners.items():
        most = oracle.experts if name.endswith(_FUSED) else 1
        if len(holders) > most:
            rank, row = list(holders.values())[-1]
            yield _row(case, rank, row, f"{name} belongs to {len(holders)} tensors: {names_text(holders)}")


def _right_kind(case: Case, oracle: Placement, rank: int, row: NameRow) -> Iterator[Finding]:
    """Compare HF names with their numbers blanked; NAM-003 and NAM-004 judge the numbers."""
    try:
        held = oracle.shard(rank, row.chunk, row.local, row.shape)
    except Unknown as error:  # NAM-003 finds a layer that does not exist, NAM-004 an expert
        if error.what == "module":
            yield _row(case, rank, row, str(error))
        return
    # Names of one vocabulary are copies of each other, in any order.
    order = sorted if plain_local(row.local) in VOCABULARY else list
    if held.hf != row.hf and order(map(_blank, held.hf)) != order(map(_blank, row.hf)):
        want, got = list(held.hf), list(row.hf)
        yield _row(case, rank, row, f"{row.local} is made of {want}, the table says {got}", expected=want, got=got)


def _blank(name: str) -> str:
    return re.sub(r"(layers|experts)\.\d+\.", r"\1.*.", name)


@judges("NAM-003")
def layer_numbers(case: Case) -> Iterator[Finding]:
    """Numbers in HF and global names against megatron-core's stages, and every layer of the stage is there."""
    yield from missing_records(case, "names")
    oracle = placement(case)
    for given in tables(case):
        rank, listed = given.rank, set[tuple[int, int]]()
        for row in given.rows:
            local = _LAYER.search(f".{plain_local(row.local)}")
            if local is None:
                yield from _predicting(case, oracle, rank, row)
                continue
            listed.add((row.chunk, int(local[1])))
            ids = oracle.layer_ids(rank, row.chunk)
            if int(local[1]) >= len(ids):
                yield _row(case, rank, row, f"{row.local}: chunk {row.chunk} has only {len(ids)} layers here")
                continue
            want, number = ids[int(local[1])], _LAYER.search(row.global_name)
            if got := _others(want, int(number[1]) if number else None, *(oracle.hf_numbers(h)[0] for h in row.hf)):
                message = f"{row.local} of chunk {row.chunk} is layer {want}, the table says {got}"
                diagnosis = f"is named layer {int(got) - want:+d}" if got.isdigit() else ""
                yield _row(case, rank, row, message, layer=want, expected=want, got=got, diagnosis=diagnosis)
        for (stage, chunk), layers in sorted(oracle.layers.items()):
            for local_number, layer in enumerate(layers if stage == oracle.coords(rank)["pp"] else ()):
                if (chunk, local_number) not in listed:
                    message = f"chunk {chunk}: layer {layer} (local {local_number}) is not in the table"
                    yield finding(case, rank, "names", message, layer=layer)


def _predicting(case: Case, oracle: Placement, rank: int, row: NameRow) -> Iterator[Finding]:
    """A finding for a tensor of a multi-token prediction layer that is another layer's in the checkpoint."""
    try:
        want = oracle.numbers(rank, row.chunk, row.local)[0]
    except Unknown as error:
        yield _row(case, rank, row, str(error))
        return
    if want is not None and (got := _others(want, *(oracle.hf_numbers(h)[0] for h in row.hf))):
        message = f"{row.local} of chunk {row.chunk} is layer {want}, the table says {got}"
        yield _row(case, rank, row, message, layer=want, expected=want, got=got)


def _others(want: int | None, *numbers: int | None) -> str:
    """The numbers that are not the right one, as text; "none" for a name without one in Megatron's or HF's form."""
    return ", ".join(sorted({"none" if number is None else str(number) for number in numbers if number != want}))


@judges("NAM-004")
def expert_numbers(case: Case) -> Iterator[Finding]:
    """Numbers in HF and global names, and every expert of the rank is there in every MoE layer."""
    yield from missing_records(case, "names")
    oracle = placement(case)
    for given in tables(case):
        rank, listed = given.rank, set[tuple[int | None, int | None, bool]]()
        for row in given.rows:
            if _EXPERT.search(row.local) is None:
                continue
            try:
                layer, want = oracle.numbers(rank, row.chunk, row.local)
            except Unknown as error:
                if error.what == "expert":  # NAM-002 finds an unknown module, NAM-003 a layer
                    yield _row(case, rank, row, str(error))
                continue
            listed.add((layer, want, "linear_fc1" in row.local))
            number = _EXPERT.search(row.global_name)
            of_hf = (hf_numbers(h)[1] for h in row.hf if not h.endswith(_FUSED))
            if got := _others(want, int(number[1] or number[2]) if number else None, *of_hf):
                message = f"{row.local} is expert {want} (ep_rank · E/EP + local), the table says {got}"
                yield _row(case, rank, row, message, expert=want, expected=want, got=got)
        stage = oracle.coords(rank)["pp"]
        mine = [i for (pp, _), ids in oracle.layers.items() if pp == stage for i in ids if i in oracle.moe_layers]
        for layer in mine:
            for expert in oracle.expert_range(rank):
                if not {(layer, expert, True), (layer, expert, False)} <= listed:
                    message = f"layer {layer}: expert {expert} is not in the table, or not whole"
                    yield finding(case, rank, "names", message, layer=layer, expert=expert)


@judges("NAM-005")
def tables_match_the_modules(case: Case) -> Iterator[Finding]:
    """Names, shapes and dtypes of the table against named_parameters and persistent buffers."""
    yield from missing_records(case, "names", "inventory")
    for record in records(case, "names", "inventory"):
        yield from _against_modules(case, record)


def _against_modules(case: Case, record: RankRecord) -> Iterator[Finding]:
    rank, table = record.rank, dict[tuple[int, str], NameRow]()
    for row in name_rows(record):
        if (row.chunk, row.local) in table:
            yield _row(case, rank, row, f"chunk {row.chunk}: {row.local} is listed twice")
        table[row.chunk, row.local] = row
    held = {(t["chunk"], t["local"]): t for t in record.value("inventory")}
    for (chunk, local), tensor in held.items():
        if (chunk, local) not in table:
            message = f"chunk {chunk}: {tensor['kind']} {local} is not in the table"
            yield finding(case, rank, "names", message, local_name=local)
            continue
        row = table[chunk, local]
        for what, got in (("shape", list(row.shape)), ("dtype", row.dtype)):
            if got != tensor[what]:
                message = f"chunk {chunk}: {what} of {local} is {tensor[what]}, the table says {got}"
                yield _row(case, rank, row, message, expected=tensor[what], got=got)
    for key, row in table.items():
        if key not in held:
            yield _row(case, rank, row, f"chunk {row.chunk} has no tensor {row.local}")


#: What steps `refuse_parameter` and `refuse_buffer` do.
_ADDED = f"a parameter {UNMAPPED}.weight was added inside the last chunk"
_BUFFER = f"a persistent buffer {UNMAPPED}.weight was added inside the first chunk"


@judges("NAM-006")
def unmapped_parameter_is_refused(case: Case) -> Iterator[Finding]:
    """A rank raised, and all ended the step."""
    return refused_somewhere(case, "refuse_parameter", _ADDED)


@judges("NAM-008")
def unmapped_parameter_is_named(case: Case) -> Iterator[Finding]:
    """Every rank raised, and the message names the parameter."""
    return refused_by_name(case, "refuse_parameter", f"{UNMAPPED}.weight", _ADDED)


@judges("NAM-009")
def unmapped_buffer_is_refused(case: Case) -> Iterator[Finding]:
    """A rank raised, and all ended the step."""
    return refused_somewhere(case, "refuse_buffer", _BUFFER)
