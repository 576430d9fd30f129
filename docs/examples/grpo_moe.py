"""GRPO of an MoE model: Megatron trains, vLLM samples, routes are replayed (R3), weights go back. On a CPU it is tiny.

`nox -s rollout` tests it; `-- --example` runs it as a program, with the arguments below. `--run` takes models, layout
and lengths from a run file, as glm47_flash_grpo.yaml for GLM-4.7-Flash, with `--checkpoint`; the engine takes the GPUs
after the trainer's. That size has not run yet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from docs.examples import tiny
from moeref import families, replay
from moeref import vllm as engines
from moeref.check import RunFile, check_run, read_run_file
from moeref.config import MoEConfig
from moeref.families import Model
from moeref.layout import Layout
from moeref.record import Options, Record

PROMPT, GROUP = 6, 4  # tokens, samples of a prompt


@dataclass
class Report:
    """What a step measured. `replayed_G` and `native_G`: trainer minus engine, the logprobs of all sampled tokens, with
    the engine's routes (R3) and with the trainer's own."""

    version: int
    reward: float
    replayed_G: npt.NDArray[np.float64]
    native_G: npt.NDArray[np.float64]
    agreement: float
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def mismatches(self) -> dict[str, replay.Mismatch]:
        """With replay and without."""
        both = {"R3": self.replayed_G, "no replay": self.native_G}
        return {name: replay.mismatch(d_G, np.zeros_like(d_G)) for name, d_G in both.items()}

    def lines(self) -> Iterator[str]:
        """The report as text."""
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())
        yield f"version {self.version}: reward {self.reward:.3f}, {self.nbytes} bytes came; {stages}"
        yield f"  routes: {self.agreement:.2%} of (token, layer) agree"
        for (name, found), d_G in zip(self.mismatches.items(), (self.replayed_G, self.native_G), strict=True):
            p99, share = np.quantile(np.abs(d_G), 0.99), found.f[2.0]
            difference = f"mean {found.mean_abs:.1e}, p99 {p99:.1e}, max {found.max_abs:.1e}"
            yield f"  {name:9}: |Δlogp| {difference}; k3 {found.k3:.1e}, F(2) {share:.2%}, {found.tokens} tokens"


@dataclass(frozen=True)
class Size:
    """What a loop is of. `longest`: tokens of prompt and completion. `engine`: arguments of vLLM besides."""

    checkpoint: str
    layout: Layout
    dtype: str
    run: RunFile | None = None
    longest: int = 64
    engine: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def tiny(folder: Path, family: str, layout: Layout, dtype: str = "float32", **engine: Any) -> Size:
        """Random weights, written to `folder`. Compiling the model would take longer than its steps."""
        tiny.write(family, folder, dtype)
        small = {"max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}
        shared = {"gpu_memory_utilization": 0.2}  # the trainer may be on the same GPU
        return Size(str(folder), layout, dtype, engine={**small, **shared, **engine})

    @staticmethod
    def of_run(run: RunFile, checkpoint: str, gpus: int = 1) -> Size:
        """Of a run file, with `gpus` for the engine. Raises ValueError if it will not work or is of another model."""
        policy, _ = _checked(run)
        if families.read(checkpoint, policy.model.param_dtype) != policy.model:
            raise ValueError(f"{checkpoint} is not the {run.model} that was checked")
        engine = {"tensor_parallel_size": gpus, "enable_expert_parallel": gpus > 1}
        return Size(checkpoint, policy.layout, policy.model.param_dtype, run, run.options["seq_length"], engine)

    @property
    def model(self) -> Model:
        """Of the checkpoint."""
        return families.read(self.checkpoint, self.dtype)

    def records(self) -> tuple[Record, Record]:
        """Of policy and reference."""
        if self.run is not None:
            return _checked(self.run)
        asked = MoEConfig(moe_router_load_balancing_type="none")
        record = Record.of(self.model, self.layout, asked, Options(replay="R3"))
        return record, record

    def engine_args(self) -> dict[str, Any]:
        """Of `vllm.LLM`."""
        return engines.engine_args(self.checkpoint, self.model, max_model_len=self.longest, **self.engine)


def _checked(run: RunFile) -> tuple[Record, Record]:
    reports = check_run(run)
    policy, reference = (reports[name].record for name in ("policy", "reference"))
    if policy is None or reference is None:
        raise ValueError(f"{run.model} at {run.layout} will not work; `moeref check` says why")
    return policy, reference


class Devices(NamedTuple):
    """The GPUs of the trainer's ranks and of the engine, and what carries weights from one to the other."""

    ranks: Sequence[int] = ()
    engine: Sequence[int] = ()
    backend: str = "gloo"

    @staticmethod
    def of(world: int, workers: int, gpus: int, nccl: bool = False) -> Devices:
        """One GPU a process, and NCCL between them. With fewer GPUs the engine has them, and a trainer of one rank one
        of them too; of several it runs on the CPU, since NCCL takes one member a GPU. Without GPUs all do. `nccl`: also
        between a rank and a worker that share a GPU."""
        if gpus >= world + workers:
            return Devices(range(world), range(world, world + workers), "nccl")
        if gpus < workers:
            return Devices()
        return Devices(range(world if world == 1 else 0), range(workers), "nccl" if nccl and world == 1 else "gloo")

    @property
    def host(self) -> str | None:
        """What the trainer calls its machine to NCCL, which takes two members on one GPU for two machines then, and
        sends by sockets; None where no GPU is shared."""
        return "trainer" if self.backend == "nccl" and {*self.ranks} & {*self.engine} else None


@contextmanager
def visible(gpus: Sequence[int]) -> Iterator[None]:
    """Processes that start, and a CUDA that is not in use yet, see these GPUs only."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = before.split(",") if before else [str(gpu) for gpu in range(max(gpus, default=-1) + 1)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(known[gpu] for gpu in gpus)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)


class Ranks:
    """The trainer's processes, forked from one that has imported Megatron. On GPUs each one imports it, since CUDA does
    not outlive a fork."""

    def __init__(self, size: Size, meet: Path, devices: Devices) -> None:
        context = mp.get_context("spawn" if devices.ranks else "forkserver")
        context.set_forkserver_preload(["docs.examples.grpo_rank"])
        self._calls, self._processes = [], []
        self.control, far = context.Pipe()
        for rank in range(size.layout.world):
            mine, theirs = context.Pipe()
            given = (rank, (size, str(meet)), theirs, far if rank == 0 else None, devices.host)
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

    def __init__(self, size: Size, *, prompts: int = 4, new: int = 10, nccl: bool = False) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.layout, self.model = size.layout, size.model
        workers = size.engine.get("tensor_parallel_size", 1)
        # Counted, since asking whether CUDA works would start it here with all GPUs.
        devices = Devices.of(self.layout.world, workers, torch.cuda.device_count(), nccl)
        with visible(devices.ranks):
            self.ranks = Ranks(size, folder / "meet", devices)
        self._stack.callback(self.ranks.close)
        with visible(devices.engine):
            from vllm import LLM

            self.llm = LLM(**size.engine_args())
        self.place = engines.Place("127.0.0.1", free_port(), 1 + workers, devices.backend)
        self.version = 0
        rng = np.random.default_rng(0)
        self.prompts, self.new = rng.integers(0, self.model.vocab, (prompts, PROMPT)).tolist(), new
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def rollout(self) -> list[engines.Sample]:
        from vllm import SamplingParams

        params = SamplingParams(**engines.sampling(self.new, n=GROUP, ignore_eos=True))
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

    def measure(self, samples: list[engines.Sample], nbytes: int = 0) -> tuple[Report, list[Any]]:
        """Rollout against training, and the logprobs that the ratio of GRPO is to."""
        versions = {int(v) for sample in samples for v in sample.versions_G}
        if versions != {self.version}:
            raise RuntimeError(f"samples of versions {sorted(versions)}, and the engine has {self.version}")
        with self.stage("logprobs"):
            old, _ = self.logprobs(samples, True)
        own, routes = self.logprobs(samples, False)
        engine_G = np.concatenate([sample.logprobs_G for sample in samples])
        same = [replay.agreement(s.routes, r).overall for s, r in zip(samples, routes, strict=True) if s.routes]
        given_G, native_G = (np.concatenate(one) - engine_G for one in (old, own))
        mean = float(np.mean([reward(sample) for sample in samples]))
        return Report(self.version, mean, given_G, native_G, float(np.mean(same)), nbytes), old

    def train(self, samples: list[engines.Sample], old: list[Any]) -> None:
        rewards_PG = np.array([reward(s) for s in samples]).reshape(-1, GROUP)
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
    reports: list[Report] = []
    nbytes = 0
    for step in range(steps + 1):
        loop.seconds.clear()
        samples = loop.rollout()
        report, old = loop.measure(samples, nbytes)
        reports.append(report)
        if step < steps:
            loop.train(samples, old)
            nbytes = loop.sync()
        report.seconds = dict(loop.seconds)
    return reports


def picture(steps: list[Report], bf16: Report, path: Path) -> None:
    """Left: the share of sampled tokens over a difference, in bf16. Right: seconds of each stage of the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, d_G, colour in (("no replay", bf16.native_G, "C3"), ("R3", bf16.replayed_G, "C0")):
        sorted_G = np.sort(np.abs(d_G))
        left.step(sorted_G, 1 - np.arange(d_G.size) / d_G.size, colour, label=label, where="post")
    left.set(xscale="log", yscale="log", xlim=(1e-4, None), xlabel="|Δ log p|: trainer − engine, bf16")
    left.set_ylabel("share of tokens above")
    left.legend()
    stages = list(steps[0].seconds)
    right.barh(stages, [np.mean([report.seconds[stage] for report in steps]) for stage in stages], color="C0")
    right.invert_yaxis()
    right.set_xlabel("seconds a step, fp32 on a CPU")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Steps in fp32, where both sides agree to rounding; then a rollout in bf16, where replay decides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="glm4_moe_lite", choices=sorted(tiny.CONFIGS))
    parser.add_argument("--layout", default="tp=2,ep=2,etp=1")
    parser.add_argument("--run", type=Path, help="a run file, in place of a tiny model")
    parser.add_argument("--checkpoint", help="of the run's model")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more arguments of vllm.LLM for a tiny model, as JSON"
    )
    parser.add_argument("--nccl", action="store_true", help="NCCL between a trainer's rank and an engine of one GPU")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    if asked.run:
        size = Size.of_run(read_run_file(asked.run), asked.checkpoint)
        print(*(line for report in loop_of(size, asked.steps, new=size.longest - PROMPT) for line in report.lines()))
        return
    found: dict[str, list[Report]] = {}
    for dtype, steps in (("float32", asked.steps), ("bfloat16", 0)):
        with tempfile.TemporaryDirectory() as folder:
            size = Size.tiny(Path(folder), asked.family, Layout.parse(asked.layout), dtype, **asked.engine)
            found[dtype] = loop_of(size, steps, nccl=asked.nccl)
        print(dtype, *(line for report in found[dtype] for line in report.lines()), sep="\n")
    if asked.picture:
        picture(found["float32"][:-1], found["bfloat16"][0], asked.picture)


def loop_of(size: Size, steps: int, new: int = 24, nccl: bool = False) -> list[Report]:
    """The reports of a loop, which is closed."""
    with closing(Loop(size, prompts=8, new=new, nccl=nccl)) as loop:
        return run(loop, steps)


if __name__ == "__main__":
    engines.prepare()
    main()
