"""Where LoRA's matrices lie under a layout: a `ShardMap` whose Hugging Face tensors are those of PEFT.

The rows of a linear's lora_B lie as the rows of its weight, the columns of its lora_A as the weight's columns. A linear
that holds several Hugging Face tensors (q, k, v) has a lora_A for each, and one lora_B with the rows of all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeref import families
from moeref.bridge.regions import BridgeError, CopyRegion, Shard
from moeref.bridge.shard_map import LayerParams, ShardMap
from moeref.families import HFPattern, Model, ParamMapping, SpecNames
from moeref.families.mapping import Sharding

#: A dimension of lora_A and lora_B, besides those of a `Model`.
RANK = "lora_rank"
#: PEFT's names begin so.
PREFIX = "base_model.model."
_WEIGHT = ".weight"


def linears(model: Model) -> Iterator[ParamMapping]:
    """The weights of the linears in the decoder's layers, without routers and gates of one row.

    Experts that files hold as one tensor have no name of their own and are left out.
    """
    for mapping in families.mappings(model):
        module = mapping.megatron.removesuffix(_WEIGHT).rpartition(".")[2]
        is_linear = module.startswith("linear_") or module in ("in_proj", "out_proj")
        own = all(t.name.endswith(_WEIGHT) and len(t.dims) == 2 for t in mapping.hf)
        here = any(mapping.present(model, layer) for layer in range(model.num_layers))
        if mapping.megatron.endswith(_WEIGHT) and is_linear and own and here:
            yield mapping


def module_of(tensor: HFPattern) -> str:
    """The module of a weight, as PEFT's `target_modules` names it: `q_proj`."""
    return tensor.name.removesuffix(_WEIGHT).rpartition(".")[2]


def modules(model: Model) -> list[str]:
    """All modules of a model that can have adapters."""
    return sorted({module_of(tensor) for mapping in linears(model) for tensor in mapping.hf})


@dataclass(frozen=True)
class AdapterMap(ShardMap):
    """The adapters of rank `r` for the linears whose modules are in `targets`, all in fp32. MTP layers have none.

    Raises BridgeError for a rank below 1, and for a module that no linear of the model is.
    """

    r: int = 0
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, shard_map: ShardMap, r: int, targets: tuple[str, ...]) -> AdapterMap:
        """The map of adapters for the weights of `shard_map`."""
        names = SpecNames(mtp=shard_map.names.mtp)
        given = shard_map.model, shard_map.layout, names, "per_expert", shard_map.divisible_by
        return cls(*given, r=r, targets=targets)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        super().__post_init__()
        family, known = self.model.family, modules(self.model)
        if type(self.r) is not int or self.r < 1:
            raise BridgeError(f"{family}: adapters of rank {self.r!r}: the rank is a whole number from 1")
        wrong = [name for name in self.targets if name not in known]
        if wrong or not self.targets:
            named = f"no linear is named {', '.join(wrong)}" if wrong else "no module is named"
            raise BridgeError(f"{family}: {named}: adapters go to {', '.join(known)}")

    def origin(self, mapping: ParamMapping) -> tuple[ParamMapping, tuple[int, ...]]:
        """The weight that an adapter's matrix is for, and the numbers of its Hugging Face tensors."""
        return self._origins[mapping]

    @functools.cached_property
    def _origins(self) -> dict[ParamMapping, tuple[ParamMapping, tuple[int, ...]]]:
        found: dict[ParamMapping, tuple[ParamMapping, tuple[int, ...]]] = {}
        for weight in linears(self.model):
            asked = tuple(n for n, tensor in enumerate(weight.hf) if module_of(tensor) in self.targets)
            found |= {_lora_a(weight, n): (weight, (n,)) for n in asked}
            if asked:
                found[_lora_b(weight, asked)] = weight, asked
        return found

    @functools.cached_property
    def _mappings(self) -> tuple[ParamMapping, ...]:
        return tuple(self._origins)

    def _layer(self, layer: int | None) -> tuple[LayerParams, ...]:
        return () if layer in self._mtp_layers else super()._layer(layer)

    def _shape(self, tensor: HFPattern) -> tuple[int, ...]:
        return tuple(self.r if dim == RANK else self.model.dims[dim] for dim in tensor.dims)

    def _cut(self, mapping: ParamMapping, part: int, expert: int | None) -> Shard:
        """The columns of the weight's shard for lora_A; the rows of its asked tensors for lora_B."""
        weight, numbers = self._origins[mapping]
        (rows, columns), regions = super()._cut(weight, part, expert)
        every = slice(0, self.r)
        if is_lora_a(mapping):
            (_, hf), (_, own) = regions[0].hf_index, regions[0].shard_index
            return Shard((self.r, columns), (CopyRegion(0, (every, hf), (every, own)),))
        found = (
            CopyRegion(numbers.index(of.tensor), (of.hf_index[0], every), (of.shard_index[0], every))
            for of in regions
            if of.tensor in numbers
        )
        return Shard((rows, self.r), tuple(found))


def is_lora_a(mapping: ParamMapping) -> bool:
    """Whether a matrix of an `AdapterMap` is a lora_A."""
    return mapping.megatron.endswith("lora_A")


def _lora_a(weight: ParamMapping, number: int) -> ParamMapping:
    tensor = weight.hf[number]
    hf = (_named(tensor, "lora_A", (RANK, tensor.dims[1])),)
    return _matrix(weight, f"{module_of(tensor)}.lora_A", hf, "row" if weight.sharding == "row" else "replicate")


def _lora_b(weight: ParamMapping, numbers: tuple[int, ...]) -> ParamMapping:
    hf = tuple(_named(weight.hf[n], "lora_B", (weight.hf[n].dims[0], RANK)) for n in numbers)
    return _matrix(weight, "lora_B", hf, "replicate" if weight.sharding == "row" else weight.sharding)


def _matrix(weight: ParamMapping, name: str, hf: tuple[HFPattern, ...], sharding: Sharding) -> ParamMapping:
    name = f"{weight.megatron.removesuffix(_WEIGHT)}.{name}"
    plain = replace(weight, te_name="", fused=None, alias=None, dtype="float32")
    return replace(plain, megatron=name, hf=hf, sharding=sharding)


def _named(tensor: HFPattern, matrix: str, dims: tuple[str, str]) -> HFPattern:
    return HFPattern(f"{PREFIX}{tensor.name.removesuffix(_WEIGHT)}.{matrix}{_WEIGHT}", dims)
