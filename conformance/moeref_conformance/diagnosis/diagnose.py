"""Diagnosis by trial: what happened to a tensor, in a few words.

Each trial re-creates one known mistake from the expected tensors and compares bytes; the first that fits is the answer.
This module has their order, and the trials that look for whole tensors. `axes`, `shards` and `values` have the others,
`matching` the search by rows and columns.
"""

from __future__ import annotations

import torch

from moeref_conformance.diagnosis import axes, shards, values
from moeref_conformance.diagnosis.compare import same
from moeref_conformance.diagnosis.matching import Candidates, first_of, mistaken, moved, shifted

UNKNOWN = "no known pattern"


def diagnose(
    name: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    candidates: Candidates,
    stale: torch.Tensor | None = None,
) -> str:
    """One short phrase on what `got` is instead of `expected`, or "no known pattern".

    `stale` is what the tensor held before the last change.
    """
    expected, got = expected.detach().cpu(), got.detach().cpu()
    if expected.dtype != got.dtype:
        return values.other_dtype(expected, got)
    if expected.shape != got.shape:
        return first_of(
            lambda: axes.reshaped(expected, got),
            lambda: axes.transposed(expected, got),
            lambda: axes.joined_elsewhere(expected, got),
            lambda: shards.wrong_share(name, expected, got, candidates),
            lambda: axes.longer_or_shorter(expected, got),
            lambda: _another(name, got, candidates),
            lambda: moved(name, got, candidates, Candidates({})),
            lambda: values.foreign(expected, got, candidates),
            lambda: UNKNOWN,
        )
    return first_of(
        lambda: values.constant(expected, got),
        lambda: _left_over(name, got, candidates),
        lambda: values.stale_values(expected, got, stale),
        lambda: shards.wrong_share(name, expected, got, candidates),
        lambda: _another(name, got, candidates),
        lambda: shards.wrong_expert(name, expected, got, candidates),
        lambda: axes.transposed(expected, got),
        lambda: _slices(name, expected, got, candidates, stale),
        lambda: shards.not_rechunked(name, expected, got, candidates),
        lambda: shards.groups_lost(name, expected, got, candidates),
        lambda: axes.shards_reordered(name, expected, got),
        lambda: shifted(expected, got, candidates),
        lambda: values.scaled_by_block(expected, got),
        lambda: values.missing_lines(expected, got),
        lambda: moved(name, got, candidates, Candidates({name: expected})),
        lambda: values.rounded(expected, got),
        lambda: values.scaled(expected, got),
        lambda: values.shifted(expected, got),
        lambda: values.foreign(expected, got, candidates),
        lambda: values.scaled_by_run(expected, got),
        lambda: values.other_signs(expected, got),
        lambda: UNKNOWN,
    )


def _another(name: str, got: torch.Tensor, candidates: Candidates) -> str:
    other = candidates.named(got)
    if not other or other == name:
        return ""
    if shards.counterpart(name) == other:
        return "gate and up swapped"
    parts = candidates.parts.get(name, ())
    seen_from = parts[0] if len(parts) == 1 and other not in candidates.tensors else name
    return mistaken(seen_from, other, candidates.dense_prefix)


def _left_over(name: str, got: torch.Tensor, candidates: Candidates) -> str:
    """A tensor that was read from a file which the index of the checkpoint does not name."""
    there = (candidates.behind or candidates).left_over
    read = any(same(there[part], got) for part in candidates.parts.get(name, (name,)) if part in there)
    return "as in a file of the folder that its index does not name" if read else ""


def _slices(
    name: str, expected: torch.Tensor, got: torch.Tensor, candidates: Candidates, stale: torch.Tensor | None
) -> str:
    """A tensor of stacked experts: what its first wrong expert is."""
    if expected.dim() != 3:
        return ""
    wrong = [i for i in range(len(expected)) if not same(expected[i], got[i])]
    head, _, tail = name.rpartition("experts.")
    names = [f"{head}experts.{i}.{tail}" if head else f"{name}.experts.{i}" for i in range(len(expected))]
    inside = Candidates(dict(zip(names, expected, strict=True)), candidates.dense_prefix, behind=candidates)
    at, old = wrong[0], None if stale is None else stale[wrong[0]]
    said = diagnose(names[at], expected[at], got[at], inside, old)
    return "" if said == UNKNOWN else f"{len(wrong)} of {len(expected)} experts: expert {at} {said}"
