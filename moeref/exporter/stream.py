"""Streaming full Hugging Face tensors out of a sharded model, one at a time, to the ranks that a plan names.

Owners send their shards to the receivers, in the order of the plan, many in one message; no other rank ever holds a
full tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moeref.bridge.agreement import all_or_none, check_place, device_of, failures
from moeref.bridge.loader import bound
from moeref.bridge.shard_map import HFTensor, hashed
from moeref.exporter.peer import Peer
from moeref.exporter.plan import ExportError, Plan
from moeref.exporter.transfer import Stopped, Transfer
from moeref.torch_dtypes import TORCH

T = TypeVar("T")
Item = tuple[HFTensor, torch.Tensor | None]
#: Gives the memory, contiguous and on this device, that a tensor is to be made in.
Place = Callable[[HFTensor, torch.device], torch.Tensor]


def export(
    plan: Plan, rank: int, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup | None = None, version: int = 0
) -> Stream:
    """Yield (tensor's description, full tensor where the plan wants it, else None) for every tensor of it, in order.

    `group` holds the layout's ranks in order (default: the world); all of them must iterate to the end. A yielded
    tensor shares no memory with the model or with a later one. It is on the device of the parameters, except where they
    are offloaded to the host and the group is NCCL's, which cannot send from there: then on the current CUDA device.
    Padded vocabulary rows are left out; a tied head appears once, as the embedding.
    Before anything is sent, raises BridgeError if the chunks hold a tensor that the shard map does not list or if the
    group is not the layout's; ExportError on the other ranks, and on all of them if their plans or the `version` of
    their weights differ.

    Later, a rank that fails ends the export on all ranks, with an ExportError that names it and its tensor; at the end
    of the stream all ranks wait for each other. In a `with export(…) as stream`, an error of the block is such a
    failure, and the other ranks are told what it was.
    """
    return Stream(_Export(Peer(plan, rank, device_of(chunks, group), group), chunks, version))


class Stream(Iterator[Item]):
    """The tensors of an export, and a context manager that lets all ranks know of an error in its block."""

    def __init__(self, export: _Export) -> None:
        self._export = export
        self._items: Generator[Any, None, None] = export.items(export.tensors)

    @property
    def begun(self) -> bool:
        """Whether a tensor was asked for."""
        return inspect.getgeneratorstate(self._items) != inspect.GEN_CREATED

    def made_by(self, make: Callable[[Transfer, Peer, Callable[[str], None]], Iterator[T]]) -> Iterator[T]:
        """What `make` yields, such as buckets, in place of tensors; the ranks agree and fail as they do for tensors.

        `make` gets the shards, this rank, and a function that it calls with the name of each tensor that it begins.

        Raises ExportError if the stream has begun.
        """
        if self.begun:
            raise ExportError("the stream has begun: what is left of it is tensors")
        export = self._export
        self._items = export.items(lambda transfer: make(transfer, export.peer, export.now_at))
        return self._items

    @property
    def plan(self) -> Plan:
        """What is exported, and to which ranks."""
        return self._export.peer.plan

    @property
    def rank(self) -> int:
        """The rank of this process in the layout."""
        return self._export.peer.rank

    @property
    def place(self) -> Place:
        """Where the next tensors are made, by default each in memory of its own."""
        return self._export.place

    @place.setter
    def place(self, place: Place) -> None:
        self._export.place = place

    def __next__(self) -> Item:
        item: Item = next(self._items)
        return item

    def close(self) -> None:
        """End early. The other ranks get an ExportError, unless they do the same."""
        self._items.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self.begun:
            self._export.refuse(error)
        else:
            self._throw(error)

    def _throw(self, error: BaseException) -> None:
        try:
            self._items.throw(error)
        except BaseException as raised:
            if raised is not error:
                raise


class _Export:
    """One rank's part in an export."""

    def __init__(self, peer: Peer, chunks: Sequence[torch.nn.Module], version: int) -> None:
        self.peer, self._chunks, self._version = peer, chunks, version
        self._where = f"{peer.plan.shard_map.model.family}, rank {peer.rank}"
        self._name = "the first tensor"  # what this rank is at
        self.place: Place = _own

    def _together(self) -> AbstractContextManager[None]:
        digest = hashed(self.peer.plan.digest, self._version)
        peer = self.peer
        return all_or_none(
            digest, peer.device, peer.group, lambda why: ExportError(f"{self._where}: {why}; nothing was sent")
        )

    def refuse(self, error: BaseException) -> None:
        """Let the others know that this rank does not begin."""
        with suppress(ExportError), self._together():
            raise ExportError(str(error))

    def _bound(self) -> dict[str, torch.Tensor]:
        plan, rank = self.peer.plan, self.peer.rank
        with self._together():
            check_place(plan.shard_map.layout, rank, self.peer.group)
            pairs = bound(plan.shard_map, rank, self._chunks)
        return {shard.param.name: tensor for shard, tensor in pairs if shard.param.exports}

    def now_at(self, name: str) -> None:
        """Note which tensor this rank is at."""
        self._name = name

    def items(self, made: Callable[[Transfer], Iterator[T]]) -> Generator[T, None, None]:
        """Bind the parameters, stream, and agree with the other ranks on what failed."""
        held = self._bound()
        transfer = Transfer(self.peer, held)
        failed: BaseException | None = None
        try:
            yield from made(transfer)
            transfer.end()
        except BaseException as error:
            failed = error
            with suppress(RuntimeError, ValueError):
                transfer.abort()
        reasons = self._settled(failed)
        if failed and not isinstance(failed, Stopped):
            raise failed
        if reasons:
            raise ExportError(f"{self._where}: {'; '.join(f'rank {rank} {text}' for rank, text in reasons.items())}")

    def _settled(self, failed: BaseException | None) -> dict[int, str]:
        """Why ranks failed, by rank."""
        try:
            return failures(self._reason(failed), self.peer.device, self.peer.group)
        except RuntimeError:
            # A rank is gone. What this one has met before is the better error.
            if failed is None:
                raise
            return {}

    def _reason(self, failed: BaseException | None) -> str:
        if failed is None or isinstance(failed, Stopped):
            return ""
        if isinstance(failed, GeneratorExit):
            last = self._name == self.peer.plan.tensors[-1].name
            return "" if last else f"stopped after {self._name}: its own error says why"
        return f"failed at {self._name}: {type(failed).__name__}: {failed}"

    def tensors(self, transfer: Transfer) -> Generator[Item, None, None]:
        """The tensors of the plan, batch by batch. A fused tensor of experts may be filled over several batches."""
        params = self.peer.plan.params
        full: torch.Tensor | None = None
        for batch in self.peer.plan.batches:
            self._name = params[batch.params.start][1].hf[0].name
            transfer.begin(batch)
            for number in batch.params:
                step, param = params[number]
                is_mine = self.peer.rank in self.peer.plan.to[number]
                for index, tensor in enumerate(step.tensors):
                    self._name = tensor.name
                    if is_mine:
                        full = self._filled(full, index, number, transfer)
                    if param is step.params[-1]:
                        yield tensor, full
                        full = None

    def _filled(self, full: torch.Tensor | None, index: int, number: int, transfer: Transfer) -> torch.Tensor:
        """`full`, or a new tensor, with what the shards of parameter `number` have of its tensor `index`."""
        plan = self.peer.plan
        param = plan.params[number][1]
        if full is None:
            full = self.place(param.hf[index], self.peer.device)
        for part, copy in plan.tensor_copies(number)[index]:
            transfer.source(number, part, param).copy_into(full, 0, (copy,))
        return full


def _own(tensor: HFTensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=TORCH[tensor.dtype], device=device)
