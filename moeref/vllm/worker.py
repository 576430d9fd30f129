"""What runs in vLLM's workers: the transfer engine that takes buckets from the wire, and the worker around it.

`Worker` is named by `worker_cls`; importing this module registers the transfer engine under BACKEND. A bucket is
checked by `sync.Intake` before it touches the weights, in every worker, and the receipt is of what was loaded there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from moeref.provenance import Logprob
from moeref.sync import Bucket, Intake, SyncError, Update
from moeref.vllm import cpu
from moeref.vllm.ledger import Labels, Ledger
from moeref.vllm.older import is_deferred_attention_layer, is_full_attention_spec
from moeref.vllm.wire import Described, Place, Wire

#: The name in `weight_transfer_config`.
BACKEND = "moeref"


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the wire's group meets; the worker of index 0 is its rank `first`. `version`: of its weights now."""

    place: tuple[Any, ...]
    first: int = 1
    version: int | None = None


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
        self.torn: int | None = None  # a version that a sender left unfinished
        self._wire: Wire | None = None
        self._heads: list[torch.nn.Module] | None = None  # tied ones, from before the first update

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self._wire = Wire(Place(*init_info.place), init_info.first + int(self.parallel_config.rank))
        if self.intake.update is not None:  # the sender that began it is gone
            self.torn = self.intake.update.version
            self.intake.forget()
        if init_info.version is not None:
            self.intake.version = init_info.version

    def start_weight_update(self) -> None:
        if self.intake.update is None:
            raise SyncError("start_weight_update came without moeref_begin, which says what the update is")
        if self._heads is None:
            self._heads = tied_heads(self.model)
        if self.device.type == "cpu":
            cpu.forget_packed_experts(self.model)
        for layer in self.model.modules():
            # An update that broke off left tensors behind; vLLM would load them among those of this one.
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        name_loaders(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Announced) -> None:
        if self._wire is None:
            raise SyncError("a bucket came before init_weight_transfer_engine, which opens the wire")
        # In memory of their own: layers that are not complete hold tensors until the next buckets.
        tensors = self._wire.receive(update_info.tensors)
        bucket = Bucket(update_info.index, tensors, update_info.last, update_info.checksum)
        self.intake.accept(bucket)
        with set_current_vllm_config(self.vllm_config):  # before 0.30 vLLM's worker does not
            self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        if (update := self.intake.update) is None:
            raise SyncError("finish_weight_update came without an update")
        self.intake.complete(update.version)
        heads = self._heads or []
        if short := incomplete(self.model, heads):
            some = ", ".join(short[:3])
            raise SyncError(f"{len(short)} layers did not get all of their weights: {some}; send every tensor")
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            cpu.pack_again(heads)
            cpu.keep_fp32_gates(self.model)
        self.intake.commit(update.version)
        self.torn = None

    def shutdown(self) -> None:
        self._wire = None

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """Before 0.30 vLLM's class asks for it; the sender here is `moeref.vllm.Engine`."""
        raise NotImplementedError("moeref.vllm.Engine sends the weights")


def name_loaders(model: torch.nn.Module) -> None:
    """Give partial functions that load weights a name: vLLM's reload asks for it (0.30, norms of MiniMax-M2)."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def tied_heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The heads whose weight is the embedding's: nothing is sent for them."""
    both = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in both if isinstance(layer, ParallelLMHead)]
    return [head for head in heads if any(one.weight is head.weight for one in both if one not in heads)]


def incomplete(model: torch.nn.Module, heads: Sequence[torch.nn.Module] = ()) -> list[str]:
    """The names of layers that lack weights of the update; tied `heads` need none.

    vLLM would keep their old weights, or take uninitialised memory.
    """
    names = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = next(layer.parameters(recurse=False), None)  # without any: the cache of a rotary embedding and the like
        if own is None or not info.can_load() or is_deferred_attention_layer(layer) or layer in heads:
            continue
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0  # its padding is in no checkpoint
        if info.load_numel < info.load_numel_total and not padded:
            names.append(name)
    return names


def _platform() -> type:
    """The class of vLLM's worker on this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return cast(type, CPUWorker)
    from vllm.v1.worker.gpu_worker import Worker as GPUWorker

    return cast(type, GPUWorker)


class Worker(_platform()):  # type: ignore[misc]
    """vLLM's worker with a ledger of its forwards. `collective_rpc` calls the methods with plain values, for HTTP."""

    weight_transfer_engine: Transfer

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        if self.device.type == "cpu":
            cpu.route_in_one_group(self.model_runner.model)
            cpu.keep_fp32_gates(self.model_runner.model)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the ledger. It follows the KV cache's blocks of full attention, if the model has that."""
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        full = next((number for number, spec in enumerate(groups) if is_full_attention_spec(spec)), 0)
        raw = self.model_config.logprobs_mode.startswith("raw")
        kind = Logprob.RAW if raw else Logprob.PROCESSED
        self.ledger = Ledger(kv_cache_config.num_blocks, groups[full].block_size, full, kind)
        super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a forward, recorded with the version that is in the model now."""
        self.ledger.step(scheduler_output, self.weight_transfer_engine.intake.version)
        return super().execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        """As vLLM's, whose level 2 drops the weights."""
        super().sleep(level)
        if level >= 2:
            self.weight_transfer_engine.intake.drop()

    def moeref_begin(self, update: dict[str, Any]) -> None:
        """Expect the buckets of an update."""
        self.weight_transfer_engine.intake.begin(Update(**update))
        self._weight_update_active = False  # an update that broke off begins again; vLLM would refuse it

    def moeref_state(self) -> dict[str, Any]:
        """The version in the model and the receipt of its update; the version of a begun update and what came of it."""
        transfer = self.weight_transfer_engine
        intake, receipt = transfer.intake, transfer.intake.receipt
        return {
            "version": intake.version,
            "receipt": None if receipt is None else asdict(receipt),
            "begun": transfer.torn if intake.update is None else intake.update.version,
            "received": asdict(intake.received),
        }

    def moeref_labels(self, request: str, index: int | None = None) -> Labels:
        """See `Ledger.take`."""
        return self.ledger.take(request, index)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Transfer)
