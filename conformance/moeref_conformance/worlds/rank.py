"""One rank: what a forked process does from its first instruction to its exit. That of a static cell answers for all.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from moeref_conformance.contract.api import Cell, Target, World
from moeref_conformance.contract.backends import RANK_BACKENDS
from moeref_conformance.contract.exits import EXIT_RAISED
from moeref_conformance.contract.records import rank_dir
from moeref_conformance.contract.texts import cut
from moeref_conformance.worlds import static

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: The signal at which a rank writes the Python stack of its threads to stderr: sent when it hangs.
STACKS = signal.SIGUSR2
PRINTED = 1_000_000  # characters kept of a traceback: a message may have any size
STORE = "store"  # the file of a cell in which its ranks meet
#: To the fork server: a rank failed elsewhere; all ranks have finished. From it: the ranks of a part have finished.
END, LEAVE, FINISHED = "end", "leave", "finished"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Part:
    """The ranks of a cell that one fork server forks, and how they meet the others.

    `local` has every rank of the cell that runs on this machine, with its index there. Ranks meet in the TCP store at
    `store`, which another process serves, under `prefix`; without one, in a file.
    """

    ranks: Sequence[int]
    local: Mapping[int, int]
    store: tuple[str, int] | None = None
    prefix: str = ""


@dataclass(frozen=True)
class CellRun:
    """A cell, or a part of one, for the fork server. `inputs` has at least "hf_config" (a folder).

    The ranks may take `deadline` seconds; when one has failed, the others have `grace` seconds more. `staged`: the CPU
    world goes through the staged backend too, as if its tensors were on a GPU.
    """

    cell: Cell
    cell_dir: Path
    inputs: dict[str, str]
    part: Part
    deadline: float
    grace: float
    staged: bool = False

    @property
    def size(self) -> int:
        """Processes of the whole cell: its ranks, or one where it is static."""
        return self.cell.processes


@dataclass(frozen=True)
class Job:
    """What all ranks that one fork server forks for a request share."""

    target: Target
    entry: Callable[[Target, Cell, World, dict[str, str], Path], None]
    request: CellRun
    parent: int  # pid of the fork server
    close: tuple[int, ...]  # its file descriptors that a rank must close
    done: int  # pipe to the fork server: "finished <rank>", "raised <rank> <monotonic ns>"
    go: int  # pipe from the fork server: end of file means that all may leave


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(job: Job, rank: int) -> NoReturn:
    """Run one rank in a freshly forked process and exit: 0 finished, 3 something raised."""
    code = EXIT_RAISED
    try:
        for fd in job.close:
            os.close(fd)
        _settle(rank_dir(job.request.cell_dir, rank), job.parent)
        if job.request.cell.backend == "static":
            static.answer(job.target, job.request.cell, job.request.cell_dir, job.request.inputs)
        else:
            _run(job, rank)
        _flush()
        os.write(job.done, f"finished {rank}\n".encode())
        os.read(job.go, 1)
        code = 0
    except BaseException:
        when = time.monotonic_ns()
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the target has closed stderr
            print(cut(traceback.format_exc(), PRINTED, PRINTED // 2), file=sys.stderr)
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
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        # Else a thread of gloo that wakes preempts the one that has its lock, and spins until that one is back.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for fd, path in enumerate((Path(os.devnull), folder / "stdout.txt", folder / "stderr.txt")):
        file = os.open(path, os.O_WRONLY | os.O_CREAT if fd else os.O_RDONLY, 0o644)
        os.dup2(file, fd)
        os.close(file)
    faulthandler.register(STACKS, file=2, all_threads=True)
    faulthandler.enable(file=2, all_threads=False)  # the stack of a native crash


def _run(job: Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    request, local = job.request, job.request.part.local
    backend = RANK_BACKENDS[request.cell.backend]
    device = torch.device(backend.device_of(local[rank]))
    if backend.on_gpu:
        _use_gpu(device, rank)
    process_group = "staged" if request.staged else backend.process_group
    if process_group == "staged":
        from moeref_conformance.worlds import staged

        staged.register(force=request.staged)
    places = {"RANK": rank, "WORLD_SIZE": request.size, "LOCAL_RANK": local[rank], "LOCAL_WORLD_SIZE": len(local)}
    os.environ.update({name: str(value) for name, value in places.items()})
    if _on_loopback(request):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # elsewhere gloo takes what the user set, or the host name's interface
    random.seed(rank)
    torch.manual_seed(rank)
    dist.init_process_group(
        process_group,
        store=_store(request),
        rank=rank,
        world_size=request.size,
        # Longer than the cell's deadline: a hang is reported as one, with the stack of every rank.
        timeout=timedelta(seconds=request.deadline + 60),
        device_id=device if "nccl" in process_group else None,
    )
    folder = rank_dir(request.cell_dir, rank)
    (folder / "scratch").mkdir()
    world = World(
        backend=request.cell.backend,
        rank=rank,
        size=request.size,
        device=str(device),
        workdir=folder / "scratch",
        hf_config=Path(request.inputs["hf_config"]),
    )
    job.entry(job.target, request.cell, world, request.inputs, folder)
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


def _store(request: CellRun) -> Store:
    """The rendezvous store. A TCP store is served by another process; every cell has its own prefix in it."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    if request.part.store is None:
        return FileStore(str(request.cell_dir / STORE), request.size)
    client = TCPStore(*request.part.store, is_master=False, timeout=timedelta(seconds=request.deadline))
    return PrefixStore(request.part.prefix, client)


def _on_loopback(request: CellRun) -> bool:
    """Whether all ranks are certainly on this machine."""
    store = request.part.store
    return store is None or request.size == 1 or store[0] in ("localhost", "127.0.0.1", "::1")


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed or redirected by the target
            stream.flush()
