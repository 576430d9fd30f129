"""Rank entries for cells over the processes of torchrun, and what such a process does when a test starts it itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import toy_targets
from moeref_conformance.contract.api import Cell, Layout, Target, World
from moeref_conformance.worlds import interrupts
from moeref_conformance.worlds.coordinator import Coordinator
from moeref_conformance.worlds.torchrun import TorchrunWorld, take_part

SPEC, ENTRY = "toy_targets:target", "toy_coordinator:dispatch"


def reads(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Says which files it was given and what is in them."""
    given = {name: [path, (Path(path) / "data.txt").read_text()] for name, path in inputs.items()}
    (folder / "given.json").write_text(json.dumps(given))
    (world.workdir / "private").write_text("stays")


def writes(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Rank 1 writes to its inputs."""
    if world.rank == 1:
        file = Path(inputs["hf_config"]) / "data.txt"
        file.chmod(0o644)
        file.write_text("another model")


def waits(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Says where it is, outside its record, and waits to be ended."""
    (Path(os.environ["TOY_PIDS"]) / f"rank{world.rank}").write_text(str(os.getpid()))
    toy_targets.sleeps_for_ever()


def raises_with_a_record(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """Rank 2 writes down what it raises, as the probe does."""
    if world.rank == 2:
        error = {"type": "ValueError", "message": "expert 7 is missing"}
        with (folder / "events.jsonl").open("w") as file:
            file.write(json.dumps({"step": "load", "phase": "raised", "error": error}) + "\n")
        raise ValueError(error["message"])
    dist.all_reduce(torch.ones(1))


def dispatch(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """The entry that the cell's tag names, here or among those of every world."""
    entry = globals().get(cell.tags[0]) or getattr(toy_targets, cell.tags[0])
    entry(target, cell, world, inputs, folder)


def cell(entry: str, ranks: int) -> Cell:
    return Cell(family="toy", layout_name=f"dp{ranks}", layout=Layout(world=ranks), tags=(entry,))


def wait_for_ever(coordinator: Coordinator) -> int:
    """What rank 0's process judges: one cell that does not end by itself."""
    folder = Path(os.environ["TOY_PIDS"])
    (folder / "empty").mkdir()
    inputs = {"hf_config": str(folder / "empty")}
    with TorchrunWorld(coordinator, "gloo", deadline=60, grace=1) as world:
        world.start()
        outcome = world.run(cell("waits", 2), folder / "cell", inputs, toy_targets.Toy.claims)
    print(outcome.error)
    return 1


if __name__ == "__main__":
    from toy_coordinator import SPEC as SPEC_
    from toy_coordinator import wait_for_ever as judge

    with interrupts.raised():
        sys.exit(take_part(SPEC_, judge, ENTRY))
