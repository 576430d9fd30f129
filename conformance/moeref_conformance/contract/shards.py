"""Whether two targets hold the same shards in a cell, and the `shards.json` that says so."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class ShardComparison:
    """What two targets hold in one cell. `error` says why a target did not load; then nothing is compared."""

    cell: str
    equal: int = 0
    unlike: tuple[str, ...] = ()  # held by both, with other bytes, shape or dtype
    single: tuple[str, ...] = ()  # held by one of them
    error: str = ""
    known_failure: str = ""  # the reason of the known failure that explains why not all shards are equal

    @property
    def accepted(self) -> bool:
        """Whether all shards are equal, or a known failure explains why not."""
        return self.same or bool(self.known_failure)

    @property
    def same(self) -> bool:
        """Whether all shards of the cell are equal."""
        return bool(self.equal) and not (self.unlike or self.single or self.error)

    @property
    def text(self) -> str:
        """One line."""
        known = f" (known: {self.known_failure})" if self.known_failure else ""
        if self.error:
            return f"{self.cell}: not compared: {self.error}{known}"
        first = next(iter((*self.unlike, *self.single)), "")
        tail = f", {len(self.unlike)} differ, {len(self.single)} held by one only, first {first}" if first else ""
        return f"{self.cell}: {self.equal} shards equal{tail}{known}"


def write(file: Path, left: str, right: str, comparisons: Iterable[ShardComparison]) -> None:
    """Write comparisons of the targets `left` and `right` as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [asdict(comparison) for comparison in comparisons]
    file.write_text(json.dumps({"left": left, "right": right, "cells": cells}, indent=1) + "\n")


def read(file: Path) -> list[ShardComparison]:
    """What `write` wrote; nothing if the file does not exist."""
    if not file.exists():
        return []
    cells = json.loads(file.read_text())["cells"]
    return [
        ShardComparison(**{**cell, "unlike": tuple(cell["unlike"]), "single": tuple(cell["single"])}) for cell in cells
    ]
