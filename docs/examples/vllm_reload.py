"""vLLM's own way to new weights as a target of the kit's facet `sync`: `reload_weights` of a folder.

    .venv/bin/nox -s sync -- --target docs.examples.vllm_reload:target --cell qwen3_moe/one/engine

Around it is what a careful user calls: pause, reload, reset the prefix cache, count the version, resume. On a CPU new
experts stay unpacked, which the first rule about new weights finds and the others need not tell again; `:packed` has
moeref's workaround for it, to see the rest. Each engine is a process, forked from one that has imported vllm.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from moeref_conformance.contract.api import FACETS, Cell, Claims, Info, Sampled, World
from safetensors.torch import save_file

from moeref.vllm import cpu


class Served:
    """The engine, in its process. A version is that which vLLM says that it has when a token comes."""

    def __init__(self, folder: str, mode: str, packed: bool, **more: Any) -> None:
        from vllm import LLM

        self._packed = packed
        size = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
        self._llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **size, **more)
        self._mode = mode
        self._outputs: dict[str, Any] = {}
        self._versions: dict[str, list[int]] = {}
        self._asked = 0

    def version(self) -> int:
        text = self._llm.get_weight_version()
        return 0 if text == "default" else int(text)

    def submit(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> None:
        from vllm import SamplingParams

        given = {"max_tokens": tokens, "temperature": temperature}
        params = SamplingParams(**given, logprobs=0, detokenize=False, ignore_eos=True)
        self._outputs, self._versions = {}, {}
        for prompt in prompts:
            self._asked += 1
            self._versions[str(self._asked)] = []
            self._llm.llm_engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, params)

    def advance(self, tokens: int) -> None:
        while any(len(made) < tokens for made in self._versions.values()):
            version = self.version()
            for output in self._llm.llm_engine.step():
                self._outputs[output.request_id], made = output.outputs[0], self._versions[output.request_id]
                made += [version] * (len(output.outputs[0].token_ids) - len(made))

    def collect(self) -> list[Sampled]:
        self._llm.llm_engine.abort_request([name for name, out in self._outputs.items() if not out.finish_reason])
        found = []
        for name, versions in self._versions.items():
            ids, rows = self._outputs[name].token_ids, self._outputs[name].logprobs
            logprobs = tuple(row[token].logprob for row, token in zip(rows, ids, strict=True))
            found.append(Sampled(tokens=tuple(ids), logprobs=logprobs, versions=tuple(versions)))
        return found

    def reload(self, folder: str, version: int) -> None:
        self._llm.sleep(level=0, mode=self._mode)
        try:
            self.forget_packed()
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self._llm.reset_prefix_cache(reset_running_requests=True)
            self._llm.update_weight_version(str(version))
        finally:
            self._llm.wake_up(tags=["scheduling"])

    def forget_packed(self) -> None:
        """moeref's workaround for the CPU, before an update."""
        if self._packed:
            self._llm.collective_rpc(_forget_packed_experts)


def _forget_packed_experts(worker: Any) -> None:
    cpu.forget_packed_experts(worker.model_runner.model)


def _serve(connection: Connection[Any, Any], kind: type[Served], folder: str, mode: str, packed: bool) -> None:
    served = kind(folder, mode, packed)
    connection.send((None, os.getpid()))
    while (asked := connection.recv()) is not None:
        try:
            connection.send((None, getattr(served, asked[0])(*asked[1:])))
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))
    os._exit(0)


class Engine:
    """The trainer's side."""

    served = Served

    def __init__(self, connection: Connection[Any, Any], checkpoint: Path, mode: str) -> None:
        self._connection, self._mode = connection, mode
        self._pid = self._answer()

    def _answer(self) -> Any:
        error, value = self._connection.recv()
        if error:
            raise RuntimeError(error)
        return value

    def _ask(self, *asked: Any) -> Any:
        try:
            self._connection.send(asked)
            return self._answer()
        except (EOFError, OSError) as error:
            raise RuntimeError("the engine's process has ended") from error

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> Sequence[Sampled]:
        self._ask("submit", prompts, tokens, temperature)
        if during:
            self._ask("advance", 1)
            during()
        if not during or self._mode != "abort":
            self._ask("advance", tokens)
        return list(self._ask("collect"))

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            named = {name: tensor.contiguous() for name, tensor in tensors}
            save_file(named, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self._ask("reload", folder, version)

    def version(self) -> int:
        return int(self._ask("version"))

    def pids(self) -> Sequence[int]:
        return [self._pid]


class Sync:
    """Facet `sync`."""

    def __init__(self, kind: type[Engine], modes: Sequence[str], packed: bool) -> None:
        self._kind, self._modes, self._packed = kind, modes, packed

    def modes(self) -> Sequence[str]:
        return self._modes

    @contextmanager
    def open(self, checkpoint: Path, mode: str) -> Iterator[Engine]:
        mine, theirs = mp.Pipe()
        given = (theirs, self._kind.served, str(checkpoint), mode, self._packed)
        process = mp.get_context("fork").Process(target=_serve, args=given)
        process.start()
        theirs.close()
        try:
            yield self._kind(mine, checkpoint, mode)
        finally:
            process.kill()
            process.join()


class Target:
    """What `--target docs.examples.vllm_reload:target` names. Latent attention is left out: its CPU kernels differ."""

    claims = Claims(
        facets=frozenset({"sync"}), families=frozenset({"qwen3_moe", "glm4_moe"}), backends=frozenset({"engine"})
    )
    name, engine, modes = "vllm-reload", Engine, ("abort", "keep")

    def __init__(self, packed: bool = False) -> None:
        self._packed = packed

    @property
    def info(self) -> Info:
        import vllm

        return Info(name=self.name, version=vllm.__version__)

    def preload(self) -> None:
        """Import vllm once, and not in every engine."""
        cpu.prepare()
        from vllm import LLM  # noqa: F401

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        served = Sync(self.engine, self.modes, self._packed)
        yield SimpleNamespace(**{**dict.fromkeys(FACETS), "sync": served})


target = Target


def packed() -> Target:
    """With moeref's workaround for the CPU's packed experts."""
    return Target(packed=True)
