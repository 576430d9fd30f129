"""What runs in vLLM's workers: the transfer engine that takes buckets from the wire, and the extension around it.

`Extension` is named by `worker_extension_cls`; importing this module registers the transfer engine under BACKEND. A
bucket is checked by `sync.Intake` before it touches the weights, in every worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from moeref.sync import Bucket, Intake, SyncError, Update
from moeref.vllm import cpu
from moeref.vllm.wire import Described, Place, Wire

#: The name in `weight_transfer_config`.
BACKEND = "moeref"


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the wire's group meets; the worker of index 0 is its rank `first`."""

    place: tuple[Any, ...]
    first: int = 1


@dataclass
class Announced(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A bucket that comes over the wire."""

    index: int
    tensors: list[Described]
    last: bool
    checksum: str


class Transfer(WeightTransferEngine[Meeting, Announced]):  # type: ignore[misc]
    """Buckets from a wire, in checkpoint format, into a model that is loaded layer by layer."""

    init_info_cls, update_info_cls = Meeting, Announced
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.intake = Intake()
        self._wire: Wire | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._wire = Wire(Place(*init_info.place), init_info.first + int(self.parallel_config.rank))

    def start_weight_update(self) -> None:
        if self.intake.update is None:
            raise SyncError("start_weight_update came without moeref_begin, which says what the update is")
        if self.device.type == "cpu":
            cpu.forget_packed_experts(self.model)
        for layer in self.model.modules():
            # An update that broke off left tensors behind; vLLM would load them among those of this one.
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Announced) -> None:
        if self._wire is None:
            raise SyncError("a bucket came before init_weight_transfer_engine, which opens the wire")
        # In memory of their own: layers that are not complete hold tensors until the next buckets.
        tensors = self._wire.receive(update_info.tensors)
        bucket = Bucket(update_info.index, tensors, update_info.last, update_info.checksum)
        self.intake.accept(bucket)
        self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        if self.intake.update is None:
            raise SyncError("finish_weight_update came without an update")
        self.intake.complete(self.intake.update.version)
        if short := incomplete(self.model):
            some = ", ".join(short[:3])
            raise SyncError(f"{len(short)} layers did not get all of their weights: {some}; send every tensor")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._wire = None


def incomplete(model: torch.nn.Module) -> list[str]:
    """The layers that wait for weights of the update; vLLM would keep old ones, or take uninitialised memory."""
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = next(layer.parameters(recurse=False), None)  # without any: the cache of a rotary embedding and the like
        if own is None or not info.can_load() or is_deferred_attention_layer(layer):
            continue
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0  # its padding is in no checkpoint
        if info.load_numel < info.load_numel_total and not padded:
            found.append(name)
    return found


class Extension:
    """Methods that `collective_rpc` calls in every worker. Their values are plain, so that HTTP carries them."""

    weight_transfer_engine: Transfer

    def moeref_begin(self, update: dict[str, Any], version: int) -> None:
        """Expect the buckets of an update of an engine at `version`."""
        intake = self.weight_transfer_engine.intake
        intake.version = version
        intake.begin(Update(**update))
        self._weight_update_active = False  # an update that broke off begins again; vLLM would refuse it

    def moeref_receipt(self) -> dict[str, Any]:
        """What came of the update that is begun."""
        return vars(self.weight_transfer_engine.intake.received).copy()

    def moeref_commit(self, version: int) -> dict[str, Any]:
        """The update is finished."""
        return vars(self.weight_transfer_engine.intake.commit(version)).copy()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
