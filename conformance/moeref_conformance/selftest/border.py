"""The border of a session: wrappers with which a fault changes what crosses it, one facet at a time.

A fault sees what the kit sees: rows of the names table, tensors of the model's chunks, the stream, plans, routes,
settings. Nothing here depends on how a target works inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, NameRow, Session, TensorMeta, World

Pair = tuple[TensorMeta, "torch.Tensor | None"]
T = TypeVar("T")
Change = Callable[[Session, Cell, World], Any]


class Swapped:
    """`original` with some attributes replaced: a session with other facets, or a facet with other methods."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def facet(session: Session, name: str, **methods: Any) -> Any:
    """`session` with methods of its facet `name` replaced."""
    return Swapped(session, **{name: Swapped(getattr(session, name), **methods)})


def names(session: Session, change: Callable[[Sequence[NameRow], int], Iterable[NameRow]]) -> Any:
    """`session` with every names table passed through `change(rows, rank)`."""
    good = _present(session.names)
    return facet(session, "names", table=lambda rank: list(change(good.table(rank), rank)))


def each_row(change: Callable[[NameRow], NameRow]) -> Change:
    """A fault's `wrap` that changes every row of every names table."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        return names(session, lambda rows, rank: map(change, rows))

    return wrap


def stream(session: Session, change: Callable[[Iterator[Pair]], Iterator[Pair]]) -> Any:
    """`session` with its stream passed through `change`, which keeps no tensor alive longer than it needs."""
    good = _present(session.export)
    return facet(session, "export", stream=lambda: change(good.stream()))


def each(change: Callable[[TensorMeta, torch.Tensor], Pair | None]) -> Change:
    """A fault's `wrap` that changes every tensor of the stream on the writer; None drops it."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            pair = (meta, tensor) if tensor is None else change(meta, tensor)
            del tensor
            if pair is not None:
                yield pair
            del pair

    return lambda session, cell, world: stream(session, rewrite)


def inventory(session: Session) -> dict[tuple[int, str], torch.Tensor]:
    """All parameters and buffers of this rank's chunks by (chunk, local name), without autograd."""
    chunks = _present(session.export).chunks()
    return {
        (number, name): tensor.detach()
        for number, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(remove_duplicate=False), *chunk.named_buffers())
    }


def held(session: Session, world: World) -> list[tuple[NameRow, torch.Tensor]]:
    """The rows of this rank's names table, each with its tensor in the model."""
    tensors = inventory(session)
    return [(row, tensors[row.chunk, row.local]) for row in _present(session.names).table(world.rank)]


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder by name."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def after_load(session: Session, change: Callable[[Path], None]) -> Any:
    """`session` that changes its model by `change(folder)` after each successful load."""
    good = _present(session.export)

    def load(folder: Path) -> None:
        good.load(folder)
        change(folder)

    return facet(session, "export", load=load)


def loaded(value: Callable[[NameRow, dict[str, torch.Tensor], Cell], torch.Tensor | None]) -> Change:
    """A fault's `wrap`: after loading, tensors of the model are overwritten by `value(row, checkpoint, cell)`.

    None leaves a tensor as it is.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        def change(folder: Path) -> None:
            tensors = checkpoint(folder)
            for row, tensor in held(session, world):
                wrong = value(row, tensors, cell)
                if wrong is not None:
                    tensor.copy_(wrong)

        return after_load(session, change)

    return wrap


def both_ways(session: Session, wrong: Callable[[], None], right: Callable[[], None]) -> Any:
    """`session` whose loading and exporting share one mistake, so that a round trip is clean.

    `wrong` turns the model's tensors from what they must be into what the mistake makes of them; `right` undoes it. The
    stream of the good session runs on tensors that are put right for its time.
    """
    good = _present(session.export)

    def load(folder: Path) -> None:
        good.load(folder)
        wrong()

    def streamed() -> Iterator[Pair]:
        right()
        try:
            yield from good.stream()
        finally:
            wrong()

    return facet(session, "export", load=load, stream=streamed)


def loads_by_table(session: Session, world: World) -> Any:
    """`session` whose load goes by its names table, and raises where the table does not fit the model."""
    good = _present(session.export)

    def load(folder: Path) -> None:
        tensors = inventory(session)
        for row in _present(session.names).table(world.rank):
            tensor = tensors.get((row.chunk, row.local))
            if tensor is None:
                raise LookupError(f"chunk {row.chunk} has no {row.local} (global {row.global_name})")
            if tuple(tensor.shape) != row.shape:
                told = f"is {list(tensor.shape)} {tensor.dtype}, the table says {list(row.shape)}"
                raise ValueError(f"chunk {row.chunk} {row.local} {told}")
        good.load(folder)

    return facet(session, "export", load=load)


def joined(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The shards of all ranks of `group`, in their order, joined along `dim`."""
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return torch.cat(shards, dim)


def renumbered(row: NameRow, change: Callable[[str], str]) -> NameRow:
    """`row` with `change` applied to its global name and its Hugging Face names."""
    return replace(row, global_name=change(row.global_name), hf=tuple(map(change, row.hf)))


def _present(found: T | None) -> T:
    if found is None:
        raise TypeError("the session has no such facet")
    return found
