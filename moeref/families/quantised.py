"""How the files of a model are quantised, as `quantization_config` in its config says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from moeref.families.model import UnmappedModelError

#: Modules of a layer that FP8 files keep as they are: routers and gates, and parts of MTP layers and sparse attention.
_KEPT = re.compile(
    r".*\.(?:gate|router|shared_expert_gate|conv1d|eh_proj|embed_tokens|shared_head\.head|indexer\.weights_proj|\w*norm)"
)
_LINEAR = re.compile(r".*\.(?:\w+_proj(?:_\w+)?|w[123]|indexer\.w\w+)")


def _is_linear(name: str, keeps: Callable[[str], bool], unknown: str, fused: str) -> bool:
    """Whether `name` is the weight of a linear that files quantise. Raises UnmappedModelError, which says `fused` of
    experts in one tensor and `unknown` of other weights of a layer that files are not known to quantise or to keep."""
    module, _, kind = name.rpartition(".")
    if ".layers." not in name or (kind != "weight" and not kind.endswith("_proj")) or keeps(module):
        return False
    if kind != "weight" or not _LINEAR.fullmatch(module):
        raise UnmappedModelError(f"{name}: {unknown if kind == 'weight' else fused}")
    return True


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
        fused = "FP8 files have a tensor and scales of each expert; export them per_expert"
        unknown = "not known as a linear that FP8 files quantise, nor as one that they keep"
        return _is_linear(
            name, self._keeps, f"{unknown}; if it stays as it is, add it to modules_to_not_convert", fused
        )

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


@dataclass(frozen=True)
class INT4Groups:
    """Files whose linears are in INT4 as compressed-tensors packs it, with a scale for each group of a row's columns.

    ignored: modules that stay as they are, by their names, or after `re:` by expressions that their names begin with.
    """

    group: int
    ignored: tuple[str, ...] = ()

    def quantises(self, name: str) -> bool:
        """Whether the files have this tensor in INT4. Raises UnmappedModelError for weights of a layer that are not
        known as linears, nor as what files keep."""
        unknown = "not known as a linear that INT4 files pack, nor as one that they keep"
        return _is_linear(name, self._keeps, unknown, unknown)

    def _keeps(self, module: str) -> bool:
        ignored = (re.match(of[3:], module) if of.startswith("re:") else of == module for of in self.ignored)
        return bool(_KEPT.fullmatch(module)) or any(ignored)


#: What a config has to say of weights, beside the size of a group, and what it may leave out.
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_PLAIN = ("actorder", "block_structure", "dynamic", "scale_dtype", "zp_dtype")


def read_int4_groups(config: Mapping[str, Any]) -> INT4Groups | None:
    """What `quantization_config` says; None if it says anything but INT4 in groups (`pack-quantized`, symmetric, of
    all linears, weights alone), or is not there."""
    given = config.get("quantization_config") or {}
    groups: Any = given.get("config_groups")
    only = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    weights = only.get("weights") if isinstance(only, Mapping) else None
    if not isinstance(only, Mapping) or not isinstance(weights, Mapping):
        return None
    size = weights.get("group_size")
    as_packed = given.get("quant_method") == "compressed-tensors" and given.get("format") == "pack-quantized"
    activations = (only.get("input_activations"), only.get("output_activations"), given.get("kv_cache_scheme"))
    fits = as_packed and only.get("targets") == ["Linear"] and not any(activations)
    if (
        not fits
        or type(size) is not int
        or size < 1
        or any(weights.get(key) != value for key, value in _INT4.items())
        or any(map(weights.get, _PLAIN))
    ):
        return None
    return INT4Groups(size, tuple(map(str, given.get("ignore") or ())))


#: Families whose files may have their experts in MXFP4.
_IN_MXFP4 = ("gpt_oss",)


def file_blocks(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of `Model` that say how files are quantised; empty for files that are not.

    Raises UnmappedModelError for files that are quantised otherwise than in blocks of FP8, groups of INT4 or, of
    gpt-oss, in MXFP4.
    """
    given = config.get("quantization_config")
    if not given:
        return {}
    if (blocks := read_fp8_blocks(config)) is not None:
        return {"fp8_block": blocks.block}
    if (groups := read_int4_groups(config)) is not None:
        return {"int4_group": groups.group}
    if given.get("quant_method") == "mxfp4" and name in _IN_MXFP4:
        return {"mxfp4": True}
    raise UnmappedModelError(
        f"{name}: the checkpoint is quantised ({str(given.get('quant_method'))[:100]}), and only FP8 (e4m3) in blocks, "
        f"INT4 in groups (pack-quantized, symmetric) and MXFP4 of {', '.join(_IN_MXFP4)} are read; turn it into bf16 "
        "first and give that config"
    )
