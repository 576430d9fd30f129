"""Compares the shards that the ranks of two targets hold after loading one checkpoint in the same cell.

Each target runs in a separate world. A rank opens the cell, loads, and writes a SHA-256 over dtype, shape and bytes
of each tensor of its chunks. Nothing is compared with an expected value here; the rules do that.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from moeref_conformance.contract.api import Target, World
from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RankExit
from moeref_conformance.contract.facts import Facts
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.contract.shards import ShardComparison
from moeref_conformance.oracles.placement import plain_local
from moeref_conformance.plan import known_failures
from moeref_conformance.plan.known_failures import KnownFailure, lookup
from moeref_conformance.plan.matrix import Matrix
from moeref_conformance.steps.tensors import module_tensors
from moeref_conformance.worlds.forked import ForkedWorld
from moeref_conformance.worlds.inputs import given

HASHES = "hashes.json"
#: Hash by rank, chunk and local name as text, such as `3:0:decoder.final_layernorm.weight`.
Hashes = Mapping[str, str]


def hash_rank(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """Entry of a rank: load and write the hashes. Raises what the target raises."""
    with target.open(cell, world) as session:
        if session.export is None:
            raise TypeError("the target's session has no export")
        session.export.load(Path(inputs["checkpoint"]))
        held = module_tensors(session.export.chunks())
        hashes = {f"{world.rank}:{chunk}:{plain_local(name)}": digest(tensor) for chunk, name, _, tensor in held}
    (record_dir / HASHES).write_text(json.dumps(hashes))


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes of a torch tensor."""
    plain = tensor.detach().cpu().contiguous()
    sha = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}".encode())
    sha.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def compare(cell: str, left: Hashes, right: Hashes) -> ShardComparison:
    """Compare the hashes of two targets in one cell."""
    both = left.keys() & right.keys()
    equal = {key for key in both if left[key] == right[key]}
    return ShardComparison(cell, len(equal), tuple(sorted(both - equal)), tuple(sorted(left.keys() ^ right.keys())))


def run(
    left: str, right: str, matrix: Matrix, cells: Iterable[Cell], deadline: float = 120.0
) -> Iterator[ShardComparison]:
    """Compare two targets in those `cells` of the matrix that both claim. Known failures are those of either.

    Raises BadInput if there is no such cell.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moeref-shards-")))
        entry = f"{__name__}:hash_rank"
        sides = [
            (world, Facts.of(world.start()))
            for spec in dict.fromkeys((left, right))
            for world in [stack.enter_context(ForkedWorld(spec, deadline=deadline, entry=entry))]
        ]
        claimed = [c for c in cells if c.backend == "gloo" and not any(facts.claims.why_not(c) for _, facts in sides)]
        if not claimed:
            raise BadInput(f"{left} and {right} claim no cell of the selection in common")
        files = {known_failures.find(matrix, facts.info.name) for _, facts in sides}
        failures = [known for file in files if file for known in known_failures.load(file, matrix)]
        for number, cell in enumerate(claimed):
            yield explained(_compare_cell(cell, sides, folder, number), cell, failures)


def _compare_cell(cell: Cell, sides: Sequence[tuple[ForkedWorld, Facts]], folder: Path, number: int) -> ShardComparison:
    from moeref_conformance.oracles.checkpoint import expected

    inputs, hashes = expected(cell, folder / "expected").inputs, []
    for side, (world, facts) in enumerate(sides):
        records = folder / f"{number}-{side}"
        records.mkdir()
        with given(inputs) as own:
            outcome = world.run(cell, records, own.paths, facts.claims)
        failed = next((f"{world.target_spec}: {_said(end)}" for end in outcome.exits if end.kind != "ok"), "")
        if error := outcome.error or failed:
            return ShardComparison(cell.id, error=error)
        files = sorted(records.glob(f"rank*/{HASHES}"))
        hashes.append(dict(item for file in files for item in json.loads(file.read_text()).items()))
    return compare(cell.id, *hashes)


def _said(end: RankExit) -> str:
    """How a rank ended, and the last line that it wrote: its exception."""
    return ": ".join([end.text, *end.stderr_tail.strip().splitlines()[-1:]])


def explained(comparison: ShardComparison, cell: Cell, known_failures: Sequence[KnownFailure]) -> ShardComparison:
    """`comparison` with the known failure that covers it: of RUN-001 where a target did not load, else of LOD-001, or
    of EXP-002 where what is held otherwise is right, and is sent otherwise.

    Its pattern has to match the error, or each of the shards.
    """
    rules = ("RUN-001",) if comparison.error else ("LOD-001", "EXP-002")
    texts = [comparison.error] if comparison.error else [*comparison.unlike, *comparison.single]
    entries = [] if comparison.same else [lookup(known_failures, cell, load_rules()[rule]) for rule in rules]
    reasons = [entry.reason for entry in entries if entry and all(map(entry.knows, texts))]
    return replace(comparison, known_failure=reasons[0]) if reasons else comparison
