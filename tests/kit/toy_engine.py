"""A target of the facet `sync` without an inference engine: tokens are drawn, and their logprobs are transformers'.

The weights of each version lie in a folder, and the engine's process is one that sleeps. What the kit does with an
engine, and what judges say of it, needs no more.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from moeref_conformance.contract.api import FACETS, Cell, Claims, Info, Sampled, World
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.oracles import sync as oracle
from moeref_conformance.selftest.border import checkpoint
from moeref_conformance.selftest.faults import FAULTS
from safetensors.torch import save_file


@dataclass
class Engine:
    """Serves the Hugging Face folder `weights`. An update with `mode` abort ends the samples that are under way."""

    weights: Path
    mode: str
    scratch: Path
    process: subprocess.Popen[bytes]
    served: int = 0
    updating: threading.Lock = field(default_factory=threading.Lock)
    dice: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError("the process of the engine has ended")

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> list[Sampled]:
        self._check_alive()
        if self.updating.locked():
            raise RuntimeError("an update is under way")
        drawn = self._drawn(prompts, tokens, temperature)
        before = [self._sampled(prompt, row) for prompt, row in zip(prompts, drawn, strict=True)]
        if during is None:
            return before
        during()
        after = [self._sampled(prompt, row) for prompt, row in zip(prompts, drawn, strict=True)]
        return [_joined(*pair, 1 if self.mode == "abort" else tokens) for pair in zip(before, after, strict=True)]

    def _drawn(self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> list[tuple[int, ...]]:
        """Tokens that the model draws after each prompt, of all side by side: shorter prompts begin later."""
        drawn, module, cache = list[torch.Tensor](), oracle.model(self.weights), None
        longest = max(map(len, prompts))
        short = [longest - len(prompt) for prompt in prompts]
        given_BS = torch.tensor([[0] * left + [*prompt] for left, prompt in zip(short, prompts, strict=True)])
        mask_BS = torch.tensor([[0] * left + [1] * (longest - left) for left in short])
        with torch.no_grad():
            while len(drawn) < tokens:
                at_BS = (mask_BS.cumsum(1) - 1).clamp_min(0)[:, -given_BS.shape[1] :]
                asked = {"attention_mask": mask_BS, "position_ids": at_BS, "past_key_values": cache}
                found = module(given_BS, **asked, use_cache=True)
                cache = found.past_key_values
                shares_BV = (found.logits[:, -1] / (temperature or 1e-6)).softmax(-1)
                given_BS = shares_BV.multinomial(1, generator=self.dice)
                drawn.append(given_BS)
                mask_BS = torch.cat([mask_BS, torch.ones_like(given_BS)], 1)
        return [tuple(row) for row in torch.cat(drawn, 1).tolist()]

    def _sampled(self, prompt: Sequence[int], row: tuple[int, ...]) -> Sampled:
        return Sampled(
            tokens=row,
            logprobs=tuple(oracle.logprobs(self.weights, prompt, row).tolist()),
            versions=(self.served,) * len(row),
            routes=tuple(tuple(map(tuple, token)) for token in oracle.routes(self.weights, prompt, row)),
        )

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._check_alive()
        if not self.updating.acquire(blocking=False):
            raise RuntimeError("an update is under way")
        try:
            came = self._received(tensors)
            self._check_alive()
            weights = self._saved(came)
            if version < self.served or (version == self.served and weights != self.weights):
                raise ValueError(f"version {version} is not later than {self.served}, and of other weights")
            self.weights, self.served = weights, version
        finally:
            self.updating.release()

    def _received(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        held, came = checkpoint(self.weights), dict[str, torch.Tensor]()
        for name, tensor in tensors:
            if name in came or name not in held or tensor.shape != held[name].shape:
                raise ValueError(f"{name} {list(tensor.shape)} comes twice, or is none of the model's")
            came[name] = tensor.clone(memory_format=torch.contiguous_format)
        if lost := sorted(held.keys() - came.keys()):
            raise ValueError(f"{len(lost)} tensors did not come, first {lost[0]}")
        return came

    def _saved(self, came: dict[str, torch.Tensor]) -> Path:
        """A folder with these tensors, the same for the same ones: a module is made of each once."""
        digest = hashlib.sha256(b"".join(came[name].numpy().tobytes() for name in sorted(came))).hexdigest()
        folder = self.scratch / digest
        if not folder.exists():
            folder.mkdir()
            shutil.copyfile(self.weights / "config.json", folder / "config.json")
            save_file(came, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def version(self) -> int:
        self._check_alive()
        return self.served

    def pids(self) -> Sequence[int]:
        return [self.process.pid]


def _joined(old: Sampled, new: Sampled, tokens: int) -> Sampled:
    """The first token of `old`, and those of `new` up to so many in all."""
    parts = {name: getattr(old, name)[:1] + getattr(new, name)[1:tokens] for name in ("logprobs", "versions")}
    return Sampled(tokens=old.tokens[:tokens], **parts)


class Restarted(Engine):
    """One whose process is started anew when it was killed, and serves what it served."""

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        try:
            super().update(tensors, version)
        except RuntimeError:
            if self.process.poll() is not None:
                self.process = started()
            raise


class Waiting(Engine):
    """One in which an update waits until the samples that are under way have all their tokens."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> list[Sampled]:
        found = super().sample(prompts, tokens, None, temperature)
        if during:
            during()
        return found


class Ending(Engine):
    """One that an update which fails leaves without the samples that were under way: whoever asked is told."""

    failed = False

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        try:
            super().update(tensors, version)
        except Exception:
            self.failed = True
            raise

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> list[Sampled]:
        self.failed = False
        found = super().sample(prompts, tokens, during, temperature)
        if self.failed:
            raise RuntimeError("an update has failed, and samples have ended")
        return found


class ByModule(Engine):
    """One that puts a module together once another one begins, and refuses what comes later."""

    def _received(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return super()._received(self._in_order(tensors))

    def _in_order(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        begun = list[str]()
        for name, tensor in tensors:
            found = re.match(r"model\.layers\.\d+\.(self_attn|mlp\.experts|mlp\.shared_experts|mlp)\.", name)
            module = found[0] if found else name
            if module in begun[:-1]:
                raise ValueError(f"{name} comes behind a tensor of {begun[-1]}")
            begun += [module] * (begun[-1:] != [module])
            yield name, tensor


#: By the names of designs that are correct, the engine of each.
DESIGNS: dict[str, type[Engine]] = {
    "restarted": Restarted,
    "waiting": Waiting,
    "ending": Ending,
    "by-module": ByModule,
}


def started() -> subprocess.Popen[bytes]:
    """The process of an engine."""
    return subprocess.Popen(["sleep", "600"])


@dataclass
class Sync:
    """Engines, one after the other."""

    scratch: Path
    design: type[Engine] = Engine

    def modes(self) -> Sequence[str]:
        return ("abort", "keep")

    @contextmanager
    def open(self, folder: Path, mode: str) -> Iterator[Engine]:
        engine = self.design(folder, mode, self.scratch, started())
        try:
            yield engine
        finally:
            engine.process.kill()
            engine.process.wait()


class Target:
    """The toy engine, of the design that the cell's tags name, changed by the faults that they name."""

    info = Info(name="toy engine", version="0")
    claims = Claims(
        facets=frozenset({"sync"}),
        families=frozenset({"qwen3_moe", "glm4_moe"}),
        backends=frozenset({ENGINE}),
        engine_routes=True,
    )

    def preload(self) -> None:
        """Import what transformers' models need once, in the parent of all ranks."""
        from transformers import Glm4MoeForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        session: Any = SimpleNamespace(**dict.fromkeys(FACETS))
        named = dict(tag.split(":") for tag in cell.tags)
        session.sync = Sync(world.workdir, DESIGNS.get(named.get("design", ""), Engine))
        for fault in (FAULTS[name] for kind, name in named.items() if kind == "fault"):
            session = fault.wrap(session, cell, world) if fault.wrap else session
        yield session


target = Target()
