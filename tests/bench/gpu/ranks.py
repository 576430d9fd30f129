"""Runs a bench in ranks of the kit's forked worlds: `measure` on the parent's side, `main` in every rank.

A rank of its own for each bench means that a kernel that breaks its CUDA context breaks one bench, and that CUDA is
never initialised in the process that runs pytest.
"""

from __future__ import annotations

import importlib
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from moeref_conformance.contract.api import Cell, Claims, Info, Layout, Session, Target, World
from moeref_conformance.worlds.forked import ForkedWorld

from tests.bench.gpu.figures import Figure, plain
from tests.bench.gpu.models import SIZES

#: Modules with a `bench(world, sizes, folder, spoil)`, in the order of the table.
BENCHES = ("grouped", "layers", "recipes", "exchange", "exporting", "replaying", "forward")
SECONDS = 540.0


class Benches:
    """A target that is never opened: the entry below does everything."""

    info = Info(name="benches", version="0")
    claims = Claims(
        facets=frozenset(), families=frozenset({"qwen3_moe"}), backends=frozenset({"gloo", "gloo-cuda", "nccl"})
    )

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        raise NotImplementedError


target = Benches()


def world(backend: str) -> ForkedWorld:
    """A world that runs benches: "gloo" on the CPU, "nccl" with one GPU a rank."""
    return ForkedWorld(f"{__name__}:target", deadline=SECONDS, entry=f"{__name__}:main", backend=backend)


def measure(
    where: ForkedWorld, name: str, folder: Path, *, sizes: str, ranks: int = 1, spoil: bool = False
) -> list[Figure]:
    """Run one bench and answer its figures; `folder` must be new. Raises RuntimeError with the end of stderr."""
    folder.mkdir(parents=True)
    cell = Cell(family="qwen3_moe", layout_name=name, layout=Layout(ep=ranks), backend=where.backend)
    inputs = {"hf_config": str(folder), "sizes": sizes, "spoil": "yes" if spoil else ""}
    outcome = where.run(cell, folder, inputs, target.claims)
    if not outcome.ok:
        first = next((e for e in outcome.exits if e.first), None)
        told = f"{first.text}\n{first.stderr_tail}" if first else ""
        raise RuntimeError(f"bench {name}: {outcome.error or told}")
    found = json.loads((folder / "rank0000" / "figures.json").read_text())
    return [Figure(**row) for row in found]


def main(_: Target, cell: Cell, where: World, inputs: dict[str, str], folder: Path) -> None:
    """What each rank calls: the bench that the layout's name says, with groups for it; the figures go to a file."""
    from moeref import megatron
    from moeref.layout import Layout as Grid

    bench: Any = importlib.import_module(f"tests.bench.gpu.{cell.layout_name}")
    megatron.initialise(Grid.parse(cell.layout.text))
    try:
        found = bench.bench(torch.device(where.device), SIZES[inputs["sizes"]], folder, spoil=bool(inputs["spoil"]))
    finally:
        megatron.shut_down()
    (folder / "figures.json").write_text(json.dumps(plain(found)))
