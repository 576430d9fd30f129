"""What every rank does with a session: all steps of the claimed facets, each recorded before and after."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import save_file

from moeref_conformance.contract.api import Cell, Session, Target, World, to_plain
from moeref_conformance.contract.records import EVENTS, error_record, event
from moeref_conformance.contract.texts import cut
from moeref_conformance.steps.facet import Context, rank_steps
from moeref_conformance.steps.settings import Settings
from moeref_conformance.steps.tensors import copied

T = TypeVar("T")


class StepRaised(Exception):
    """A step raised; the event is written. The rank's main turns this into exit code 3."""


class Meeting:
    """Where the ranks of a cell wait for each other: the store in which they met, which no target's collective uses."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Taken before the target is opened, which may end the process group.
        self._store = c10d._get_default_store() if world.size > 1 else None

    def wait(self, name: str, said: str = "") -> list[str]:
        """Wait until every rank is here, for ever if one never is: the world's deadline ends it.

        One that refused a step alone would go on to the next, whose collectives free those that wait in this one.

        Returns what each rank says, by rank.
        """
        if self._store is None:
            return [said]
        keys = [f"moeref_conformance/{name}/{rank}" for rank in range(self._world.size)]
        self._store.set(keys[self._world.rank], said)
        while not self._store.check(keys):
            time.sleep(0.005)
        return [self._store.get(key).decode() for key in keys]


class Log:
    """Writes `events.jsonl`. Each line is flushed at once, so that the record of a killed rank shows its last step."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / EVENTS).open("a", encoding="utf-8")

    def write(self, step: str, phase: str, began: float, **more: Any) -> None:
        self._file.write(json.dumps(event(step, phase, began, **more), default=to_plain) + "\n")
        self._file.flush()

    def step(self, name: str, action: Callable[[], T], *, refusal: bool = False, recorded: bool = True) -> T | None:
        """Run one step and return its value, which is written too if it is `recorded`: plain values and data classes.

        An error is recorded. Unless `refusal` it ends the rank with StepRaised; else the step returns None.
        """
        began = time.time()
        self.write(name, "begin", began)
        try:
            value = action()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of a target is an outcome of the step as well
            self.write(name, "raised", began, error=error_record(error))
            if refusal:
                return None
            raise StepRaised(f"step {name}: {type(error).__name__}: {cut(str(error))}") from error
        self.write(name, "ok", began, value=value if recorded else None)
        return value

    def save(self, step: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a step; nothing if there are none."""
        if tensors:
            save_file({k: copied(v) for k, v in tensors.items()}, self.folder / f"{step}.safetensors")


def run_rank(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """Drive one session of `target` through all steps of its claimed facets, writing records to `record_dir`.

    Call it in the rank's process, after torch.distributed is initialised. Raises StepRaised if a step failed.
    `inputs` gives the folders `hf_config`, `checkpoint`, `checkpoint_extra`, `checkpoint_missing` and
    `checkpoint_unlike`, the file `tokens`, and in replay mode R3 the file `routes`.
    """
    log, meeting, settings = Log(record_dir), Meeting(world), Settings()
    opened = ExitStack()
    session = cast(Session, log.step("open", lambda: opened.enter_context(target.open(cell, world)), recorded=False))
    settings.opened()
    context = Context(
        rank=world.rank,
        cell=cell,
        world=world,
        claims=target.claims,
        session=session,
        inputs=inputs,
        save=log.save,
        folder=record_dir,
        gathered=meeting.wait,
    )
    try:
        for facet, step in rank_steps(target.claims, cell):
            take = partial(step.take, facet, context)
            log.step(step.name, partial(settings.around, step.name, take), refusal=step.refusal)
            if step.refusal:
                meeting.wait(step.name)
        log.step("settings", lambda: settings.left)
    except BaseException as error:
        if settings.left:
            log.write("settings", "ok", time.time(), value=settings.left)
        # The outcome is already on record; a second error on the way out must not hide it.
        try:
            opened.__exit__(type(error), error, error.__traceback__)
        except Exception as second:
            log.write("close", "raised", time.time(), error=error_record(second))
        raise
    log.step("close", opened.close)
