"""The border of a session: wrappers with which a fault changes what crosses it, one facet at a time.

A fault sees what the kit sees: rows of the names table, tensors of the model's chunks, the stream, plans, routes,
settings. Nothing here depends on how a target works inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.contract.hf_files import weight_files

Pair = tuple[TensorMeta, "torch.Tensor | None"]
Tensors = dict[str, torch.Tensor]
Change = Callable[[Any, Cell, World], Any]


class Swapped:
    """`original` with some attributes replaced: a session with other facets, or a facet with other methods."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        self._original = original
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def config_of(world: World) -> dict[str, Any]:
    """The Hugging Face config that a target is given."""
    config: dict[str, Any] = json.loads((world.hf_config / "config.json").read_text())
    return config


def read_as(world: World, change: Callable[[dict[str, Any]], dict[str, Any]]) -> World:
    """A world whose config has other values, which `change` makes of the right ones."""
    folder = world.workdir / "other_config"
    folder.mkdir(exist_ok=True)
    config = config_of(world)
    (folder / "config.json").write_text(json.dumps(config | change(config)))
    return replace(world, hf_config=folder)


def facet(session: Any, name: str, **methods: Any) -> Any:
    """`session` with methods of its facet `name` replaced."""
    return Swapped(session, **{name: Swapped(getattr(session, name), **methods)})


def names(session: Any, change: Callable[[Sequence[NameRow], int], Iterable[NameRow]]) -> Any:
    """`session` with every names table passed through `change(rows, rank)`."""
    good = session.names
    return facet(session, "names", table=lambda rank: list(change(good.table(rank), rank)))


def each_row(change: Callable[[NameRow], NameRow]) -> Change:
    """A fault's `wrap` that changes every row of every names table."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        return names(session, lambda rows, rank: map(change, rows))

    return wrap


def stream(session: Any, change: Callable[[Iterator[Pair]], Iterator[Pair]]) -> Any:
    """`session` with its stream passed through `change`, which must not keep tensors alive."""
    good = session.export
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


def whole_stream(change: Callable[[Tensors], None]) -> Change:
    """A fault's `wrap` that collects the whole stream, lets `change` edit it by name, and then sends it."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        metas, tensors = collected(pairs)
        if tensors:
            change(tensors)
        for meta in metas:
            yield meta, tensors.pop(meta.name, None)

    return lambda session, cell, world: stream(session, rewrite)


def collected(pairs: Iterator[Pair]) -> tuple[list[TensorMeta], Tensors]:
    """All metadata of a stream in order and, on the writer, all tensors by name."""
    metas, tensors = [], {}
    for meta, tensor in pairs:
        metas.append(meta)
        if tensor is not None:
            tensors[meta.name] = tensor
    return metas, tensors


def described(change: Callable[[TensorMeta], TensorMeta | None]) -> Change:
    """A fault's `wrap` that changes the metadata of every tensor in plan and stream, on all ranks; None drops it."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.export

        def streamed() -> Iterator[Pair]:
            for meta, tensor in good.stream():
                told = change(meta)
                if told is not None:
                    yield told, tensor
                del tensor

        def planned() -> list[TensorMeta]:
            return [told for meta in good.plan() if (told := change(meta)) is not None]

        return facet(session, "export", stream=streamed, plan=planned)

    return wrap


def planned(change: Callable[[list[TensorMeta]], list[TensorMeta]]) -> Change:
    """A fault's `wrap` that passes the plan of the export alone through `change`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        return facet(session, "export", plan=lambda: change(list(session.export.plan())))

    return wrap


def each_chunk(change: Callable[[Any], None]) -> Change:
    """A fault's `wrap` that passes every chunk of the built model through `change`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        for chunk in session.export.chunks() if session.export else ():
            change(chunk)
        return session

    return wrap


@contextmanager
def placed(memory: Mapping[torch.nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Parameters have this memory inside the `with` block."""
    before = {parameter: parameter.data for parameter in memory}
    for parameter, data in memory.items():
        parameter.data = data
    try:
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data


def inventory(session: Any) -> dict[tuple[int, str], torch.Tensor]:
    """All parameters and buffers of this rank's chunks by (chunk, local name), without autograd."""
    chunks = session.export.chunks()
    return {
        (number, name): tensor.detach()
        for number, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(remove_duplicate=False), *chunk.named_buffers())
    }


def held(session: Any, world: World) -> list[tuple[NameRow, torch.Tensor]]:
    """The rows of this rank's names table, each with its tensor in the model."""
    tensors = inventory(session)
    return [(row, tensors[row.chunk, row.local]) for row in session.names.table(world.rank)]


def checkpoint(folder: Path) -> Tensors:
    """All tensors of a Hugging Face folder by name."""
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def after_load(session: Any, change: Callable[[Path], None]) -> Any:
    """`session` that changes its model by `change(folder)` after each successful load."""
    good = session.export

    def load(folder: Path) -> None:
        good.load(folder)
        change(folder)

    return facet(session, "export", load=load)


def loaded(value: Callable[[NameRow, Tensors, Cell], torch.Tensor | None]) -> Change:
    """A fault's `wrap`: after loading, tensors of the model are overwritten by `value(row, checkpoint, cell)`.

    None leaves a tensor as it is.
    """

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def change(folder: Path) -> None:
            tensors = checkpoint(folder)
            for row, tensor in held(session, world):
                wrong = value(row, tensors, cell)
                if wrong is not None:
                    tensor.copy_(wrong)

        return after_load(session, change)

    return wrap


def copied(folder: Path, world: World, change: Callable[[Tensors], Tensors]) -> Path:
    """A Hugging Face folder for this rank alone, with the tensors of `folder` passed through `change`."""
    into = world.workdir / "changed_checkpoint"
    into.mkdir(exist_ok=True)
    save_file(change(checkpoint(folder)), into / "model.safetensors")
    return into


def loading(session: Any, world: World, change: Callable[[Tensors], Tensors], of: str = "checkpoint") -> Any:
    """`session` that loads the kit's folder `of` with its tensors passed through `change`, and others as they are."""
    good = session.export
    return facet(
        session, "export", load=lambda folder: good.load(copied(folder, world, change) if folder.name == of else folder)
    )


def both_ways(session: Any, wrong: Callable[[], None], right: Callable[[], None]) -> Any:
    """`session` whose loading and exporting share one mistake, so that a round trip is clean.

    `wrong` applies the mistake to the model's tensors, `right` undoes it. It is undone while the good session streams.
    """
    good = session.export

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


def exchanged(session: Any, world: World, other: Callable[[str], str]) -> Any:
    """`session` whose tensors are loaded and exported with the values of the tensor `other(local name)`.

    `other` is its own inverse.
    """

    def exchange() -> None:
        tensors = {row.local: tensor for row, tensor in held(session, world)}
        before = {local: tensor.clone() for local, tensor in tensors.items()}
        for local, tensor in tensors.items():
            tensor.copy_(before[other(local)])

    return both_ways(session, exchange, exchange)


def rearranged(order: Callable[[NameRow, int, World], torch.Tensor | None], dim: int = 0) -> Change:
    """A fault's `wrap` that loads some tensors in another order along `dim`, and exports them by the same order.

    `order(row, length, world)` is the order of the `length` rows (or columns) of the tensor joined over TP or ETP
    ranks. None leaves a tensor as it is.
    """

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def move(undo: bool) -> None:
            for row, tensor in held(session, world):
                group = _tensor_group(row)
                length = row.shape[dim] * dist.get_world_size(group) if dim < len(row.shape) else 0
                index = order(row, length, world) if length else None
                if index is not None:
                    moved = _joined(tensor, dim, group).index_select(dim, index.argsort() if undo else index)
                    tensor.copy_(moved.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)])

        return both_ways(session, lambda: move(False), lambda: move(True))

    return wrap


def _tensor_group(row: NameRow) -> Any:
    """The ranks that hold the other shards of a tensor."""
    from megatron.core import parallel_state

    if ".experts." in row.local:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _joined(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return torch.cat(shards, dim)


def loads_by_table(session: Any, world: World) -> Any:
    """`session` whose load raises where its names tables do not fit the model or the checkpoint."""
    if session.export is None:  # the static world
        return session
    good = session.export

    def load(folder: Path) -> None:
        rows = session.names.table(world.rank)
        listed: list[set[str]] = [set() for _ in range(world.size)]
        dist.all_gather_object(listed, {name for row in rows for name in row.hf})
        for name in sorted(checkpoint(folder).keys() - set[str]().union(*listed)):
            raise LookupError(f"no rank lists {name}")
        tensors = inventory(session)
        for row in rows:
            _check(row, tensors.get((row.chunk, row.local)))
        good.load(folder)

    return facet(session, "export", load=load)


def _check(row: NameRow, tensor: torch.Tensor | None) -> None:
    """Raise if `tensor` does not match the row of a table."""
    if tensor is None:
        raise LookupError(f"chunk {row.chunk} has no {row.local} (global {row.global_name})")
    if tuple(tensor.shape) != row.shape:
        told = f"is {list(tensor.shape)} {tensor.dtype}, the table says {list(row.shape)}"
        raise ValueError(f"chunk {row.chunk} {row.local} {told}")


def renamed(row: NameRow, change: Callable[[str], str]) -> NameRow:
    """`row` with `change` applied to its global name and its Hugging Face names."""
    return replace(row, global_name=change(row.global_name), hf=tuple(map(change, row.hf)))
