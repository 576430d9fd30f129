"""One world for the whole test session: it imports torch, megatron-core and moeref once, for tests of many targets.

A test says which target and which rank entry it wants. Both travel in the tags of a cell and are imported in the rank.
Tests that look at the world itself, or change what it imports, start their own.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, Target, World
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.resolve import resolve
from moeref_conformance.targets.moeref import MoerefTarget
from moeref_conformance.worlds.forked import ENTRY, ForkedWorld

#: What many targets of tests import; in the parent of all ranks it is imported once.
PRELOAD = ("moeref_conformance.selftest.faulty", ENTRY.partition(":")[0])


class Anybody(MoerefTarget):
    """Stands for the targets that ranks resolve; nobody opens it."""

    def preload(self) -> None:
        """Import moeref, with all that it uses of megatron-core, and the faults."""
        super().preload()
        for name in PRELOAD:
            importlib.import_module(name)


target = Anybody()


#: Begins a tag that says which facets alone a target is asked for, as in `facets:names+load`.
ONLY = "facets:"


def narrowed(claims: Claims, tags: Iterable[str]) -> Claims:
    """The claims with the facets of the tags alone; all where no tag says which."""
    for tag in tags:
        if tag.startswith(ONLY):
            return replace(claims, facets=claims.facets & set(tag.removeprefix(ONLY).split("+")))
    return claims


def run(target: Target, cell: Cell, world: World, inputs: dict[str, str], folder: Path) -> None:
    """The rank entry: that of the tags, with their target and the rest of the tags."""
    spec, entry, *tags = cell.tags
    one = copy.copy(resolve(spec))
    one.claims = narrowed(one.claims, tags)
    pkgutil.resolve_name(entry)(one, replace(cell, tags=tuple(tags)), world, inputs, folder)


class Shared(ForkedWorld):
    """A world of its own to whoever has it; the processes are those of `world`."""

    def __init__(
        self, world: ForkedWorld, target_spec: str, *, deadline: float = 120.0, grace: float = 3.0, entry: str = ENTRY
    ) -> None:
        super().__init__(target_spec, deadline=deadline, grace=grace, entry=entry)
        self._shared = world

    def start(self) -> dict[str, Any]:
        """As `ForkedWorld.start`."""
        return self._shared.start()

    def run(self, cell: Cell, cell_dir: Path, inputs: dict[str, str], claims: Claims) -> RunOutcome:
        """As `ForkedWorld.run`."""
        world = self._shared
        world.deadline, world.grace, world.staged = self.deadline, self.grace, self.staged
        return world.run(replace(cell, tags=(self.target_spec, self.entry, *cell.tags)), cell_dir, inputs, claims)
