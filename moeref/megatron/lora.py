"""LoRA on a built model: linears that are asked for compute with W + alpha / r · lora_B · lora_A, and W is frozen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from safetensors.torch import save_file

from moeref.bridge import BridgeError, LocalShard
from moeref.bridge.adapters import AdapterMap, is_lora_a
from moeref.bridge.agreement import all_or_none
from moeref.bridge.loader import bound, load
from moeref.bridge.shard_map import hashed
from moeref.exporter import Plan, Stream, export
from moeref.families import ParamMapping
from moeref.megatron import device
from moeref.megatron.build import Built
from moeref.megatron.grouped_names import GroupedNames
from moeref.megatron.marks import mark_sequence_parallel

#: Where a chunk has its adapters.
ADAPTERS = "adapters"
#: PEFT's file beside the tensors.
CONFIG = "adapter_config.json"


class _Key(NamedTuple):
    """One linear of the model."""

    mapping: ParamMapping
    layer: int | None
    expert: int | None


class _Linear:
    """One rank's part of a linear, whose `forward` it takes over, with its adapters.

    `lora_a` has [r, in] by the number of the Hugging Face tensor; `lora_b` [out, r] has the rows of the weight.
    """

    def __init__(self, module: torch.nn.Module, shard: LocalShard, lora: Lora) -> None:
        self.weight: torch.nn.Parameter = module.weight  # type: ignore[assignment]
        self.lora_a: dict[int, torch.nn.Parameter] = {}
        self.lora_b: torch.nn.Parameter
        self._module, self._shard, self._lora, self._forward = module, shard, lora, module.forward
        object.__setattr__(module, "forward", self.forward)

    def detach(self) -> None:
        """Give the module its own forward back."""
        object.__setattr__(self._module, "forward", self._forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, of the merged weight unless adapters are off."""
        if not self._lora.is_on:
            return self._forward(*args, **kwargs)
        # Found before the parameter of this name. Autograd follows it, also when activations are recomputed.
        vars(self._module)["weight"] = self.merged()
        try:
            return self._forward(*args, **kwargs)
        finally:
            del vars(self._module)["weight"]

    def merged(self) -> torch.Tensor:
        """The weight [out, in] of this rank with its adapters, added in fp32."""
        sharding = self._shard.param.mapping.sharding
        cut_rows, cut_columns = sharding not in ("row", "replicate"), sharding == "row"
        stacked = self._over_parts(torch.cat([*self.lora_a.values()]), cut_rows)
        lora_a = dict(zip(self.lora_a, torch.split(stacked, self.lora_b.shape[1]), strict=True))
        lora_b = self._over_parts(self.lora_b, cut_columns)
        added = [self._rows(lora_b[of.shard_index[0]], lora_a.get(of.tensor)) for of in self._shard.regions]
        # No rows, and a part in the sum of gradients for a rank that holds no row of these tensors.
        added += [lora_b[:0] @ one for one in lora_a.values()]
        return (self.weight + self._lora.scale * torch.cat(added)).to(self.weight.dtype)

    def _rows(self, rows: torch.Tensor, lora_a: torch.Tensor | None) -> torch.Tensor:
        """What is added to rows of the weight: nothing to those of a tensor without adapter."""
        return rows.new_zeros(len(rows), self.weight.shape[1]) if lora_a is None else rows @ lora_a

    def _over_parts(self, matrix: torch.Tensor, other_cut: bool) -> torch.Tensor:
        """`matrix`, its gradient summed over the ranks that share it where the other matrix is cut over them."""
        if not other_cut:
            return matrix
        if self._shard.param.expert is None:
            group = parallel_state.get_tensor_model_parallel_group()
        else:
            group = parallel_state.get_expert_tensor_parallel_group()
        summed: torch.Tensor = copy_to_tensor_model_parallel_region(matrix, group=group)
        return summed


class Lora:
    """Adapters for every linear of the decoder's layers that `modules` names, as of PEFT's LoRA without dropout.

    modules: last parts of Hugging Face names ("q_proj", "down_proj"); those of experts and shared experts too. Routers,
    gates of one row, embedding, head and multi-token prediction layers have none. Each lora_A [r, in] is drawn as PEFT
    draws it, by `seed` and its name, the same in every layout; each lora_B [out, r] is 0. They are fp32 parameters of
    the chunks, below `adapters`, and all other parameters are frozen, so that `gradients` has theirs alone.

    All ranks make it, after weights are loaded or before; to load or to export weights of the base later, use `off`.
    Raises BridgeError for a rank below 1, for a module that no linear of the model is, for Transformer Engine's
    kernels, and for a model that has adapters.
    """

    def __init__(self, built: Built, rank: int, *, r: int, alpha: float, modules: Sequence[str], seed: int = 0) -> None:
        family = built.shard_map.model.family
        if built.record.kernels == "te":
            raise BridgeError(f"{family}: adapters need kernels of plain torch, and the model has Transformer Engine's")
        if any(ADAPTERS in dict(chunk.named_children()) for chunk in built.chunks):
            raise BridgeError(f"{family}, rank {rank}: the model has adapters")
        self.shard_map = AdapterMap.of(built.shard_map, r, tuple(modules))
        self.is_on, self.scale = True, alpha / r
        self._built, self._rank, self._alpha, self._is_merged = built, rank, alpha, False
        self._linears = self._found()
        self._holders = [torch.nn.Module() for _ in built.chunks]
        for shard in self.shard_map.local_shards(rank):
            self._add(shard, seed)
        for chunk, holder in zip(built.chunks, self._holders, strict=True):
            chunk.requires_grad_(False)
            chunk.add_module(ADAPTERS, holder)
            _let_gradients_in(chunk)

    def _found(self) -> dict[_Key, _Linear]:
        """The linears of this rank that get adapters."""
        asked = {self._linear_of(matrix) for matrix in self.shard_map.local_shards(self._rank)}
        modules = {id(module.weight): module for chunk in self._built.chunks for module in _with_weight(chunk)}
        return {
            key: _Linear(modules[id(weight)], shard, self)
            for shard, weight in bound(self._built.shard_map, self._rank, self._built.chunks)
            if (key := _Key(shard.param.mapping, shard.param.layer, shard.param.expert)) in asked
        }

    def _linear_of(self, matrix: LocalShard) -> _Key:
        """The linear that a matrix of an adapter is for."""
        return _Key(self.shard_map.origin(matrix.param.mapping)[0], matrix.param.layer, matrix.param.expert)

    def _add(self, shard: LocalShard, seed: int) -> None:
        """One matrix of this rank."""
        linear, (_, numbers) = self._linears[self._linear_of(shard)], self.shard_map.origin(shard.param.mapping)
        is_a = is_lora_a(shard.param.mapping)
        drawn = _drawn(shard, seed) if is_a else torch.zeros(shard.shape)
        parameter = torch.nn.Parameter(drawn.to(linear.weight.device))
        _mark(parameter, shard, linear.weight, whole=self.shard_map.layout.etp == 1)
        _register(self._holders[shard.chunk], shard.local_name, parameter)
        if is_a:
            linear.lora_a[numbers[0]] = parameter
        else:
            linear.lora_b = parameter

    def stream(self, **options: Any) -> Stream:
        """Full adapters in fp32 under PEFT's names, as `moeref.exporter.export` streams weights.

        Options are those of a `Plan`: `receivers`, `writer`. Raises as `export` does.
        """
        return export(Plan(self.shard_map, **options), self._rank, self._holders)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Without adapters: in the block the model is its base, to ask it, to export it, to load it."""
        was, self.is_on = self.is_on, False
        for chunk in self._built.chunks if was else ():
            delattr(chunk, ADAPTERS)
        try:
            yield
        finally:
            self.is_on = was
            for chunk, holder in zip(self._built.chunks, self._holders, strict=True) if was else ():
                chunk.add_module(ADAPTERS, holder)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """With adapters in the weights: in the block the model is a plain one, to export as any other.

        Afterwards the weights are what they were, bit by bit, from a copy of those that have adapters. Raises
        RuntimeError inside a block of its own.
        """
        if self._is_merged:
            raise RuntimeError("the adapters are merged already")
        with self.off():
            before = [linear.weight.detach().clone() for linear in self._linears.values()]
            self._is_merged = True
            try:
                # One at a time: no more memory than the copy.
                self._fill(linear.merged().detach() for linear in self._linears.values())
                yield
            finally:
                self._fill(before)
                self._is_merged = False

    def _fill(self, weights: Iterable[torch.Tensor]) -> None:
        for linear, weight in zip(self._linears.values(), weights, strict=True):
            linear.weight.data.copy_(weight)

    def detach(self) -> None:
        """Take the adapters off for good: the model is its base, which stays frozen, and may be given others."""
        self.is_on = False
        for linear in self._linears.values():
            linear.detach()
        for chunk in self._built.chunks:
            delattr(chunk, ADAPTERS)

    def save(self, folder: str | Path) -> None:
        """Write the adapters to a folder as PEFT reads them: `adapter_model.safetensors` and `adapter_config.json`.

        All ranks call it, with the same folder; the first one writes, and the others wait. Raises as `export` does, and
        OSError if a file cannot be written, or on other ranks RuntimeError.
        """
        with self.stream() as stream:
            held = {tensor.name: full.clone() for tensor, full in stream if full is not None}
        where = f"{folder}, rank {self._rank}"
        with all_or_none(0, device.of(self._built.chunks), None, lambda reason: RuntimeError(f"{where}: {reason}")):
            if held:
                weights, config = (Path(folder) / name for name in ("adapter_model.safetensors", CONFIG))
                weights.parent.mkdir(parents=True, exist_ok=True)
                config.unlink(missing_ok=True)  # without it the folder is none of adapters, until it is whole
                save_file(held, weights, metadata={"format": "pt"})
                config.write_text(json.dumps(self.config(), indent=2))

    @classmethod
    def saved(cls, built: Built, rank: int, folder: str | Path) -> Lora:
        """The adapters of such a folder, on a model without any.

        All ranks call it, once the folder is whole. Raises OSError where it has no config, ValueError for one that is
        none of LoRA's, and BridgeError as `Lora` and `load` do.
        """
        config = json.loads((Path(folder) / CONFIG).read_text())
        if config.get("peft_type") != "LORA" or not {"r", "lora_alpha", "target_modules"} <= config.keys():
            raise ValueError(f"{folder}: {CONFIG} is none of LoRA's")
        lora = cls(built, rank, r=config["r"], alpha=config["lora_alpha"], modules=config["target_modules"])
        load(lora.shard_map, rank, lora._holders, folder)
        return lora

    def parameters(self) -> dict[tuple[int, str], torch.nn.Parameter]:
        """The matrices of this rank by (chunk, local name), as `gradients` names them."""
        return {
            (number, f"{ADAPTERS}.{name}"): parameter
            for number, holder in enumerate(self._holders)
            for name, parameter in holder.named_parameters()
        }

    def config(self) -> dict[str, Any]:
        """What PEFT reads as `adapter_config.json` beside the streamed tensors."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.shard_map.r,
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.shard_map.targets),
            "bias": "none",
        }


def _with_weight(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a chunk that compute with a `weight`, those behind grouped names too."""
    for module in chunk.modules():
        if isinstance(module, GroupedNames):
            yield from _with_weight(module.sequential)
        elif isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            yield module


def _drawn(shard: LocalShard, seed: int) -> torch.Tensor:
    """This rank's part of a lora_A [r, in], uniform within 1 / √in."""
    (tensor,), (region,) = shard.param.hf, shard.regions
    generator = torch.Generator().manual_seed(hashed(seed, tensor.name))
    limit = tensor.shape[1] ** -0.5
    return torch.empty(tensor.shape).uniform_(-limit, limit, generator=generator)[region.hf_index].clone()


def _mark(parameter: torch.nn.Parameter, shard: LocalShard, weight: torch.Tensor, whole: bool) -> None:
    """The marks of `build` for experts, and those of a weight that is whole on every TP rank.

    whole: no ETP rank has a replica of an expert's parameter.
    """
    expert, sharding = shard.param.expert is not None, shard.param.mapping.sharding
    if expert:
        setattr(parameter, "allreduce", False)  # noqa: B010 -- a mark torch does not know
    mark_sequence_parallel(parameter, getattr(weight, "sequence_parallel", False) and not expert)
    cut = (expert and whole) or sharding != "replicate"
    set_tensor_model_parallel_attributes(parameter, cut, 1 if sharding == "row" else 0, 1)


def _register(holder: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Register a parameter under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(holder.named_children()):
            holder.add_module(part, torch.nn.Module())
        holder = holder.get_submodule(part)
    holder.register_parameter(last, parameter)


def _let_gradients_in(chunk: GPTModel) -> None:
    """Let autograd follow what comes from the frozen embedding.

    Else a first layer whose activations are recomputed has no gradient: megatron-core's checkpoint is a function that
    autograd leaves out where no input needs a gradient.
    """

    def let_in(module: torch.nn.Module, given: Any, hidden_SBH: torch.Tensor) -> torch.Tensor:
        return hidden_SBH.requires_grad_() if torch.is_grad_enabled() else hidden_SBH

    if hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(let_in)
