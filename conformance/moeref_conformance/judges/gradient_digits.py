"""RPL-010: the sums of gradients over microbatches and replicas have the digits of fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import expected, finding, gradients_of, missing_records, outcome, records

#: Of the elements of gradients that two microbatches add up in fp32, this share at most are numbers of bf16.
ROUNDED = 0.9
_EXPERTS = ".experts"
_VECTORS = "norms and other vectors"


@judges("RPL-010")
def gradients_are_added_up_in_fp32(case: Case) -> Outcome:
    """Of microbatches and replicas, in a model in bf16: by the digits of each matrix, and of all experts of a layer.

    An expert may have tokens of one microbatch alone. So has a row of the embedding, which is left out. Norms and other
    vectors are few elements each, and counted together.
    """
    judged = _summed(case)
    if not judged:
        return Outcome(untested="gradients are of one microbatch of one replica, and computed in bf16")
    findings, most = missing_records(case, "replay"), 0.0
    for record in records(case, "replay"):
        held = _digits(gradients_of(record, "step-a"))
        if not held.keys() - {_VECTORS}:
            findings.append(finding(case, record.rank, "replay", "step-a: every gradient of a matrix is zero"))
        for name in (name for name in held if name.endswith(_EXPERTS) in judged):
            elements = held[name]
            share = float((elements == elements.bfloat16()).double().mean())
            most = max(most, share)
            if share > ROUNDED:
                message = f"step-a: {share:.0%} of {len(elements)} elements of the gradient of {name} are bfloat16's"
                details = {"local_name": name, "diagnosis": "added up in bfloat16"}
                findings.append(finding(case, record.rank, "replay", message, **details))
    return outcome(findings, met=f"{most:.0%} of a gradient are numbers of bfloat16, at most {ROUNDED:.0%}")


def _summed(case: Case) -> set[bool]:
    """Whether gradients of several microbatches or replicas are added up: of experts (True), of the rest (False)."""
    rows = topology.replica_rows(case.cell, 0, len(expected(case).tokens_BS))
    groups = topology.groups(case.cell.layout)
    of_rest = len(groups["dp"][0]) * len(groups["cp"][0])
    replicas = {True: len(groups["edp"][0]), False: of_rest}
    return {experts for experts, number in replicas.items() if number * len(rows) > case.cell.rows}


def _digits(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The elements but 0 of each matrix by local name, without the embedding.

    Those of a layer's experts are one entry, and those of all vectors outside of experts another.
    """
    elements: dict[str, list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        name = key.partition(":")[2]
        layer, is_expert, _ = name.partition(f"{_EXPERTS}.")
        if is_expert:
            name = f"{layer}{_EXPERTS}"
        elif gradient.dim() == 1:
            name = _VECTORS
        counts = gradient.dim() == 2 or name == _VECTORS
        if counts and "word_embeddings" not in name and gradient.any():
            elements.setdefault(name, []).append(gradient[gradient != 0])
    return {name: torch.cat(parts).double() for name, parts in elements.items()}
