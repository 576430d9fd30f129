"""The differences between the record of a run and a model that was built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from moeref.bridge import BridgeError, ShardMap, bind
from moeref.config import ConfigError, plain, read_back
from moeref.dispatcher.setup import minor_version
from moeref.megatron import device, groups, te_layers
from moeref.megatron.build import Built, arguments, transformer_config
from moeref.record import Record, installed_core

_DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
    "flex": MoEFlexTokenDispatcher,
}


def differences(record: Record, built: Built) -> tuple[str, ...]:
    """Every difference of this rank's chunks, config, groups and generators from `record`.

    Each starts with the field of the record. Call it right after `build`, before random numbers are drawn.
    """
    checks = (_model, _layout, _settings, _kernels, _names, _dispatcher, _replay, _seeds, _vocabulary, _core)
    return tuple(one for check in checks for one in check(record, built))


def _model(record: Record, built: Built) -> Iterator[str]:
    # `_vocabulary` compares the padded vocabulary, which another field of the record decides.
    expected = arguments(record)
    for number, chunk in enumerate(built.chunks):
        for name, value in expected.items():
            if name != "vocab_size" and getattr(chunk, name, value) != value:
                yield f"model: {name} of chunk {number} is {getattr(chunk, name)!r}, not {value!r}"


def _layout(record: Record, built: Built) -> Iterator[str]:
    for axis, real in {**groups.sizes(), "vpp": len(built.chunks)}.items():
        if real != getattr(record.layout, axis):
            yield f"layout: {axis} is {real}, not {getattr(record.layout, axis)}"


def _settings(record: Record, built: Built) -> Iterator[str]:
    try:
        read_back(record.settings, built.config)
    except ConfigError as error:
        yield from (f"settings: {problem}" for problem in error.problems)
    # Values that are not in the record are compared with a second config made from it.
    kind = device.of(built.chunks).type
    again, _ = transformer_config(record, kind)
    for field in dataclasses.fields(again):
        said, real = (plain(getattr(config, field.name)) for config in (again, built.config))
        if said != real:
            yield f"settings: {field.name} is {real!r}, not {said!r}"


def _kernels(record: Record, built: Built) -> Iterator[str]:
    real = "te" if te_layers.in_use(built.chunks) else "torch"
    if real != record.kernels:
        yield f"kernels: {real}, not {record.kernels}"


def _names(record: Record, built: Built) -> Iterator[str]:
    """Compares names, shapes and dtypes of all parameters and buffers."""
    shard_map = ShardMap(record.model, record.layout, record.names, divisible_by=record.divisible_by)
    try:
        bind(shard_map, torch.distributed.get_rank(), built.chunks)
    except BridgeError as error:
        yield f"names: {error}"


def _dispatcher(record: Record, built: Built) -> Iterator[str]:
    expected = _DISPATCHERS[record.dispatcher.dispatcher]
    for number, layer in _modules(built, MoELayer):
        real = layer.token_dispatcher
        if not isinstance(real, expected):
            yield f"dispatcher: {type(real).__name__} in chunk {number}, not {expected.__name__}"


def _replay(record: Record, built: Built) -> Iterator[str]:
    expected = bool(record.settings["moe_enable_routing_replay"])
    for number, router in _modules(built, TopKRouter):
        if (getattr(router, "router_replay", None) is not None) != expected:
            yield f"replay: a router of chunk {number} is {'not ' if expected else ''}made for replay"
    if record.replay != built.record.replay:
        yield f"replay: {built.record.replay}, not {record.replay}"


def _seeds(record: Record, built: Built) -> Iterator[str]:
    expected = record.seeds.of_rank(record.layout, torch.distributed.get_rank())
    if torch.initial_seed() != expected.default:
        yield f"seeds: torch began at {torch.initial_seed()}, not {expected.default}"
    trackers = set(tensor_parallel.get_cuda_rng_tracker().seeds_)
    if trackers != {expected.default, expected.tp, expected.expert}:
        yield f"seeds: the trackers began at {sorted(trackers)}, not {expected}"


def _vocabulary(record: Record, built: Built) -> Iterator[str]:
    expected = arguments(record)["vocab_size"]
    for number, chunk in enumerate(built.chunks):
        if chunk.vocab_size != expected:
            yield f"divisible_by: chunk {number} has {chunk.vocab_size} padded vocabulary rows, not {expected}"


def _core(record: Record, built: Built) -> Iterator[str]:
    if minor_version(record.core) != minor_version(installed_core()):
        yield f"core: {installed_core()}, not {record.core}"


def _modules(built: Built, kind: Any) -> Iterator[tuple[int, Any]]:
    for number, chunk in enumerate(built.chunks):
        yield from ((number, module) for module in chunk.modules() if isinstance(module, kind))
