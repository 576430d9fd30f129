"""The zygote: a process that has imported everything once and forks the ranks of each cell.

Importing torch and megatron-core takes seconds a process, forking milliseconds. So this process imports, installs the
CPU substitutions and the checked collectives, resolves the target, and from then on only forks and supervises. It has
one thread, always: a fork copies only the calling thread, and locks held by others would stay locked in the ranks.
Requests and answers are JSON lines on a socket inherited from the parent; end of file means that the parent is gone.
Supervision itself (deadlines, first failure, stray processes) is in `supervise.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moeref_conformance.api import Cell, Layout, Target, to_plain
from moeref_conformance.worlds import rank as rank_main
from moeref_conformance.worlds import supervise

#: Set before torch is imported: one thread a rank, loopback only, eager code instead of compiled.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",  # megatron-core's jit_fuser is torch.compile: a C++ compiler and threads
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow, which some bridges import, starts a thread
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asks for it under sequence parallelism
}
#: What every Megatron target imports; preloaded so that ranks do not.
PRELOAD = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.moe.moe_layer",
)


def main() -> None:
    """Serve until the parent closes the socket. Started by worlds.gloo, never by hand."""
    parser = argparse.ArgumentParser(description="fork server of the conformance kit")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()

    rank_main.prctl(rank_main.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:
        sys.exit("the parent is gone")
    channel = socket.socket(fileno=args.fd)
    channel.set_inheritable(False)
    os.environ.update(ENVIRONMENT)
    try:
        target, entry, facts = prepare(args.target, args.entry, args.device)
    except BaseException as error:
        say(channel, {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        raise
    rank_main.prctl(rank_main.PR_SET_CHILD_SUBREAPER, 1)

    def leave(number: int, frame: Any) -> None:
        # The kernel also sends this when the thread that started us ends; the parent itself may well be alive.
        if os.getppid() != args.parent or number == signal.SIGINT:
            raise supervise.ParentGone

    signal.signal(signal.SIGTERM, leave)
    rank_main.prctl(rank_main.PR_SET_PDEATHSIG, signal.SIGTERM)
    keep = supervise.children()  # helpers that the target's import started stay
    try:
        if os.getppid() != args.parent:
            raise supervise.ParentGone
        say(channel, {"ready": facts})
        serve(channel, target, entry, args.device, keep)
    except supervise.ParentGone:
        pass
    finally:
        supervise.end_strays(frozenset())


def prepare(spec: str, entry: str, device: str) -> tuple[Target, Callable[..., Any], dict[str, Any]]:
    """Import and patch everything, in the order that matters, and answer (target, entry, facts for the parent).

    Raises what the imports raise, and RuntimeError if they left a second thread running: forking would be unsafe.
    """
    begin = time.perf_counter()
    import torch

    from moeref_conformance.targets import peers
    from moeref_conformance.worlds import collectives, cpu

    torch.set_num_threads(1)
    cpu.install(device, "torch")
    collectives.install()
    peers.before_megatron(spec, device)
    substituted: tuple[str, ...] = ()
    if importlib.util.find_spec("megatron") is not None:
        for module in PRELOAD:
            importlib.import_module(module)
        substituted = cpu.install(device, "megatron")
    libraries = time.perf_counter() - begin
    function = rank_main.resolve_entry(entry)
    from moeref_conformance.targets import resolve

    target = resolve(spec)
    if preload := getattr(target, "preload", None):
        preload()
    facts = {
        "pid": os.getpid(),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers", "moeref")},
        "python": sys.version.split()[0],
        "substitutions": list(substituted),
        "seconds": {"libraries": libraries, "target": time.perf_counter() - begin - libraries},
        "info": to_plain(target.info),
        "claims": to_plain(target.claims),
    }
    one_thread()
    gc.collect()
    gc.freeze()  # collected objects are not touched again, so their pages stay shared with the ranks
    return target, function, facts


def version(name: str) -> str:
    """The installed version of a distribution, or ""."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def one_thread() -> None:
    """Raise RuntimeError if this process has more than one thread, native ones included."""
    native = len(list(Path("/proc/self/task").iterdir()))
    if threading.active_count() != 1 or native != 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(
            f"the zygote has {native} threads ({names}): forking ranks is unsafe. Importing the target must not start "
            "threads or run parallel tensor operations; move that into Target.open"
        )


def serve(channel: socket.socket, target: Target, entry: Callable[..., Any], device: str, keep: frozenset[int]) -> None:
    """Answer requests one after the other until end of file."""
    pending = b""
    while True:
        while b"\n" not in pending:
            chunk = channel.recv(1 << 16)
            if not chunk:
                raise supervise.ParentGone
            pending += chunk
        line, _, pending = pending.partition(b"\n")
        request = json.loads(line)
        try:
            answer = run_cell(channel, request, target, entry, device, keep)
        except Exception as error:
            supervise.end_strays(keep)
            answer = {"error": f"zygote: {type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        say(channel, answer)


def run_cell(
    channel: socket.socket,
    request: dict[str, Any],
    target: Target,
    entry: Callable[..., Any],
    device: str,
    keep: frozenset[int],
) -> dict[str, Any]:
    """Fork the ranks of one cell, watch them, and answer their exits."""
    one_thread()
    cell = cell_from(request["cell"])
    cell_dir = Path(request["cell_dir"])
    for rank in range(cell.layout.world):
        rank_main.record_dir(cell_dir, rank).mkdir(parents=True)
    done_read, done = os.pipe()
    go, go_write = os.pipe()
    job = rank_main.Job(
        target=target,
        entry=entry,
        cell=cell,
        cell_dir=cell_dir,
        inputs=request["inputs"],
        device=device,
        deadline=request["deadline"],
        store=cell_dir / "store",
        done=done,
        go=go,
    )
    begin = time.monotonic()
    zygote, pids = os.getpid(), []
    try:
        for rank in range(cell.layout.world):
            pid = os.fork()
            if pid == 0:
                rank_main.main(job, rank, zygote, (channel.fileno(), done_read, go_write))
            pids.append(pid)
        say(channel, {"forked": pids})
        watch = supervise.Watch(pids, done_read, go_write, channel, request["deadline"], request["grace"])
        watch.run()  # it closes go_write
    finally:
        strays = supervise.end_strays(keep)
        for fd in (done, go, done_read):
            os.close(fd)
        job.store.unlink(missing_ok=True)
    seconds = time.monotonic() - begin
    exits = watch.exits(cell_dir, cell.layout)
    return {"exits": [asdict(e) for e in exits], "seconds": seconds, "strays": strays}


def cell_from(plain: dict[str, Any]) -> Cell:
    """The Cell that `api.to_plain` wrote."""
    fields = {**plain, "layout": Layout(**plain["layout"]), "tags": tuple(plain["tags"])}
    return Cell(**fields)


def say(channel: socket.socket, message: dict[str, Any]) -> None:
    """One JSON line to the parent; ParentGone if it no longer listens."""
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError) as error:
        raise supervise.ParentGone from error


if __name__ == "__main__":
    # Under `-m` this file is a second module called __main__; go on in the importable one.
    from moeref_conformance.worlds.zygote import main as run

    run()
