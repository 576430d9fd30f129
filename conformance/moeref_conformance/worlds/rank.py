"""One rank: what a forked process does from its first instruction to its exit.

It becomes its own session (so that the whole group can be ended at once), dies with the fork server, writes its output
to its record folder, sets its device, joins the default process group of its cell over a store, and calls the entry. It
reports on a pipe when it has finished, and then stays until all ranks have: no connection may close while data is under
way.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.exits import EXIT_RAISED
from moeref_conformance.contract.records import rank_dir

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: The signal at which a rank writes the Python stack of its threads to stderr: sent when it hangs.
STACKS = signal.SIGUSR2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Job:
    """What all ranks of a cell share. `entry(target, cell, world, inputs, record_dir)` is called in each.

    `store` is {"file": path} or {"tcp": [host, port], "prefix": text}. `local` gives each rank on this machine its
    index there. `staged`: the CPU world goes through the staged backend too, as if its tensors were on a GPU.
    """

    target: Target
    entry: Callable[[Target, Cell, World, dict[str, str], Path], None]
    cell: Cell
    cell_dir: Path
    inputs: dict[str, str]
    deadline: float
    store: Mapping[str, Any]
    local: Mapping[int, int]
    staged: bool
    done: int  # pipe to the fork server: "finished <rank>", "raised <rank> <monotonic ns>"
    go: int  # pipe from the fork server: end of file means that all may leave


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(job: Job, rank: int, parent: int, close: tuple[int, ...]) -> NoReturn:
    """Run one rank in a freshly forked process and exit: 0 finished, 3 something raised.

    `parent` is the pid of the fork server, `close` its file descriptors that a rank must close.
    """
    code = EXIT_RAISED
    try:
        for fd in close:
            os.close(fd)
        _settle(rank_dir(job.cell_dir, rank), parent)
        _run(job, rank)
        _flush()
        os.write(job.done, f"finished {rank}\n".encode())
        os.read(job.go, 1)
        code = 0
    except BaseException:
        when = time.monotonic_ns()
        traceback.print_exc()
        _flush()
        os.write(job.done, f"raised {rank} {when}\n".encode())
    finally:
        os._exit(code)


def _settle(folder: Path, parent: int) -> None:
    """Start a session, die with the fork server, reset signal handlers, and send output to files."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_RAISED)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for fd, path in enumerate((Path(os.devnull), folder / "stdout.txt", folder / "stderr.txt")):
        file = os.open(path, os.O_WRONLY | os.O_CREAT if fd else os.O_RDONLY, 0o644)
        os.dup2(file, fd)
        os.close(file)
    faulthandler.register(STACKS, file=2, all_threads=True)


def _run(job: Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    backend, local, size = RANK_BACKENDS[job.cell.backend], job.local[rank], job.cell.layout.world
    device = torch.device(backend.device_of(local))
    if backend.on_gpu:
        _use_gpu(device, rank)
    process_group = "staged" if job.staged else backend.process_group
    if process_group == "staged":
        from moeref_conformance.worlds import staged

        staged.register(force=job.staged)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(len(job.local)))
    if _on_loopback(job.store):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # elsewhere gloo takes what the user set, or the host name's interface
    random.seed(rank)
    torch.manual_seed(rank)
    dist.init_process_group(
        process_group,
        store=_store(job.store, size, job.deadline),
        rank=rank,
        world_size=size,
        # Longer than the cell's deadline: a hang is reported as one, with the stack of every rank.
        timeout=timedelta(seconds=job.deadline + 60),
        device_id=device if "nccl" in process_group else None,
    )
    folder = rank_dir(job.cell_dir, rank)
    scratch = folder / "scratch"
    scratch.mkdir()
    world = World(
        backend=job.cell.backend,
        rank=rank,
        size=size,
        device=str(device),
        workdir=scratch,
        hf_config=Path(job.inputs["hf_config"]),
    )
    job.entry(job.target, job.cell, world, dict(job.inputs), folder)
    if backend.on_gpu:
        torch.cuda.synchronize()  # a kernel that fails late is this rank's failure


def _use_gpu(device: torch.device, rank: int) -> None:
    """Make `device` the current one. Raises RuntimeError if torch does not see it."""
    import torch

    count = torch.cuda.device_count()
    if device.index >= count:
        raise RuntimeError(
            f"rank {rank} needs GPU {device.index} of this machine, and torch {torch.__version__} sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): run fewer ranks a machine, or "
            "the world gloo-cuda, whose ranks share one GPU"
        )
    torch.cuda.set_device(device)


def _store(spec: Mapping[str, Any], size: int, deadline: float) -> Store:
    """The rendezvous store. A TCP store is served by another process; every cell has its own prefix in it."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    if "file" in spec:
        return FileStore(str(spec["file"]), size)
    host, port = spec["tcp"]
    client = TCPStore(str(host), int(port), is_master=False, timeout=timedelta(seconds=deadline))
    return PrefixStore(str(spec["prefix"]), client)


def _on_loopback(spec: Mapping[str, Any]) -> bool:
    """Whether all ranks are certainly on this machine."""
    return "file" in spec or str(spec["tcp"][0]) in ("localhost", "127.0.0.1", "::1")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed or redirected by the target
            stream.flush()


def resolve_entry(text: str) -> Callable[..., Any]:
    """`module:function` imported. Raises ValueError for another form, ImportError and AttributeError as they come."""
    import importlib

    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"entry {text!r}: expected 'module:function'")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
