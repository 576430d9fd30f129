"""One rank: what a forked process does from its first instruction to its exit.

It becomes its own session (so that the whole group can be ended at once), dies with the zygote, writes its output to
its record folder, joins the gloo world over a file store, and calls the entry. It reports on a pipe when it has
finished, and then stays until all ranks have, so that nobody's connection is closed while data is under way.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from moeref_conformance.api import Cell, Target, World
from moeref_conformance.worlds import EXIT_RAISED

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: The signal at which a rank writes the Python stack of its threads to stderr: sent when it hangs.
STACKS = signal.SIGUSR2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Job:
    """All ranks of a cell get the same one. `entry(target, cell, world, inputs, record_dir)` is called in each."""

    target: Target
    entry: Callable[[Target, Cell, World, dict[str, str], Path], None]
    cell: Cell
    cell_dir: Path
    inputs: dict[str, str]
    device: str
    deadline: float
    store: Path  # file of the rendezvous
    done: int  # pipe to the zygote: "finished <rank>", "raised <rank> <monotonic ns>"
    go: int  # pipe from the zygote: end of file means that all may leave


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def record_dir(cell_dir: Path, rank: int) -> Path:
    """`<cell_dir>/rank0003`."""
    return cell_dir / f"rank{rank:04d}"


def main(job: Job, rank: int, zygote: int, close: tuple[int, ...]) -> NoReturn:
    """Run one rank in a freshly forked process and exit: 0 finished, 3 something raised.

    `zygote` is the pid of the parent, `close` its file descriptors that are no business of a rank.
    """
    code = EXIT_RAISED
    try:
        for fd in close:
            os.close(fd)
        _settle(record_dir(job.cell_dir, rank), zygote)
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


def _settle(folder: Path, zygote: int) -> None:
    """Own session, end with the zygote, default signals, output to files."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
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
    from torch._C._distributed_c10d import FileStore

    size = job.cell.layout.world
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    random.seed(rank)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(job.store), size),
        rank=rank,
        world_size=size,
        # Longer than the cell's deadline: a hang is reported as one, with the stack of every rank.
        timeout=timedelta(seconds=job.deadline + 60),
    )
    folder = record_dir(job.cell_dir, rank)
    scratch = folder / "scratch"
    scratch.mkdir()
    world = World(
        kind=job.cell.world,
        rank=rank,
        size=size,
        device=job.device,
        workdir=scratch,
        hf_config=Path(job.inputs["hf_config"]),
    )
    job.entry(job.target, job.cell, world, dict(job.inputs), folder)


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
