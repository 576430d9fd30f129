"""Reads what the step `replay` recorded at the experts' door: which experts each token of a phase went to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.findings import Finding
from moeref_conformance.judges import Case
from moeref_conformance.judges.common import finding, known, observed
from moeref_conformance.oracles.sequence import positions

Place = tuple[int, int]  # sample, position
Seen = Mapping[int, Mapping[Place, frozenset[int]]]  # layer -> place -> experts


def replayed(case: Case) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors of the step by rank, read once for all judges."""
    if "replayed" not in case.made:
        records = [record for record in observed(case).ranks if record.has("replay")]
        case.made["replayed"] = {record.rank: record.tensors("replay") for record in records}
    found: dict[int, dict[str, torch.Tensor]] = case.made["replayed"]
    return found


def seen_routes(case: Case, phase: str) -> tuple[dict[int, dict[Place, frozenset[int]]], list[Finding]]:
    """The experts that received each token in `phase`, from all ranks' records.

    Rows that enter a layer on a rank are at the positions that CP and sequence parallelism give it; samples come in
    order, and one that comes again (recomputation, filler of an interleaved schedule) has the same bytes.
    """
    made: dict[str, Any] = case.made.setdefault("seen routes", {})
    if phase not in made:
        made[phase] = _seen_routes(case, _of_phase(case, phase), phase)
    found: tuple[dict[int, dict[Place, frozenset[int]]], list[Finding]] = made[phase]
    return found


def _of_phase(case: Case, phase: str) -> dict[int, dict[tuple[int, int], dict[str, torch.Tensor]]]:
    """rank -> (layer, call) -> what was seen there."""
    found: dict[int, dict[tuple[int, int], dict[str, torch.Tensor]]] = {}
    for rank, tensors in replayed(case).items():
        calls = found.setdefault(rank, {})
        for key, tensor in tensors.items():
            name, *rest = key.split(".")
            if name == phase and len(rest) == 3 and rest[2] in ("in", "sent", "count"):
                calls.setdefault((int(rest[0]), int(rest[1])), {})[rest[2]] = tensor
    return found


def _seen_routes(
    case: Case, per_rank: Mapping[int, Mapping[tuple[int, int], Mapping[str, torch.Tensor]]], phase: str
) -> tuple[dict[int, dict[Place, frozenset[int]]], list[Finding]]:
    layout, (samples, length) = case.cell.layout, known(case).tokens_BS.shape
    found: list[Finding] = []
    who: dict[int, dict[bytes, Place]] = defaultdict(dict)
    for rank, calls in per_rank.items():
        mine = positions(length, layout, topology.coords(layout, rank))
        order: dict[int, dict[bytes, int]] = defaultdict(dict)
        for (layer, _), seen in sorted(calls.items()):
            if "in" not in seen:
                continue
            rows = list(_rows(seen["in"]))
            number = order[layer].setdefault(b"".join(rows), len(order[layer])) % samples
            if len(rows) != len(mine):
                message = f"{phase}: layer {layer} sees {len(rows)} tokens, expected {len(mine)}"
                found.append(finding(case, rank, "replay", message, layer=layer))
                continue
            for row, position in zip(rows, mine, strict=True):
                who[layer][row] = (number, position)
    went: dict[int, dict[Place, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, calls in per_rank.items():
        ep = topology.coords(layout, rank)["ep"]
        for (layer, _), seen in calls.items():
            if "sent" not in seen:
                continue
            counts, rows_of = seen["count"].tolist(), _rows(seen["sent"])
            for local, count in enumerate(counts):
                expert = ep * len(counts) + local
                for _ in range(count):
                    place = who[layer].get(next(rows_of))
                    if place is None:
                        message = f"{phase}: expert {expert} of layer {layer} received a row that no token is"
                        found.append(finding(case, rank, "replay", message, layer=layer, expert=expert))
                    else:
                        went[layer][place].add(expert)
    frozen = {layer: {place: frozenset(e) for place, e in places.items()} for layer, places in went.items()}
    return frozen, found


def _rows(tensor: torch.Tensor) -> Iterator[bytes]:
    """The bytes of each row."""
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    width = len(content) // max(len(tensor), 1)
    return (content[i * width : (i + 1) * width] for i in range(len(tensor)))


__all__ = ["Place", "Seen", "replayed", "seen_routes"]
