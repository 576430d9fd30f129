"""Python programs in forks of a process that has imported what they need: a fresh one needs seconds for that."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any

Done = subprocess.CompletedProcess[str]
SECONDS = 600  # that a program may take


def run(program: str, *, cwd: Path, path: Sequence[str] = (), forget: Sequence[str] = ()) -> Done:
    """Run `program` as `python -c` would in `cwd`, with `path` in front of the import path.

    Of the packages in `forget` no module counts as imported. This process has imported torch and megatron-core.
    """
    (done,) = run_all([program], cwd=cwd, path=path, forget=forget)
    return done


def run_all(programs: Sequence[str], *, cwd: Path, path: Sequence[str] = (), forget: Sequence[str] = ()) -> list[Done]:
    """As `run`, of several programs at once, such as the ranks of a group."""
    with contextlib.ExitStack() as files:
        outputs = [[files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in programs]
        pids = []
        for program, (out, err) in zip(programs, outputs, strict=True):
            pids.append(os.fork())
            if pids[-1] == 0:
                signal.alarm(SECONDS)
                _child(program, cwd, path, forget, out, err)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for file in (file for pair in outputs for file in pair):
            file.seek(0)
        return [
            Done([sys.executable], code, out.read(), err.read())
            for code, (out, err) in zip(codes, outputs, strict=True)
        ]


def of_ranks(program: str, size: int, *arguments: str) -> list[str]:
    """The program of each rank, which finds its number and `arguments` in sys.argv."""
    return [f"import sys\nsys.argv[1:] = {[str(rank), *arguments]}\n{program}" for rank in range(size)]


class Prepared:
    """A process that has run a program, and runs others in forks of its own; `prepare` makes it."""

    def __init__(self, channel: Connection[Any, Any], output: IO[str]) -> None:
        self._channel, self._output = channel, output

    def run(self, program: str, *, cwd: Path, path: Sequence[str] = ()) -> Done:
        """As `run` above. Raises RuntimeError, with what it printed, where the first program failed."""
        (done,) = self.run_all([program], cwd=cwd, path=path)
        return done

    def run_all(self, programs: Sequence[str], *, cwd: Path, path: Sequence[str] = ()) -> list[Done]:
        """As `run_all` above. Raises RuntimeError as `run`."""
        try:
            self._channel.send((programs, cwd, path))
            done: list[Done] = self._channel.recv()
        except (EOFError, OSError) as error:
            self._output.seek(0)
            raise RuntimeError(self._output.read()) from error
        return done


@contextlib.contextmanager
def prepare(program: str, *, cwd: Path, path: Sequence[str] = (), forget: Sequence[str] = ()) -> Iterator[Prepared]:
    """Fork a process that runs `program`, and stays for as long as this context. Arguments as those of `run`."""
    ours, theirs = Pipe()
    with ours, tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _child(program, cwd, path, forget, output, output, lambda: _serve(theirs))
        theirs.close()
        try:
            yield Prepared(ours, output)
        finally:
            ours.close()
            os.waitpid(pid, 0)


def _serve(channel: Connection[Any, Any]) -> None:
    with contextlib.suppress(EOFError):  # the other side has what it wanted
        while True:
            programs, cwd, path = channel.recv()
            channel.send(run_all(programs, cwd=cwd, path=path))


def _child(
    program: str,
    cwd: Path,
    path: Sequence[str],
    forget: Sequence[str],
    out: IO[str],
    err: IO[str],
    then: Callable[[], None] = lambda: None,
) -> None:
    code = 1
    try:
        gc.freeze()  # the collector looks at none of what was there: it would take a second for each round
        if "torch" in sys.modules:  # a fork hangs in OpenMP's threads, where its parent has used them
            sys.modules["torch"].set_num_threads(1)
        for number, file in enumerate((out, err), 1):
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(cwd)
        sys.path[:0] = path
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        for name in [name for name in sys.modules if name.partition(".")[0] in forget]:
            del sys.modules[name]
        importlib.invalidate_caches()
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        then()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
