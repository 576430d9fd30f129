"""What judges share: findings with the rank's coordinates, findings for missing records, contexts for diagnosis."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import NameRow
from moeref_conformance.contract.backends import GPU_BACKENDS
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation, RankRecord
from moeref_conformance.diagnosis.matching import Context
from moeref_conformance.judges import Case, grouped
from moeref_conformance.oracles.expected import Expected
from moeref_conformance.oracles.placement import Placement, hf_numbers


def observed(case: Case) -> Observation:
    """The run of the cell. If there was none, an empty one: then every step is missing."""
    return case.observation or Observation(case.cell, [])


def expected(case: Case) -> Expected:
    """The expected checkpoint; ValueError if the case has none, which is a failure of the kit."""
    if case.expected is None:
        raise ValueError(f"cell {case.cell.id}: no expected checkpoint to judge by")
    return case.expected


def outcome(findings: list[Finding], met: str = "exact") -> Outcome:
    """Findings grouped and cut to a readable number."""
    return Outcome(findings=grouped(findings), met=met)


def finding(case: Case, rank: int | None, stage: str, message: str, **more: Any) -> Finding:
    """A finding; coordinates come from the rank, layer and expert from the Hugging Face name."""
    if more.get("hf_name"):
        layer, expert = hf_numbers(more["hf_name"])
        more.setdefault("layer", layer)
        more.setdefault("expert", expert)
    return Finding(stage, message, rank=rank, coords=place(case, rank), **more)


def place(case: Case, rank: int | None) -> str:
    """`tp0 pp1 ep0 etp0 dp0`, or nothing for a rank outside the layout."""
    inside = rank is not None and 0 <= rank < case.cell.layout.world
    return topology.coords_text(case.cell.layout, rank) if inside and rank is not None else ""


def without(case: Case, *steps: str) -> list[Finding]:
    """A finding for every rank that has no record of one of the steps."""
    run = observed(case)
    have = {record.rank: record for record in run.ranks}
    findings = []
    for rank in range(case.cell.layout.world):
        for step in steps:
            if rank not in have or not have[rank].has(step):
                findings.append(finding(case, rank, step, f"no record of step {step}"))
    return findings


def unanswered(case: Case, step: str) -> list[Finding]:
    """`without` for a step that the static world takes once: there rank 0 answers for all."""
    return [missing for missing in without(case, step) if case.cell.backend != "static" or missing.rank == 0]


def name_rows(record: RankRecord) -> tuple[NameRow, ...]:
    """The names table that this rank gave."""
    value = record.value("names")
    if isinstance(value, tuple):  # kept in memory
        return value
    return tuple(NameRow(**{**row, "hf": tuple(row["hf"]), "shape": tuple(row["shape"])}) for row in value)


@dataclass(frozen=True)
class Given:
    """A names table, and the ranks that gave an equal one at the same place of the TP, PP, EP and ETP groups."""

    rows: tuple[NameRow, ...]
    ranks: list[int]

    @property
    def rank(self) -> int:
        """The first of the ranks; findings name it."""
        return self.ranks[0]


def tables(case: Case) -> list[Given]:
    """The names tables of all ranks. Ranks with equal tables at the same place share one, and one judgement."""
    if "tables" not in case.made:
        by_place: dict[tuple[Any, ...], Given] = {}
        same: dict[tuple[NameRow, ...], tuple[NameRow, ...]] = {}
        kept: dict[int, tuple[tuple[NameRow, ...], tuple[NameRow, ...]]] = {}
        for record in observed(case).ranks:
            if not record.has("names"):
                continue
            rows = name_rows(record)
            # Of a table that several records share, only the first is compared with the others.
            # Both are held: the number of an object that is gone may come again.
            if id(rows) not in kept:
                kept[id(rows)] = rows, same.setdefault(rows, rows)
            rows = kept[id(rows)][1]
            at = topology.coords(case.cell.layout, record.rank)
            key = id(rows), at["pp"], at["ep"], at["tp"], at["etp"]
            by_place.setdefault(key, Given(rows, [])).ranks.append(record.rank)
        case.made["tables"] = list(by_place.values())
    given: list[Given] = case.made["tables"]
    return given


def placement(case: Case) -> Placement:
    """The brute-force placement of the cell's checkpoint."""
    if "placement" not in case.made:
        model = expected(case)
        case.made["placement"] = Placement(case.cell, model.config, model.tensors)
    made: Placement = case.made["placement"]
    return made


def context(case: Case, factor: float = 1.0) -> Context:
    """The whole expected checkpoint, times `factor`, for diagnosis."""
    model = expected(case)
    tensors = model.tensors if factor == 1.0 else {k: v * factor for k, v in model.tensors.items()}
    return Context(tensors, int(model.config.get("first_k_dense_replace") or 0))


def tolerance(case: Case, limit: float) -> str:
    """A tolerance as text; on a GPU with the remark that it was measured on CPUs."""
    return f"{limit:g}" + (", a limit measured on CPUs" if case.cell.backend in GPU_BACKENDS else "")


def within(case: Case, worst: float, limit: float) -> str:
    """How a pass within a tolerance was met."""
    return f"{worst:.1e} ≤ {tolerance(case, limit)}"


def unmeasured(case: Case) -> Outcome | None:
    """Untested, for kernels without a measured tolerance for sums in another order."""
    if case.cell.kernels == "torch":
        return None
    return Outcome(untested="no tolerance is measured for Transformer Engine's kernels yet")


def names_text(names: Iterable[str], most: int = 4) -> str:
    """The first names and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
