"""Reading a Hugging Face folder of safetensors: files are opened once, headers checked first, slices read on demand."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moeref.bridge import fp8_blocks, int4_groups, mxfp4_blocks
from moeref.bridge.fp8_blocks import FP8, Block, dequantised
from moeref.bridge.int4_groups import PackedWeight
from moeref.bridge.mxfp4_blocks import BlockedWeight
from moeref.bridge.regions import BridgeError, Index, ranges
from moeref.bridge.shard_map import HFTensor, ShardMap, hf_tensors
from moeref.families.model import Model

_log = logging.getLogger(__name__)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}

#: Not weights: files of Kimi-K2 and Moonlight hold rotary frequencies, which follow from the config.
DERIVED = (".rotary_emb.inv_freq",)
BIAS = ".e_score_correction_bias"
#: Scales of weights that are quantised, such as gpt-oss's (`_scales`).
SCALES = ("_scale_inv", "_scale", "_scales")
_AGAIN = "download or write it again"


class Checkpoint:
    """An opened folder. A context manager: files stay memory-mapped until it closes.

    Raises BridgeError if there is no safetensors file, a file is truncated, corrupt or no regular file, two files hold
    one tensor, the index is not one or names files outside the folder, or the index and the files disagree.

    block: weights in FP8 have a scale for each block of so many rows and columns, and are given as bf16; their scales
    are no tensors then. group: weights in INT4 have a scale for each group of so many columns, and are one tensor in
    bf16 each, not three. mxfp4: weights in MXFP4 are one in bf16, not two. Raises BridgeError where scales do not fit
    their weight.
    """

    def __init__(
        self, folder: str | Path, block: Block | None = None, group: int | None = None, mxfp4: bool = False
    ) -> None:
        self.folder, self._block = Path(folder), block
        self._packed: dict[str, PackedWeight | BlockedWeight] = {}
        self._scales: dict[str, Any] = {}  # of FP8 weights, by the weight's name
        self._stack = ExitStack()
        self._where: dict[str, Any] = {}
        try:
            weight_map = self._weight_map()
            for path in self._files(weight_map):
                self._open(path)
            if weight_map is not None:
                self._compare(weight_map)
            if block is not None:
                self._pair(block)
            if group is not None:
                self._pair_packed(group)
            if mxfp4:
                self._pair_blocked()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_model(cls, folder: str | Path, model: Model) -> Checkpoint:
        """The folder of a model, whose config says how its files are quantised."""
        return cls(folder, model.fp8_block, model.int4_group, model.mxfp4)

    @property
    def _index(self) -> Path:
        return self.folder / "model.safetensors.index.json"

    def _weight_map(self) -> dict[str, str] | None:
        """The file of each tensor as the index says; None without an index."""
        if not os.path.lexists(self._index):
            return None
        _require_regular(self._index)
        try:
            index = json.loads(self._index.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BridgeError(f"{self._index}: not a safetensors index ({error}); {_AGAIN}") from error
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise BridgeError(
                f"{self._index}: not a safetensors index: weight_map must give each tensor a file; {_AGAIN}"
            )
        outside = sorted({file for file in weight_map.values() if Path(file).name != file})
        if outside:
            raise BridgeError(f"{self._index}: {outside[0]!r} is no file of this folder; {_AGAIN}")
        return weight_map

    def _files(self, weight_map: Mapping[str, str] | None) -> list[Path]:
        """Those that the index names: others may be left from an earlier save, or repeat all of them."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise BridgeError(f"{self.folder}: no *.safetensors file; expected a Hugging Face checkpoint folder")
        if weight_map is not None:
            named, there = set(weight_map.values()), [path.name for path in files]
            if absent := sorted(named.difference(there)):
                raise BridgeError(f"{self._index}: names files that are not there: {', '.join(absent)}")
            if left_out := [name for name in there if name not in named]:
                text = "%s: %d files are left out, which the index does not name: %s"
                _log.warning(text, self.folder, len(left_out), _some(left_out))
            files = [path for path in files if path.name in named]
        for path in files:
            _require_regular(path)
        return files

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise BridgeError(f"{path}: not a whole safetensors file ({error}); {_AGAIN}") from error
        for name in handle.keys():  # noqa: SIM118  (a safe_open handle is not a mapping)
            if name in self._where:
                raise BridgeError(f"{path}: tensor {name} is already in another file of {self.folder}")
            self._where[name] = handle.get_slice(name)

    def _compare(self, weight_map: dict[str, str]) -> None:
        lost = sorted(set(weight_map) ^ set(self._where))
        if lost:
            raise BridgeError(f"{self._index}: index and files disagree on {len(lost)} tensors, first {lost[0]}")

    def _pair(self, block: Block) -> None:
        """Give every FP8 weight its scales."""
        for name in [name for name, part in self._where.items() if part.get_dtype() == FP8]:
            scales = self._where.pop(name + fp8_blocks.SCALES, None)
            fp8_blocks.check_scales(name, self._where[name], scales, block)
            self._scales[name] = scales

    def _pair_packed(self, group: int) -> None:
        """Give every INT4 weight its scales and its shape, under the name of the weight."""
        ends = tuple(f".weight{end}" for end in (int4_groups.PACKED, int4_groups.SCALE, int4_groups.SHAPE))
        for name in sorted({name.rpartition("_")[0] for name in self._where if name.endswith(ends)}):
            self._packed[name] = self._where[name] = int4_groups.paired(name, self._where, group)

    def _pair_blocked(self) -> None:
        """Give every MXFP4 weight its scales, under the name of the weight."""
        ends = (mxfp4_blocks.BLOCKS, mxfp4_blocks.SCALES)
        for name in sorted({name.rpartition("_")[0] for name in self._where if name.endswith(ends)}):
            self._packed[name] = self._where[name] = mxfp4_blocks.paired(name, self._where)

    @property
    def names(self) -> set[str]:
        """All tensor names in the folder."""
        return set(self._where)

    def header(self, name: str) -> HFTensor:
        """Shape and dtype from the file's header; no data is read."""
        if name in self._packed:
            return HFTensor(name, self._packed[name].shape, "bfloat16")
        part = self._where[name]
        dtype = "BF16" if name in self._scales else str(part.get_dtype())
        return HFTensor(name, tuple(part.get_shape()), DTYPES.get(dtype, dtype))

    def read(self, name: str, index: Index) -> torch.Tensor:
        """The slice `index` of tensor `name`; the rest of the tensor is not read."""
        if name in self._packed:
            return self._packed[name].read(index)
        if self._block is not None and name in self._scales:
            part, scales = self._where[name], self._scales[name]
            rows, columns = ranges(part.get_shape(), index)
            return dequantised(lambda *of: part[of], lambda *of: scales[of], rows, columns, self._block)
        tensor: torch.Tensor = self._where[name][index]
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of all tensors, by name: what is of one layer comes together, whatever file it is in."""
        names = sorted(self._where, key=_numbered)
        return ((name, self.read(name, tuple(map(slice, self.header(name).shape)))) for name in names)

    def close(self) -> None:
        """Unmap all files."""
        self._where.clear()
        self._scales.clear()
        self._packed.clear()
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _numbered(name: str) -> list[str | int]:
    """A key by which layer 10 comes after layer 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _require_regular(path: Path) -> None:
    """Raise BridgeError for a pipe, which would block the reader for ever, a folder or a broken link."""
    if not path.is_file():
        raise BridgeError(f"{path}: not a regular file; {_AGAIN}")


def check_headers(checkpoint: Checkpoint, shard_map: ShardMap) -> None:
    """Raise BridgeError for a checkpoint whose names, shapes or dtypes differ from those of the map, in its format.

    The error names the first few tensors of each kind of difference and what to do. Tensors with a prefix in the
    model's `ignored` and DERIVED ones are allowed, and so is bf16 where the family's table keeps fp32, of which every
    bf16 number is one; a warning counts each.
    """
    model, family = shard_map.model, shard_map.model.family
    expected = {t.name: t for t in hf_tensors(shard_map)}
    kept = {t.name for p in shard_map.global_params if p.mapping.dtype == "float32" for t in p.hf}
    missing, extra = sorted(expected.keys() - checkpoint.names), sorted(checkpoint.names - expected.keys())
    left_out = [name for name in extra if name.startswith(model.ignored) or name.endswith(DERIVED)]
    extra = [name for name in extra if name not in set(left_out)]
    if left_out:
        _log.warning("%s: %d tensors are left out, as the family says: %s", family, len(left_out), _some(left_out))
    problems: list[str] = []
    scales = [name for name in extra if name.endswith(SCALES)]
    if scales:
        extra = [name for name in extra if not name.endswith(SCALES)]
        held = f"it has {len(scales)} tensors of scales: {_some(scales)}"
        problems.append(f"the checkpoint is quantised, {held}; turn it into bf16 first")
    if missing:
        problems.append(f"{len(missing)} tensors of the model are missing: {_some(missing)}")
    if extra:
        near = difflib.get_close_matches(extra[0], missing, n=1, cutoff=0.8)
        hint = f" (is {extra[0]} meant to be {near[0]}?)" if near else ""
        problems.append(f"{len(extra)} tensors belong to no row of the table: {_some(extra)}{hint}")
    both = expected.keys() & checkpoint.names
    widened = [name for name in both & kept if checkpoint.header(name).dtype == "bfloat16"]
    problems += filter(None, (_differs(checkpoint, expected[name], name in widened) for name in both))
    if widened:
        kind = "router biases" if all(name.endswith(BIAS) for name in widened) else "tensors"
        _log.warning("%s: %d %s are bfloat16 in the file and become float32", family, len(widened), kind)
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        what = f"checkpoint {checkpoint.folder.name} does not fit the model ({shard_map.layout.text})"
        raise BridgeError(f"{family}: {what}: {shown}")


def _differs(checkpoint: Checkpoint, tensor: HFTensor, widened: bool) -> str:
    """How the tensor of the checkpoint differs from the model's; "" if not, or only in a dtype that is `widened`."""
    found = checkpoint.header(tensor.name)
    if found.shape != tensor.shape:
        turned = " (its last two dimensions are swapped)" if found.shape == _turned(tensor.shape) else ""
        return f"{tensor.name} has shape {list(found.shape)}, the config says {list(tensor.shape)}{turned}"
    if found.dtype != tensor.dtype and not widened:
        return f"{tensor.name} is {found.dtype}, the model holds {tensor.dtype}"
    return ""


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", … ({len(names) - 3} more)" if len(names) > 3 else "")
