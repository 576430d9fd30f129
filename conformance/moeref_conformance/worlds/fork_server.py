"""The fork server: a process that imports everything once and forks the ranks of each cell.

Importing torch and megatron-core takes seconds in each process, forking takes milliseconds. So this process imports,
installs the CPU substitutions and the checked collectives, and resolves the target. From then on it only forks ranks
and supervises them (`supervise.py`). It has one thread: a fork copies only the calling thread, and locks held by others
would stay locked in the ranks. It never touches CUDA, which does not survive a fork.

It inherits a connection from its parent. First it sends its facts, with what the target says of itself, or why it
cannot serve the target: BadInput where that is none, else a text. For each `CellRun` it sends the pids of the ranks,
`FINISHED` once those of a part have done their work, and a RunOutcome. A static cell has one process for all its ranks.
While ranks run, it takes `END` and `LEAVE`. Losing the connection means that the parent is gone.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeref_conformance.contract import facts
from moeref_conformance.contract.api import Target
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.quiet import quiet_imports
from moeref_conformance.contract.records import rank_dir
from moeref_conformance.contract.results import version_of
from moeref_conformance.worlds import rank as rank_main
from moeref_conformance.worlds import supervise
from moeref_conformance.worlds.rank import CellRun

#: Set before torch is imported: one thread a rank, eager code instead of compiled.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_GLOO_LAZY_INIT": "1",  # connections of a group when it is first used: Megatron makes many that a cell is not
    # megatron-core's jit_fuser is torch.compile: a compiler and threads in every rank, and other roundings per shape
    "TORCHDYNAMO_DISABLE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which some bridges import, starts a thread
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asks for it under sequence parallelism
}
#: In addition, where ranks use GPUs.
GPU_ENVIRONMENT = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() by NVML: asking the driver breaks CUDA in forks
    "NVIDIA_TF32_OVERRIDE": "0",  # fp32 is judged by fp32 bounds: no TF32 in cuBLAS and cuDNN, so none in TE either
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS chooses the same algorithm every time
}
#: How the name of libcuda's thread begins: seen as cuda00001800007 with driver 580.
LIBCUDA = "cuda0"
#: What every Megatron target imports; imported here, so that ranks need not.
PRELOAD = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.moe.moe_layer",
    "numpy.ctypeslib",  # safetensors, as soon as it writes
)


def main() -> None:
    """Serve until the parent closes the connection. Only `worlds.forked` starts it."""
    parent, fd, spec, entry, backend = sys.argv[1:]
    rank_main.prctl(rank_main.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")
    os.set_inheritable(int(fd), False)
    channel: Connection[Any, Any] = Connection(int(fd))
    os.environ.update(ENVIRONMENT | (GPU_ENVIRONMENT if RANK_BACKENDS[backend].on_gpu else {}))
    try:
        with quiet_imports():
            prepared = prepare(spec, entry, backend)
    except BaseException as error:
        told = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        channel.send(BadInput(str(error)) if isinstance(error, BadInput) else told)
        raise
    rank_main.prctl(rank_main.PR_SET_CHILD_SUBREAPER, 1)

    def leave(number: int, frame: Any) -> None:
        # The kernel also sends SIGTERM when the thread that started us ends; the parent itself may still be alive.
        if os.getppid() != int(parent) or number == signal.SIGINT:
            sys.exit()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    rank_main.prctl(rank_main.PR_SET_PDEATHSIG, signal.SIGTERM)
    keep = supervise.children()  # processes that the target's import started are not ended
    try:
        if os.getppid() == int(parent):
            channel.send(prepared.facts)
            serve(channel, prepared, keep)
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    finally:
        supervise.end_strays(frozenset())


@dataclass(frozen=True)
class Prepared:
    """Result of the imports: the target, what each rank calls, and the facts for the parent."""

    target: Target
    entry: Callable[..., Any]
    facts: dict[str, Any]


def prepare(spec: str, entry: str, backend: str) -> Prepared:
    """Import and patch everything, in the required order.

    Raises what the imports raise, and RuntimeError if they left a second thread running or initialised CUDA: forking
    would be unsafe.
    """
    gc.disable()  # what imports make stays: going through it takes a fifteenth of their CPU time
    import torch
    from moeref_conformance.targets import peers
    from moeref_conformance.worlds import collectives, cpu

    device = "cuda" if RANK_BACKENDS[backend].on_gpu else "cpu"
    torch.set_num_threads(1)
    cpu.install(device, "torch")
    collectives.install()
    peers.before_megatron(spec, device)
    _import_adapter(spec)
    substituted: tuple[str, ...] = ()
    if importlib.util.find_spec("megatron") is not None:
        for module in PRELOAD:
            importlib.import_module(module)
        substituted = cpu.install(device, "megatron")
    no_cuda("importing torch and megatron-core")
    function = pkgutil.resolve_name(entry)
    from moeref_conformance.resolve import resolve
    from moeref_conformance.steps.facet import facets

    facets()  # imports their modules

    target = resolve(spec)
    if preload := getattr(target, "preload", None):
        preload()
    said = {
        "pid": os.getpid(),
        "versions": {name: version_of(name) for name in ("torch", "megatron-core", "transformers", "moeref")},
        "substitutions": list(substituted),
        **facts.as_plain(target),
    }
    one_thread()
    no_cuda(f"importing the target {spec!r}")
    gc.collect()
    gc.freeze()  # the collector leaves these objects alone, so their pages stay shared with the ranks
    gc.enable()
    gc.set_threshold(50_000)  # building a model makes many objects, and few that only the collector can free
    return Prepared(target, function, said)


def _import_adapter(spec: str) -> None:
    """Import the module of a user's target while it can still say what megatron-core finds; see `authors`."""
    from moeref_conformance.resolve import adapter, imported

    if module := adapter(spec):
        imported(spec, module)
        no_cuda(f"importing the target {spec!r}")


def one_thread() -> None:
    """Raise RuntimeError if this process has more than one thread. Native threads count, but for that of libcuda.

    Importing megatron-core on a machine with a GPU leaves libcuda's thread, which waits for events. Whether CUDA works
    in forks is for `no_cuda` to say.
    """
    tasks = Path("/proc/self/task").iterdir()
    native = sum(not (task / "comm").read_text().startswith(LIBCUDA) for task in tasks)
    if threading.active_count() != 1 or native != 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(
            f"the fork server has {native} threads ({names}): forking ranks is unsafe. Importing the target must not "
            "start threads or run parallel tensor operations; move that into Target.open"
        )


def no_cuda(after: str) -> None:
    """Raise RuntimeError if this process has initialised CUDA, or if CUDA would not work in its forks.

    Asking the driver for the number of GPUs is enough for the latter, and torch notices it only in the child. So one
    child is forked, if NVML sees a GPU.
    """
    import torch

    spoiled = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not spoiled and torch.cuda._device_count_nvml() > 0:
        pid = os.fork()
        if pid == 0:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        spoiled = os.waitpid(pid, 0)[1] != 0
    if spoiled:
        raise RuntimeError(
            f"CUDA was initialised in the fork server by {after}: forked ranks could not use it. Nothing may touch "
            "CUDA at import (torch.cuda calls, tensors on a GPU, kernels compiled there); move that into Target.open"
        )


def serve(channel: Connection[Any, Any], prepared: Prepared, keep: frozenset[int]) -> None:
    """Answer requests one after the other until the connection is lost."""
    while True:
        request = channel.recv()
        if not isinstance(request, CellRun):
            continue  # a late word about an earlier cell
        try:
            answer = run_cell(channel, request, prepared, keep)
        except Exception as error:
            supervise.end_strays(keep)
            told = f"fork server: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            answer = RunOutcome((), 0.0, error=told)
        channel.send(answer)


def run_cell(channel: Connection[Any, Any], request: CellRun, prepared: Prepared, keep: frozenset[int]) -> RunOutcome:
    """Fork the ranks of one request, watch them, and say how they ended."""
    import torch

    one_thread()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        no_cuda("an earlier cell")
    for rank in request.part.ranks:
        rank_dir(request.cell_dir, rank).mkdir(parents=True)
    done_read, done = os.pipe()
    go, go_write = os.pipe()
    close = channel.fileno(), done_read, go_write
    job = rank_main.Job(prepared.target, prepared.entry, request, os.getpid(), close, done, go)
    pids, begin = {}, time.monotonic()
    try:
        for rank in request.part.ranks:
            pids[rank] = os.fork()
            if pids[rank] == 0:
                rank_main.main(job, rank)
        channel.send(list(pids.values()))
        watch = supervise.Watch(pids, begin, done_read, go_write, channel, request)
        watch.run()  # it closes go_write
    finally:
        strays = supervise.end_strays(keep)
        for fd in (done, go, done_read):
            os.close(fd)
        (request.cell_dir / rank_main.STORE).unlink(missing_ok=True)
    return RunOutcome(watch.exits(), watch.seconds, strays=strays)


if __name__ == "__main__":
    # Under `-m` this file is a second module called __main__; go on in the importable one.
    from moeref_conformance.worlds.fork_server import main as run

    run()
