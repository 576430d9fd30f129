"""Two targets load one checkpoint in the same cell: do their ranks hold the same shards, hash by hash?

Each target runs in a world of its own; a rank opens the cell, loads, and writes one SHA-256 for each tensor of its
chunks, over dtype, shape and bytes. Nothing is judged against an expected value here, which is what the rules are for.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.plan.known_failures import Known, lookup

HASHES = "hashes.json"
#: (rank, chunk, local name), as text: `3:0:decoder.final_layernorm.weight`.
Hashes = Mapping[str, str]


@dataclass(frozen=True)
class Compared:
    """What two targets hold in one cell. `error` says why a target did not load; then nothing is compared.

    `known` is the reason of the known failure that explains why not every shard is equal.
    """

    cell: str
    equal: int = 0
    unlike: tuple[str, ...] = ()  # held by both, with other bytes, shape or dtype
    apart: tuple[str, ...] = ()  # held by one of them
    error: str = ""
    known: str = ""

    @property
    def fine(self) -> bool:
        """Whether every shard is equal, or a known failure says why not."""
        return self.same or bool(self.known)

    @property
    def same(self) -> bool:
        """Whether every shard of the cell is equal."""
        return bool(self.equal) and not (self.unlike or self.apart or self.error)

    @property
    def text(self) -> str:
        """One line."""
        known = f" (known: {self.known})" if self.known else ""
        if self.error:
            return f"{self.cell}: not compared: {self.error}{known}"
        first = next(iter((*self.unlike, *self.apart)), "")
        tail = f", {len(self.unlike)} differ, {len(self.apart)} held by one only, first {first}" if first else ""
        return f"{self.cell}: {self.equal} shards equal{tail}{known}"


def hash_rank(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """Entry of a rank: load and write the hashes. Raises what the target raises."""
    from moeref_conformance.oracles.placement import plain_local
    from moeref_conformance.steps.probe import held_tensors

    with target.open(cell, world) as session:
        if session.export is None:
            raise TypeError("the target's session has no export")
        session.export.load(Path(inputs["checkpoint"]))
        held = held_tensors(session.export.chunks())
        found = {f"{world.rank}:{chunk}:{plain_local(name)}": digest(tensor) for chunk, name, _, tensor in held}
    (record_dir / HASHES).write_text(json.dumps(found))


def digest(tensor: object) -> str:
    """SHA-256 over dtype, shape and bytes of a torch tensor."""
    import torch

    assert isinstance(tensor, torch.Tensor)
    plain = tensor.detach().cpu().contiguous()
    sum_ = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
    sum_.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()


def compare(cell: str, left: Hashes, right: Hashes) -> Compared:
    """Both sides of one cell."""
    both = left.keys() & right.keys()
    equal = {key for key in both if left[key] == right[key]}
    return Compared(cell, len(equal), tuple(sorted(both - equal)), tuple(sorted(left.keys() ^ right.keys())))


def run(
    left: str, right: str, cells: Iterable[Cell], known: Sequence[Known] = (), deadline: float = 120.0
) -> Iterator[Compared]:
    """Compare in every cell that both targets claim. `known` are failures of either one. Raises BadInput if there is no
    such cell."""
    from moeref_conformance.oracles.checkpoint import expected
    from moeref_conformance.resolve import resolve
    from moeref_conformance.worlds.forked import ForkedWorld

    targets = {spec: resolve(spec) for spec in (left, right)}
    claimed = [
        cell
        for cell in cells
        if cell.backend == "gloo" and all(target.claims.why_not(cell) is None for target in targets.values())
    ]
    if not claimed:
        raise BadInput(f"{left} and {right} claim no cell of the selection in common")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeref-shards-")))
        entry = f"{__name__}:hash_rank"
        worlds = {spec: stack.enter_context(ForkedWorld(spec, deadline=deadline, entry=entry)) for spec in targets}
        for number, cell in enumerate(claimed):
            inputs, sides = expected(cell, folder / "expected").inputs, []
            for side, (spec, world) in enumerate(worlds.items()):
                where = folder / f"{number}-{side}"
                where.mkdir()
                outcome = world.run(cell, where, inputs, targets[spec].claims)
                failed = next((f"{spec}: {e.text}" for e in outcome.exits if e.kind != "ok"), "")
                if error := outcome.error or failed:
                    yield explained(Compared(cell.id, error=error), cell, known)
                    break
                sides.append(_read(where))
            else:
                yield explained(compare(cell.id, *sides), cell, known)


def explained(found: Compared, cell: Cell, known: Sequence[Known]) -> Compared:
    """With the known failure that covers it: of RUN-001 where a target did not load, else of LOD-001."""
    entry = None if found.same else lookup(known, cell, load_rules()["RUN-001" if found.error else "LOD-001"])
    return replace(found, known=entry.reason) if entry else found


def write(file: Path, left: str, right: str, found: Iterable[Compared]) -> None:
    """What was compared, as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    cells = [asdict(compared) for compared in found]
    file.write_text(json.dumps({"left": left, "right": right, "cells": cells}, indent=1) + "\n")


def read(file: Path) -> list[Compared]:
    """What `write` wrote; nothing if the file does not exist."""
    if not file.exists():
        return []
    cells = json.loads(file.read_text())["cells"]
    return [Compared(**{**cell, "unlike": tuple(cell["unlike"]), "apart": tuple(cell["apart"])}) for cell in cells]


def _read(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in sorted(folder.glob(f"rank*/{HASHES}")):
        found |= json.loads(file.read_text())
    return found
