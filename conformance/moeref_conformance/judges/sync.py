"""SYN: what an engine serves after updates of its weights, by the logprobs of transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import (
    distance,
    expected,
    finding,
    outcome,
    tolerance,
    unanswered,
    values,
    within,
)
from moeref_conformance.oracles import sync

#: fp32 on both sides, sums in other orders. Measured: below 2e-6 in four families.
CLOSE = 2e-5
#: The weights that make the samples of a phase.
WEIGHTS = {"first": "checkpoint", "cached": "checkpoint", "second": "second", "back": "checkpoint"}


def off(folder: Path, sample: dict[str, Any]) -> float:
    """The greatest difference of a sample's logprobs to those of the weights in a folder."""
    want_G = sync.logprobs(folder, sample["prompt"], sample["tokens"])
    return float(distance(want_G, torch.tensor(sample["logprobs"])).max()) if len(want_G) else 0.0


def _phase(case: Case, phases: Iterable[str], message: str) -> Outcome:
    """Every token of these phases has the logprob that the phase's weights give it."""
    findings: list[Finding] = unanswered(case, "sync")
    worst = 0.0
    for rank, value in values(case, "sync"):
        for phase in phases:
            for sample in value["sampled"][phase]:
                named = WEIGHTS[phase.removesuffix(" known")]
                far = off(expected(case).dir / named, sample)
                worst = max(worst, far)
                if not far <= CLOSE:
                    told = (
                        f"{message}: logprobs are {far:.2g} off (limit {tolerance(case, CLOSE)}) {_whose(case, sample)}"
                    )
                    findings.append(finding(case, rank, "sync", told, got=far))
    return outcome(findings, within(case, worst, CLOSE))


def _whose(case: Case, sample: dict[str, Any]) -> str:
    """Which weights explain a sample."""
    found = [name for name in ("checkpoint", "second") if off(expected(case).dir / name, sample) <= CLOSE]
    names = {"checkpoint": "the first weights give them", "second": "the second weights give them"}
    return names[found[0]] if found else "neither the first nor the second weights give them"


@judges("SYN-001")
def serves_what_it_was_opened_with(case: Case) -> Outcome:
    """Before any update, also from its cache of prefixes."""
    return _phase(case, ("first", "cached"), "before any update")


@judges("SYN-002")
def new_weights_are_used(case: Case) -> Outcome:
    """A prompt that the engine has not seen, after an update."""
    return _phase(case, ("second",), "after an update")


@judges("SYN-003")
def old_weights_are_gone(case: Case) -> Outcome:
    """A prompt that the engine has not seen, after a second update, which brings the first weights back."""
    return _phase(case, ("back",), "after a second update")


@judges("SYN-004")
def caches_are_not_stale(case: Case) -> Outcome:
    """A prompt that the engine has seen under earlier weights."""
    return _phase(case, ("second known", "back known"), "after an update, for a prompt that was sampled before it")
