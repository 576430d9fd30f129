"""SED: the seeds of every rank's generators, and the draws of a resumed run."""

from __future__ import annotations

from typing import Any

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.requests.seeds import SEED, WAYS
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, observed, outcome, without

_DEFAULT = ("python", "numpy", "torch", "cuda")
_DRAWN = ("python", "numpy", "torch", "tp", "expert")


def formula(at: dict[str, int], seed: int, per_dp: bool) -> dict[str, int]:
    """The documented seeds at these coordinates: Megatron-LM's `_set_random_seed`, then megatron-core's
    `model_parallel_cuda_manual_seed`."""
    base = seed + 100 * at["pp"] + (10 * at["dp"] if per_dp else 0)
    trackers = {"tp": base + 2718 + at["tp"], "expert": base + 1024 + 100 * at["ep"] + at["etp"]}
    return {**dict.fromkeys(_DEFAULT, base), **trackers}


@judges("SED-001")
def planned_by_the_formula(case: Case) -> Outcome:
    """Every generator of every rank, both ways."""
    findings = without(case, "seeds_planned")
    for record in observed(case).ranks:
        if not record.has("seeds_planned"):
            continue
        value, at = record.value("seeds_planned"), topology.coords(case.cell.layout, record.rank)
        for way, per_dp in WAYS.items():
            findings += _differences(case, record.rank, "seeds_planned", way, formula(at, SEED, per_dp), value[way])
    return outcome(findings)


@judges("SED-002")
def installed_as_megatron_does(case: Case) -> Outcome:
    """States of the generators after seeding against those after megatron-core's own seeding on the same rank."""
    findings = without(case, "seeds")
    for record in observed(case).ranks:
        if not record.has("seeds"):
            continue
        value = record.value("seeds")
        for way in WAYS:
            findings += _differences(case, record.rank, "seeds", way, value["megatron"][way], value[way])
    return outcome(findings)


@judges("SED-003")
def bad_seeds_are_refused(case: Case) -> Outcome:
    """An error that says which seed, when planning and when seeding."""
    findings = without(case, "seeds_planned")
    for record in observed(case).ranks:
        for step in ("seeds_planned", "seeds"):
            if not record.has(step):
                continue
            for bad, answer in record.value(step)["refused"].items():
                if answer is None:
                    findings.append(finding(case, record.rank, step, f"seed {bad} was taken"))
                elif bad not in answer:
                    findings.append(
                        finding(case, record.rank, step, f"the refusal of seed {bad} does not name it", got=answer)
                    )
    return outcome(findings)


@judges("SED-004")
def a_resumed_run_draws_on(case: Case) -> Outcome:
    """The draws after each restore equal those of the run that was saved."""
    findings = without(case, "seeds_resumed")
    for record in observed(case).ranks:
        if not record.has("seeds_resumed"):
            continue
        value = record.value("seeds_resumed")
        for turn in ("resumed", "resumed again"):
            drawn, want = value[turn], value["went on"]
            wrong = [name for name, a, b in zip(_DRAWN, want, drawn, strict=True) if a != b]
            if wrong:
                message = f"{turn}: other draws of {', '.join(wrong)}"
                findings.append(
                    finding(case, record.rank, "seeds_resumed", message, expected=str(want), got=str(drawn))
                )
    return outcome(findings)


def _differences(
    case: Case, rank: int, step: str, way: str, want: dict[str, Any], have: dict[str, Any]
) -> list[Finding]:
    """One finding for each group of generators that differs."""
    wrong = [name for name in want if have.get(name) != want[name]]
    if not wrong:
        return []
    first = wrong[0]
    message = f"{way}: {', '.join(wrong)} seeded otherwise"
    return [finding(case, rank, step, message, expected=str(want[first]), got=str(have.get(first, "nothing")))]
