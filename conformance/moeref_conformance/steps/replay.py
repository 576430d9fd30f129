"""Steps of the facet `replay`: forwards and training steps under given or recorded routes, watched at the experts.

Between them come forwards that are not replayed, other routes, and routers that have changed, as a run has them. The
forward before all of them is the step `forward`, whose logits are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Export, Forward, Replay, Turn
from moeref_conformance.steps.gradients import batch
from moeref_conformance.steps.observed_routes import watched

Save = Callable[[str, Mapping[str, torch.Tensor]], None]


def run(
    facet: Replay,
    forward: Forward,
    export: Export,
    cell: Cell,
    tokens_file: Path,
    routes_file: str | None,
    save: Save,
) -> dict[str, Any]:
    """All phases of the cell's mode. What was seen is saved as `replay`; the value is what malformed routes met."""
    tokens_BS = load_file(tokens_file)["tokens"]
    routes = read_routes(routes_file) if routes_file else {}
    seen: dict[str, torch.Tensor] = {}
    chunks = list(export.chunks())
    rows = batch(tokens_BS, cell.layout)
    again = rows.shape[0] // tokens_BS.shape[0]
    one_S = tokens_BS[:1]  # an evaluation has another number of microbatches than a step

    def phase(name: str, call: Callable[[], Any]) -> None:
        with watched(chunks, seen, name):
            found = call()
        if isinstance(found, torch.Tensor):
            seen[f"{name}.logits"] = found.detach().cpu().clone()
        elif found is not None:
            seen.update({f"{name}.gradients.{c}:{n}": g.detach().cpu().clone() for (c, n), g in found.items()})

    if cell.replay == "R3":
        a, b = routes["a"], routes["b"]
        phase("replay-a", lambda: facet.replay(tokens_BS, [resumed(a[0], b[0]), *a[1:]]))
        phase("native-between", lambda: forward.logits(one_S))
        phase("step-a", lambda: facet.step(rows, [*a] * again))
        with recomputed(chunks):
            phase("recompute-b", lambda: facet.step(rows, [*b] * again))
        phase("native-after", lambda: forward.logits(one_S))
    else:
        phase("record", lambda: facet.record(rows))
        phase("replay", lambda: facet.replay(rows, None))
        with turned(chunks):
            phase("changed-native", lambda: forward.logits(one_S))
            with recomputed(chunks):
                phase("recompute", lambda: facet.step(rows, None))
            phase("record-changed", lambda: facet.record(rows))
        phase("step-changed", lambda: facet.step(rows, None))
    save("replay", seen)
    if cell.replay == "R2":
        return {"refused": {}}
    return {"refused": {name: _refusal(facet, tokens_BS, wrong) for name, wrong in malformed(routes["a"]).items()}}


def read_routes(file: str) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Route sets by name from a file that the oracle wrote; one array a sample."""
    found: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    for key, tensor in load_file(file).items():
        name, _, number = key.partition(".")
        found.setdefault(name, {})[int(number)] = tensor.numpy()
    return {name: [samples[i] for i in sorted(samples)] for name, samples in found.items()}


def resumed(whole: np.ndarray[Any, Any], recomputed: np.ndarray[Any, Any]) -> list[Turn]:
    """`whole` as of a rollout that was interrupted in the middle: the engine that went on recomputed the rows of two
    tokens that had been sampled before, and chose other experts for them."""
    cut = len(whole) // 2
    later = np.concatenate([recomputed[cut - 2 : cut], whole[cut:]])
    return [Turn(0, whole[:cut]), Turn(cut - 2, later)]


def malformed(routes: Sequence[np.ndarray[Any, Any]]) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Routes that no replay may take, by what is wrong with them."""

    def first(change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        return [change(routes[0].copy()), *routes[1:]]

    def put(value: int) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        def change(idx_TLK: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            idx_TLK[3, -1, 0] = value
            return idx_TLK

        return change

    def twice(idx_TLK: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        idx_TLK[3, -1, 0] = idx_TLK[3, -1, 1]
        return idx_TLK

    return {
        "three rows too few": first(lambda idx_TLK: idx_TLK[:-3]),
        "a layer too few": first(lambda idx_TLK: idx_TLK[:, 1:-1]),
        "an expert that does not exist": first(put(255)),
        "an expert that wraps to one in 8 bits": first(put(256 + _another(routes[0][3, -1]))),
        "an expert twice in a row": first(twice),
        "a sample too few": list(routes[:-1]),
    }


def _another(row_K: np.ndarray[Any, Any]) -> int:
    """The first expert that is not in the row."""
    return next(expert for expert in range(len(row_K) + 1) if expert not in row_K)


def _refusal(facet: Replay, tokens_BS: torch.Tensor, wrong: Sequence[np.ndarray[Any, Any]]) -> str | None:
    try:
        facet.replay(tokens_BS, wrong)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def recomputed(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Every layer's forward is run again in the backward pass; one config serves all chunks."""
    config: Any = chunks[0].config
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    before = [getattr(config, name) for name in names]
    vars(config).update(zip(names, ("full", "uniform", 1), strict=True))
    try:
        yield
    finally:
        vars(config).update(zip(names, before, strict=True))


@contextmanager
def turned(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Routers with the opposite sign, as if trained since: their own choice is another one for every token."""
    layers: list[Any] = [
        m for chunk in chunks for m in chunk.modules() if hasattr(m, "experts") and hasattr(m, "router")
    ]
    routers = [layer.router.weight for layer in layers]
    for weight in routers:
        weight.data.neg_()
    try:
        yield
    finally:
        for weight in routers:
            weight.data.neg_()
