"""A folder of shards: which file holds which shard, the manifest that says that all are there, and reading.

tp2_pp2_ep2_etp1/
  moeref.json                   format, layout, names, files with their sizes; written last
  config.json                   of the Hugging Face checkpoint
  tp0-pp0.safetensors           of each TP and PP rank: all but experts, as `chunk:local name`
  pp0-ep0-etp0.safetensors      of each PP, EP and ETP rank: experts
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from moeref import families
from moeref.bridge import LocalShard, ShardMap, bind
from moeref.bridge.agreement import all_or_none, device_of
from moeref.bridge.shard_map import HFTensor
from moeref.families import SpecNames
from moeref.layout import Layout
from moeref.shards.files import ShardError, begin, part_of, publish, write_file, write_json

MANIFEST = "moeref.json"
FORMAT = 1
CONFIG = "config.json"


def folder_name(layout: Layout) -> str:
    """Such as `tp2_pp2_ep2_etp1`. The layout itself, with virtual stages and uneven ones, is in the manifest."""
    return f"tp{layout.tp}_pp{layout.pp}_ep{layout.ep}_etp{layout.etp}"


@dataclass(frozen=True)
class ShardFile:
    """One file: the first of the ranks that hold its shards, and the shards."""

    name: str
    rank: int
    shards: tuple[LocalShard, ...]

    def described(self) -> list[HFTensor]:
        """Name in the file, shape and dtype of every shard."""
        return [HFTensor(key(shard), shard.shape, shard.param.dtype) for shard in self.shards]


def key(shard: LocalShard) -> str:
    """The name of a shard in its file."""
    return f"{shard.chunk}:{shard.local_name}"


def file_names(layout: Layout, rank: int) -> tuple[str, str]:
    """The files of a rank: of all but experts, and of experts."""
    at = layout.coords(rank)
    return f"tp{at.tp}-pp{at.pp}.safetensors", f"pp{at.pp}-ep{at.ep}-etp{at.etp}.safetensors"


def files(shard_map: ShardMap) -> list[ShardFile]:
    """All files of a model under a layout. Ranks that hold the same shards share them."""
    found: dict[str, ShardFile] = {}
    for rank in range(shard_map.layout.world):
        for name, experts in zip(file_names(shard_map.layout, rank), (False, True), strict=True):
            if name not in found:
                mine = (s for s in shard_map.local_shards(rank) if (s.param.expert is not None) == experts)
                found[name] = ShardFile(name, rank, tuple(mine))
    return [file for file in found.values() if file.shards]


def describe(shard_map: ShardMap) -> dict[str, Any]:
    """What a manifest says besides its files."""
    return {
        "format": FORMAT,
        "family": shard_map.model.family,
        "dtype": shard_map.model.param_dtype,
        "layout": shard_map.layout.text,
        "names": asdict(shard_map.names),
        "expert_format": shard_map.expert_format,
        "divisible_by": shard_map.divisible_by,
        "digest": shard_map.digest,
    }


def finish(part: Path, shard_map: ShardMap, config: Path) -> None:
    """Write the manifest of files that are all there."""
    shutil.copyfile(config, part / CONFIG)
    sizes = {file.name: (part / file.name).stat().st_size for file in files(shard_map)}
    write_json(part / MANIFEST, {**describe(shard_map), "files": sizes})


def _read(manifest: Path) -> dict[str, Any]:
    """The values of a manifest. Raises ShardError for a file that is not one, and for another format."""
    try:
        values = json.loads(manifest.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{manifest}: not a manifest ({error}); convert it again") from error
    found = values.get("format") if isinstance(values, dict) else None
    if found != FORMAT:
        raise ShardError(f"{manifest}: format {found}; this reads {FORMAT}")
    return dict(values)


class ShardFolder:
    """An opened folder of shards. A context manager: files stay memory-mapped until it closes.

    Raises ShardError for a folder that is not whole, of another format, or whose model is read differently now.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}
        self._held: dict[tuple[int, ...], dict[str, LocalShard]] = {}
        manifest = self.folder / MANIFEST
        if self.folder.name.endswith(".part") or not manifest.is_file():
            raise ShardError(f"{self.folder}: no whole folder of shards: it has no {MANIFEST}, or is still written")
        self.manifest = _read(manifest)
        for name, size in self.manifest["files"].items():
            found = (self.folder / name).stat().st_size if (self.folder / name).is_file() else "missing"
            if found != size:
                raise ShardError(f"{self.folder / name}: {found}, the manifest says {size} bytes")
        if self.shard_map.digest != self.manifest["digest"]:
            raise ShardError(f"{self.folder}: written for another table of {self.manifest['family']}; convert it again")

    @cached_property
    def shard_map(self) -> ShardMap:
        """The map that the folder was written by."""
        said = self.manifest
        return ShardMap(
            families.read(self.folder / CONFIG, said["dtype"]),
            Layout.parse(said["layout"]),
            SpecNames(**said["names"]),
            said["expert_format"],
            said["divisible_by"],
        )

    def held(self, rank: int) -> dict[str, LocalShard]:
        """The shards of `rank` by global name. Of a tensor that is in two chunks, the first."""
        at = self.shard_map.position(rank)
        if at not in self._held:
            self._held[at] = {shard.param.name: shard for shard in reversed(self.shard_map.local_shards(rank))}
        return self._held[at]

    def slice(self, rank: int, shard: LocalShard) -> Any:
        """The shard that `rank` holds, of which an index reads a part."""
        name = file_names(self.shard_map.layout, rank)[shard.param.expert is not None]
        if name not in self._open:
            try:
                self._open[name] = self._stack.enter_context(safe_open(self.folder / name, framework="pt"))
            except SafetensorError as error:
                raise ShardError(f"{self.folder / name}: {error}; convert it again") from error
        return self._open[name].get_slice(key(shard))

    def load(self, rank: int, chunks: Sequence[torch.nn.Module], shard_map: ShardMap | None = None) -> None:
        """Fill the chunks of `rank`. Raises ShardError if `shard_map` is not the folder's, BridgeError as `bind`."""
        if shard_map is not None and shard_map.digest != self.shard_map.digest:
            raise ShardError(f"{self.folder} is of {self.manifest['layout']}, the model of {shard_map.layout.text}")
        for shard, tensor in bind(self.shard_map, rank, chunks):
            tensor.copy_(self.slice(rank, shard)[...])

    def __enter__(self) -> ShardFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()


def save(
    shard_map: ShardMap,
    rank: int,
    chunks: Sequence[torch.nn.Module],
    root: str | Path,
    config: str | Path,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the model of all ranks to a new folder below `root`, which they share. Returns its path.

    config: the model's `config.json`. All ranks of `group` call this; each file is written by one. The folder has its
    name once every rank has written, and all raise if one does. Raises ShardError if it exists already.
    """
    target = Path(root) / folder_name(shard_map.layout)
    written: Path = part_of(target)

    def together(what: str) -> Any:
        where = f"{target}, rank {rank}"
        device = device_of(chunks, group)
        return all_or_none(shard_map.digest, device, group, lambda reason: ShardError(f"{where}: {reason}; {what}"))

    with together("nothing was written"):
        pairs = bind(shard_map, rank, chunks)
        if target.exists():
            raise ShardError(f"{target} exists; remove it, or write elsewhere")
        if rank == 0:
            shutil.rmtree(written, ignore_errors=True)  # of a live model nothing can be taken up again
            begin(target, {"live": shard_map.digest})
    with together("the folder is not whole"):
        tensors = {key(shard): tensor for shard, tensor in pairs}
        for file in files(shard_map):
            if file.rank == rank:
                write_file(written / file.name, file.described(), (tensors[key(s)].cpu() for s in file.shards))
    with together("the folder is not whole"):
        if rank == 0:
            finish(written, shard_map, Path(config))
            publish(written, target)
    return target
