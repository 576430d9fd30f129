"""A target that fails on one rank, and on more leaves a daemon behind and hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, Info, World


class Hanging:
    info = Info(name="hanging", version="1")
    claims = Claims(facets=frozenset({"names"}), families=frozenset({"qwen3_moe"}), backends=frozenset({"gloo"}))

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Any]:
        if world.size == 1:
            raise ValueError("not on one rank")
        Path(os.environ["TOY_PIDS"], f"rank{world.rank}").write_text(f"{os.getpid()} {daemon()}")
        while True:
            time.sleep(60)
        yield


def daemon() -> int:
    """The pid of a process in a session of its own, whose parent has ended."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            os.close(read)
            os.close(write)
            while True:
                time.sleep(60)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 20))


target = Hanging()
