"""GRPO of an MoE model: Megatron trains, vLLM samples, routes are replayed (R3), weights go back. On a CPU it is tiny.

`python docs/examples/grpo_moe.py --family qwen3_moe --layout tp2` runs two steps with a random model.
glm47_flash_grpo.yaml and launch_glm47_flash.py are the same run of GLM-4.7-Flash on 8 GPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from docs.examples import tiny
from moeref import families, replay
from moeref import vllm as engines
from moeref.layout import Layout
from moeref.vllm import cpu

PROMPTS, GROUP, NEW = 4, 4, 10


@dataclass
class Report:
    """What a step measured."""

    version: int
    reward: float
    with_R3: replay.Mismatch
    without: replay.Mismatch
    p99: tuple[float, float]
    agreement: float
    nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Ranks:
    """The trainer's processes, forked from one that has imported Megatron."""

    def __init__(self, layout: Layout, *arguments: Any) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["docs.examples.grpo_rank"])
        self._calls, self._processes = [], []
        self.control, far = context.Pipe()
        for rank in range(layout.world):
            mine, theirs = context.Pipe()
            given = (rank, (layout, *arguments), theirs, far if rank == 0 else None)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            self._calls.append(mine)
            self._processes.append(process)
        far.close()

    def start(self, name: str, *values: Any) -> None:
        for call in self._calls:
            call.send((name, values))

    def wait(self) -> list[Any]:
        return [call.recv() for call in self._calls]

    def call(self, name: str, *values: Any) -> list[Any]:
        self.start(name, *values)
        return self.wait()

    def close(self) -> None:
        for call in self._calls:
            call.send(None)
        for process in self._processes:
            process.join(60)


def _rank(*arguments: Any) -> None:
    from docs.examples import grpo_rank

    grpo_rank.main(*arguments)


class Loop:
    """The controller: the engine in this process, the trainer in its ranks."""

    def __init__(self, family: str, layout: Layout, dtype: str = "float32", lr: float = 1e-2) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        tiny.write(family, folder / "model", dtype)
        self.layout, self.model = layout, families.read(folder / "model", dtype)
        self.ranks = Ranks(layout, str(folder / "model"), dtype, lr, str(folder / "meet"))
        self._stack.callback(self.ranks.close)
        from vllm import LLM

        size = {"max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20}
        self.llm = LLM(**engines.engine_args(folder / "model", self.model, max_model_len=64, **size))
        self.place, self.version = engines.Place("127.0.0.1", free_port(), 2), 0
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, self.model.vocab, (PROMPTS, 6)).tolist()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def rollout(self) -> list[engines.Sample]:
        from vllm import SamplingParams

        params = SamplingParams(**engines.sampling(NEW, n=GROUP, ignore_eos=True))
        with self.stage("rollout"):
            return engines.generate(self.llm, self.model, self.prompts, params)

    def logprobs(self, samples: list[engines.Sample], replayed: bool) -> tuple[list[Any], list[replay.Routes]]:
        """Of every sample, from the ranks of the last stage; and the trainer's own routes if none are replayed."""
        answers = self.ranks.call("logprobs", samples, replayed)
        found: list[Any] = [None] * len(samples)
        parts: list[dict[int, dict[tuple[int, int], replay.Routes]]] = [{} for _ in samples]
        for rank, (logprobs, routes) in enumerate(answers):
            at = self.layout.coords(rank)
            for number, index in enumerate(range(at.dp, len(samples), self.layout.dp)):
                if logprobs is not None:
                    found[index] = logprobs[number]
                if routes is not None:
                    parts[index].setdefault(at.pp, {})[at.cp, at.tp] = routes[number]
        if replayed:
            return found, []
        whole = [
            replay.merge_layers([replay.gather_ranks(p, [0, len(s.tokens_T)], self.layout) for p in one.values()])
            for one, s in zip(parts, samples, strict=True)
        ]
        return found, whole

    def measure(self, samples: list[engines.Sample]) -> tuple[Report, list[Any]]:
        """Rollout against training, with the engine's routes and with the trainer's own."""
        with self.stage("logprobs"):
            old, _ = self.logprobs(samples, True)
        own, routes = self.logprobs(samples, False)
        engine = np.concatenate([s.logprobs_G for s in samples])
        given, native = np.concatenate(old), np.concatenate(own)
        same = [replay.agreement(s.routes, r).overall for s, r in zip(samples, routes, strict=True)]
        p99 = tuple(float(np.quantile(np.abs(one - engine), 0.99)) for one in (given, native))
        versions = {int(v) for s in samples for v in s.versions_G}
        assert versions == {self.version}, versions
        rewards = [reward(s) for s in samples]
        report = Report(
            self.version,
            float(np.mean(rewards)),
            replay.mismatch(given, engine),
            replay.mismatch(native, engine),
            p99,
            float(np.mean(same)),
        )
        return report, old

    def train(self, samples: list[engines.Sample], old: list[Any]) -> None:
        rewards_PG = np.array([reward(s) for s in samples]).reshape(PROMPTS, GROUP)
        gains = (rewards_PG - rewards_PG.mean(1, keepdims=True)) / (rewards_PG.std(1, keepdims=True) + 1e-6)
        with self.stage("train"):
            self.ranks.call("step", samples, old, gains.reshape(-1).tolist())

    def sync(self) -> int:
        self.version += 1
        with self.stage("sync"):
            self.ranks.start("push", self.version, self.place)
            engines.serve(engines.InProcess(self.llm), self.ranks.control)
            return sum(self.ranks.wait())

    def close(self) -> None:
        self._stack.close()


def reward(sample: engines.Sample) -> float:
    """Synthetic and deterministic: the share of even tokens."""
    return float((sample.tokens_T[sample.prompt :] % 2 == 0).mean())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(loop: Loop, steps: int) -> list[Report]:
    """Steps of GRPO, and a last rollout with the last weights."""
    reports, nbytes = [], 0
    for step in range(steps + 1):
        samples = loop.rollout()
        report, old = loop.measure(samples)
        report.nbytes = nbytes
        reports.append(report)
        if step < steps:
            loop.train(samples, old)
            nbytes = loop.sync()
        report.seconds = dict(loop.seconds)
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="qwen3_moe", choices=sorted(tiny.CONFIGS))
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=2)
    asked = parser.parse_args()
    loop = Loop(asked.family, Layout.parse(asked.layout), asked.dtype)
    for report in run(loop, asked.steps):
        print(report)
    loop.close()


if __name__ == "__main__":
    cpu.prepare()
    main()
