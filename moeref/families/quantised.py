"""How the files of a model are quantised, as `quantization_config` in its config says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moeref.families.model import UnmappedModelError

#: Modules of a layer that FP8 files keep as they are: routers and gates, and parts of MTP layers and sparse attention.
_KEPT = re.compile(
    r".*\.(?:gate|router|shared_expert_gate|conv1d|eh_proj|embed_tokens|shared_head\.head|indexer\.weights_proj|\w*norm)"
)
_LINEAR = re.compile(r".*\.(?:\w+_proj(?:_\w+)?|w[123]|indexer\.w\w+)")


@dataclass(frozen=True)
class FP8Blocks:
    """Files whose linears are in FP8 (e4m3), with a scale for each block of rows and columns.

    kept: modules that stay as they are, by their names or the ends of them. powers_of_two: of scales (`ue8m0`).
    """

    block: tuple[int, int]
    kept: frozenset[str] = frozenset()
    powers_of_two: bool = False

    def quantises(self, name: str) -> bool:
        """Whether the files have this tensor in FP8. Raises UnmappedModelError for weights of a layer that FP8 files
        are not known to quantise or to keep."""
        module, _, kind = name.rpartition(".")
        if ".layers." not in name or (kind != "weight" and not kind.endswith("_proj")) or self._keeps(module):
            return False
        if kind != "weight":
            raise UnmappedModelError(
                f"{name}: FP8 files have a tensor and scales of each expert; export them per_expert"
            )
        if not _LINEAR.fullmatch(module):
            why = "not known as a linear that FP8 files quantise, nor as one that they keep"
            raise UnmappedModelError(f"{name}: {why}; if it stays as it is, add it to modules_to_not_convert")
        return True

    def _keeps(self, module: str) -> bool:
        parts = module.split(".")
        ends = [*accumulate(parts, "{}.{}".format), *(".".join(parts[first:]) for first in range(1, len(parts)))]
        return bool(_KEPT.fullmatch(module)) or not self.kept.isdisjoint(ends)


def read_fp8_blocks(config: Mapping[str, Any]) -> FP8Blocks | None:
    """What `quantization_config` says; None if it says anything but FP8 (e4m3) in blocks, or is not there."""
    given = config.get("quantization_config") or {}
    block: Any = given.get("weight_block_size")
    sizes = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    plain = given.get("fmt", "e4m3") == "e4m3" and given.get("activation_scheme", "dynamic") == "dynamic"
    if given.get("quant_method") != "fp8" or not sizes or not plain:
        return None
    listed = [str(name) for name in given.get("modules_to_not_convert") or given.get("ignored_layers") or ()]
    # Names inside a model with a vision model, of which the text model alone has the rest (transformers#48349).
    of_text = [name.replace("model.language_model.", "model.", 1) for name in listed]
    return FP8Blocks((block[0], block[1]), frozenset(listed + of_text), given.get("scale_fmt") == "ue8m0")


def fp8_block_size(config: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """(rows, columns) of the blocks of FP8 weights that share a scale; None for files that are not quantised.

    Raises UnmappedModelError for files that are quantised otherwise.
    """
    given = config.get("quantization_config")
    if not given:
        return None
    if (found := read_fp8_blocks(config)) is None:
        raise UnmappedModelError(
            f"{name}: the checkpoint is quantised ({str(given.get('quant_method'))[:100]}), and only FP8 (e4m3) in "
            "blocks is read; turn it into bf16 first and give that config"
        )
    return found.block
