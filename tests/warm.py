"""A Python program in a fork of this process, which has imported torch and megatron-core: a fresh one needs seconds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO


def run(program: str, *, cwd: Path, path: Sequence[str] = (), forget: Sequence[str] = ()) -> Done:
    """Run `program` as `python -c` would in `cwd`, with `path` in front of the import path.

    Of the packages in `forget` no module counts as imported.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            _child(program, cwd, path, forget, out, err)
        _, status = os.waitpid(pid, 0)
        for file in (out, err):
            file.seek(0)
        return Done([sys.executable], os.waitstatus_to_exitcode(status), out.read(), err.read())


Done = subprocess.CompletedProcess[str]


def _child(program: str, cwd: Path, path: Sequence[str], forget: Sequence[str], out: IO[str], err: IO[str]) -> None:
    code = 1
    try:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(cwd)
        sys.path[:0] = path
        os.environ["PYTHONPATH"] = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        for name in [name for name in sys.modules if name.partition(".")[0] in forget]:
            del sys.modules[name]
        importlib.invalidate_caches()
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
