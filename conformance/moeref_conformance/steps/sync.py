"""Facet `sync`: weight updates of a running inference engine, and what it samples before and after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moeref_conformance.contract.api import Engine, Sampled, Sync, to_plain
from moeref_conformance.steps.facet import Context, Facet, Step, checked_rows

#: Tokens that are sampled after a prompt.
NEW = 6


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a Hugging Face folder, as a trainer sends them."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def prompts(context: Context) -> list[list[int]]:
    """The rows of the kit's tokens."""
    rows: list[list[int]] = load_file(context.input("tokens"))["tokens"].tolist()
    return rows


def ask(engine: Engine, given: Sequence[list[int]]) -> list[dict[str, Any]]:
    """What is sampled after each prompt, with the prompt."""
    return said(given, engine.sample(given, NEW))


def said(given: Sequence[list[int]], sampled: Any) -> list[dict[str, Any]]:
    """Samples as plain values. Raises TypeError or ValueError for an answer of another form."""
    pairs = zip(given, checked_rows(sampled, Sampled), strict=True)
    return [{"prompt": prompt, **to_plain(one)} for prompt, one in pairs]


def round_trip(sync: Sync, context: Context) -> dict[str, Any]:
    """To the second weights and back. After each update a prompt that is new, and one that was there from the start."""
    known, *fresh = prompts(context)
    with sync.open(context.input("checkpoint"), sync.modes()[0]) as engine:
        versions, sampled = (
            [engine.version()],
            {"first": ask(engine, [known, fresh[0]]), "cached": ask(engine, [known])},
        )
        for version, (name, folder) in enumerate((("second", "second"), ("back", "checkpoint")), 1):
            engine.update(tensors(context.input(folder)), version)
            versions.append(engine.version())
            sampled[name] = ask(engine, [fresh[version]])
            sampled[f"{name} known"] = ask(engine, [known])
    return {"versions": versions, "sampled": sampled}


FACET = Facet(name="sync", protocol=Sync, serves=True, steps=(Step(name="sync", ask=round_trip),))
