"""SkyRL's weight sync by deltas as a target of the kit's facet `sync`: its sender, its worker, its end in vLLM.

    .venv/bin/nox -s sync -- --target docs.examples.skyrl_sync:target --cell qwen3_moe/one/engine

What runs is SkyRL's own: `DeltaWeightTransferSender` with its publisher in the trainer's process, in vLLM's worker
`NewInferenceWorkerWrap` and `DeltaWeightTransferEngine`. `Client` stands for its HTTP client, which sends the same
commands to servers. Of its three ways the other two need CUDA: IPC handles, and NCCL.

SkyRL counts versions of deltas; which version a token has is counted by its trainer once the sync has returned, as
here. It pins vllm 0.26, whose wake-up of an FP8 cache it patches: the patch does not fit 0.30, and is left out. vLLM's
defect of packed experts on a CPU is worked around, and torch is kept from synchronising with an accelerator that is
not there.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from moeref_conformance.contract.api import Info

from docs.examples import vllm_reload

#: Packages whose `__init__` imports what a trainer needs, and the sync does not.
PACKAGES = ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.weight_sync")
ROOM = "skyrl.backends.skyrl_train"
PATCH = "patch_hybrid_fp8_kv_wake"
#: Tensors in a chunk.
CHUNK = 16


class Served(vllm_reload.Served):
    """The engine, in its process, as SkyRL starts it."""

    def __init__(self, folder: str, mode: str, packed: bool) -> None:
        torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
        more = {
            "worker_extension_cls": f"{ROOM}.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap",
            "weight_transfer_config": {"backend": "delta"},
        }
        super().__init__(folder, mode, packed, **more)

    def command(self, name: str, *arguments: Any) -> None:
        """What SkyRL's client asks of a server."""
        llm, rpc = self._llm, self._llm.collective_rpc
        commands: dict[str, Callable[..., Any]] = {
            "init_weight_transfer_engine": lambda info: llm.init_weight_transfer_engine({"init_info": info}),
            "fetch_weights": lambda asked: rpc("fetch_weights", kwargs=asked),
            "pause": lambda: llm.sleep(level=0, mode=self._mode),
            "reset_prefix_cache": llm.reset_prefix_cache,
            "start": lambda: (self.forget_packed(), rpc("skyrl_start_weight_update")),
            "update_weights": lambda info: llm.update_weights({"update_info": info}),
            "finish": lambda: rpc("skyrl_finish_weight_update"),
            "resume": lambda: llm.wake_up(tags=["scheduling"]),
            "version": llm.update_weight_version,
        }
        commands[name](*arguments)


class Client:
    """What SkyRL's sender calls of its `RemoteInferenceClient`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    async def fetch_weights(self, **asked: Any) -> None:
        self._ask("command", "fetch_weights", asked)

    async def pause_generation(self) -> None:
        self._ask("command", "pause")

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self._ask("command", "reset_prefix_cache", reset_running_requests)

    async def start_weight_update(self, is_checkpoint_format: bool) -> None:
        self._ask("command", "start")

    async def update_named_weights(self, update_info: dict[str, Any]) -> None:
        self._ask("command", "update_weights", update_info)

    async def finish_weight_update(self) -> None:
        self._ask("command", "finish")

    async def resume_generation(self) -> None:
        self._ask("command", "resume")


def chunks(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
    """As a trainer's extractor makes them."""
    from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk

    pairs = iter(tensors)
    while some := list(itertools.islice(pairs, CHUNK)):
        names, values = [name for name, _ in some], [tensor for _, tensor in some]
        yield WeightChunk(names, [str(one.dtype) for one in values], [list(one.shape) for one in values], values)


class Engine(vllm_reload.Engine):
    """The trainer's side: SkyRL's sender, with folders of its own."""

    served = Served

    def __init__(self, connection: Connection[Any, Any], checkpoint: Path, mode: str) -> None:
        from skyrl.backends.skyrl_train.weight_sync.delta_strategy import DeltaInitInfo, DeltaWeightTransferSender

        super().__init__(connection, checkpoint, mode)
        self._folder = tempfile.TemporaryDirectory()  # removed with this object
        names = ("sync_dir", "local_checkpoint_dir", "publish_staging_dir")
        folders = {name: str(Path(self._folder.name, name)) for name in names}
        # One worker, so that a tensor that comes twice is not taken by two at once.
        given = {"base_model_path": str(checkpoint), "publish_num_workers": 1, **folders}
        info = DeltaInitInfo(override_existing_receiver=True, **given)
        self._ask("command", "init_weight_transfer_engine", info.to_api_payload())
        self._sender = DeltaWeightTransferSender(info, Client(self._ask))

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        asyncio.run(self._sender.send_chunks(chunks(tensors), reset_prefix_cache=True))
        self._ask("command", "version", str(version))


class Target(vllm_reload.Target):
    """What `--target docs.examples.skyrl_sync:target` names. SkyRL pauses in one mode."""

    name, engine, modes = "skyrl", Engine, ("keep",)

    @property
    def info(self) -> Info:
        return Info(name=self.name, version="delta")

    def preload(self) -> None:
        """Import vllm and SkyRL's modules, without the packages around them."""
        if not (found := importlib.util.find_spec("skyrl")) or not found.origin:
            raise ModuleNotFoundError("SkyRL's source is not on the path: `nox -s sync` puts it there", name="skyrl")
        root = Path(found.origin).parents[1]
        for name in PACKAGES:
            sys.modules[name] = module = ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")))]
        patch = sys.modules[f"{ROOM}.patches.vllm.{PATCH}"] = ModuleType(PATCH)
        vars(patch)[PATCH] = lambda: False
        super().preload()
        importlib.import_module(f"{ROOM}.weight_sync.delta_strategy")


def target() -> Target:
    """With moeref's workaround for the CPU's packed experts."""
    return Target(packed=True)
