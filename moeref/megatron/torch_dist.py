"""Megatron's distributed checkpoint (`torch_dist`) of a model: written by all ranks, and read under any layout.

megatron-core names and places every tensor (`sharded_state_dict`), checks that each element is written once, and reads.
Only the files are written by torch: megatron-core's writer synchronises with a GPU, and has none on a CPU.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_plan

from moeref.bridge import ShardMap, bind
from moeref.bridge.agreement import all_or_none, check_place, device_of
from moeref.families import ExpertFormat
from moeref.megatron.grouped_names import GroupedNames
from moeref.shards.files import SOURCE, part_of, publish, sync, write_json
from moeref.shards.folder import CONFIG, MANIFEST
from moeref.shards.split import Progress

#: The `format` in the folder's moeref.json.
FORMAT = "torch_dist"
#: What a training run's checkpoint also holds; a model has none of it.
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")


class TorchDistError(ValueError):
    """A distributed checkpoint that cannot be written or read; the message names the folder and the tensors."""


class _Planned(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """megatron-core's plan of a checkpoint: what this rank has the main replica of, for torch's writer.

    megatron-core asks for an asynchronous save and gets one that is not begun. Between its own steps a rank that fails
    would leave the others at a barrier.
    """

    def __init__(self) -> None:
        super().__init__(FORMAT, 1)
        self.state: dict[str, Any] = {}
        self.finalize_fns: list[Callable[[], None]] = []

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *_: Any) -> _Planned:
        """Note the tensors and objects that this rank writes."""
        mine: dict[str, list[Any]] = defaultdict(list)
        for one in nested_values(sharded_state_dict):
            if is_main_replica(one.replica_id):
                mine[one.unique_key if isinstance(one, ShardedObject) else one.key].append(one)
        self.state = mcore_to_pyt_state_dict(mine, False)
        return self


class _ReportingPlanner(MCoreSavePlanner):  # type: ignore[misc]
    """Tells `progress` of the bytes of weights that this rank writes."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._progress, self._done, self._total = progress, 0, 0

    def finish_plan(self, new_plan: Any) -> Any:
        """Also know how many bytes there are."""
        written = [one.tensor_data for one in new_plan.items if one.tensor_data is not None]
        self._total = sum(prod(one.chunk.sizes) * one.properties.dtype.itemsize for one in written)
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        """Also tell that this tensor is about to be written."""
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._done += data.nbytes
            self._progress(self._done, self._total)
        return data


def save(
    shard_map: ShardMap,
    rank: int,
    chunks: Sequence[torch.nn.Module],
    target: str | Path,
    config: str | Path,
    *,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the model of all ranks to the new folder `target`, which they share. Returns its path.

    config: the model's `config.json`. progress: called with the bytes of weights that this rank has written, and all
    that it writes. All ranks of the world call this. The folder has its name once every rank has written, and all raise
    if one does. Raises TorchDistError if it exists already, for modules whose names megatron-core cannot place, and for
    what megatron-core refuses; BridgeError as `bind`.
    """
    folder, part = Path(target), part_of(Path(target))
    together = _agreement(shard_map, rank, chunks, folder)
    planned = _Planned()
    with together("nothing was written"):
        bind(shard_map, rank, chunks)
        sharded = _sharded(shard_map, chunks, None)
        if folder.exists():
            raise TorchDistError(f"{folder} exists; remove it, or write elsewhere")
        if (part / SOURCE).exists():
            raise TorchDistError(f"{part} was begun by another conversion; remove it")
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
    with together("the folder is not whole"), _as_ours(folder):
        dist_checkpointing.save(sharded, str(part), planned, async_sharded_save=True)
    with together("the folder is not whole"), _as_ours(folder):
        _write(planned, part, progress)
    with together("the folder is not whole"):
        if rank == 0:
            shutil.copyfile(config, part / CONFIG)
            write_json(part / MANIFEST, {"format": FORMAT, "expert_format": shard_map.expert_format})
            sync(part)
            publish(part, folder)
    return folder


def _write(planned: _Planned, part: Path, progress: Progress) -> None:
    """The files, by torch's writer, which raises on all ranks if it fails on one, and megatron-core's note of them."""
    write_plan(planned.state, storage_writer=FileSystemWriter(part), planner=_ReportingPlanner(progress))
    if dist.get_rank() == 0:
        save_config(CheckpointingConfig(planned.backend, planned.version), str(part))


def load(shard_map: ShardMap, rank: int, chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fill the chunks of `rank` from a distributed checkpoint of any layout; vocabulary padding that it lacks is zero.

    All ranks of the world call this, and all raise if one does. Optimizer and random states in it are not read.

    Raises TorchDistError if it is not whole, lacks a tensor of the model, has it in another dtype or shape, or holds
    weights that the model does not; BridgeError as `bind`.
    """
    folder = Path(folder)
    together = _agreement(shard_map, rank, chunks, folder)
    with together("nothing was read"), _as_ours(folder):
        check_folder(folder)
        pairs = bind(shard_map, rank, chunks)
        sharded = _sharded(shard_map, chunks, dist_checkpointing.load_content_metadata(str(folder)))
        _check_held(sharded, dist_checkpointing.load_tensors_metadata(str(folder)), folder)
    with together("the model is loaded in part"), _as_ours(folder):
        for _, tensor in pairs:
            tensor.zero_()
        state, left, _ = dist_checkpointing.load(sharded, str(folder), strict=StrictHandling.RETURN_ALL)
        if unread := sorted(name for name in left if _is_weight(name)):
            raise TorchDistError(f"{folder} holds {len(unread)} that the model does not: {', '.join(unread[:3])}")
        for key, chunk in _keys(chunks):
            chunk.load_state_dict(state[key], strict=False)


def check_folder(folder: Path) -> None:
    """Raise TorchDistError unless `folder` is a distributed checkpoint that is whole."""
    if folder.name.endswith(".part") or not is_torch_dist(folder) or not (folder / ".metadata").is_file():
        raise TorchDistError(f"{folder}: no whole distributed checkpoint: it lacks its metadata, or is still written")


def is_torch_dist(folder: Path) -> bool:
    """Whether megatron-core's own note in `folder` says that it is a distributed checkpoint of this format."""
    try:
        note = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(note, dict) and note.get("sharded_backend") == FORMAT


def expert_format(folder: Path) -> ExpertFormat:
    """The expert format of the Hugging Face checkpoint that `folder` was written from, by moeref's note in it.

    `per_expert` without a note, as in a training run's folder. Raises TorchDistError for a note that does not say it.
    """
    note = folder / MANIFEST
    if not note.is_file():
        return "per_expert"
    try:
        found = json.loads(note.read_text(encoding="utf-8"))["expert_format"]
    except (ValueError, LookupError, TypeError) as error:
        raise TorchDistError(f"{note}: not the note of a conversion ({error!r}); convert again or remove it") from error
    if found not in get_args(ExpertFormat):
        raise TorchDistError(f"{note}: expert_format={found!r} is none of {', '.join(get_args(ExpertFormat))}")
    return cast(ExpertFormat, found)


def _agreement(
    shard_map: ShardMap, rank: int, chunks: Sequence[torch.nn.Module], folder: Path
) -> Callable[[str], AbstractContextManager[None]]:
    check_place(shard_map.layout, rank, None)
    where, device = f"{folder}, rank {rank}", device_of(chunks, None)
    # Padding of the vocabulary may differ from the folder's, but not between ranks.
    return lambda what: all_or_none(
        shard_map.digest, device, None, lambda reason: TorchDistError(f"{where}: {reason}; {what}")
    )


@contextmanager
def _as_ours(folder: Path) -> Iterator[None]:
    """What megatron-core and torch raise, as a TorchDistError. torch's CheckpointException is no Exception."""
    try:
        yield
    except (CheckpointingException, CheckpointException) as error:
        raise TorchDistError(f"{folder}: {error}") from error


def _keys(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, Any]]:
    """The chunks by their key in a state dict of Megatron-LM. Keys in the files do not have it."""
    return [("model" if len(chunks) == 1 else f"model{number}", chunk) for number, chunk in enumerate(chunks)]


def _sharded(shard_map: ShardMap, chunks: Sequence[torch.nn.Module], metadata: Any) -> dict[str, Any]:
    """The chunks as megatron-core shards them, under the names of Transformer Engine's modules."""
    if shard_map.names.norms != "fused" or any(isinstance(m, GroupedNames) for c in chunks for m in c.modules()):
        raise TorchDistError(
            "a distributed checkpoint has the names of Transformer Engine's modules; without them build the model "
            "with norms='fused' and experts='sequential'"
        )
    return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _keys(chunks)}


def _check_held(sharded: dict[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise TorchDistError if the folder lacks a tensor of this rank, or has it in another dtype or shape."""
    for one in _tensors(sharded):
        if one.key not in stored:
            raise TorchDistError(f"{folder} has no {one.key}")
        if stored[one.key].dtype != one.dtype:
            raise TorchDistError(f"{folder}: {one.key} is {stored[one.key].dtype}, the model holds {one.dtype}")
        shape = stored[one.key].global_shape
        if shape != one.global_shape and not one.allow_shape_mismatch:
            raise TorchDistError(f"{folder}: {one.key} is {[*shape]}, the model holds {[*one.global_shape]}")


def _tensors(sharded: dict[str, Any]) -> Iterator[Any]:
    """The sharded tensors, also those into which megatron-core cuts a parameter."""
    for one in nested_values(sharded):
        if isinstance(one, ShardedTensorFactory):
            yield from nested_values(one.build())
        elif isinstance(one, ShardedTensor):
            yield one


def _is_weight(name: str) -> bool:
    return not name.startswith(_NOT_WEIGHTS) and "_extra_state" not in name
