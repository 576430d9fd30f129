"""A worker: one process of torchrun, which forks its rank of a cell when the coordinator asks for it.

The coordinator, in the process of rank 0, sends (number, method, arguments). `start`, `keep` and `fork` of `Worker` are
answered by (number, what they return), where the kit itself fails by (number, WorldError). "end" and "leave", as in
`ForkedWorld`, "close" (a backend's world) and "stop" have no answer. Losing rank 0 is treated as "stop". The process of
rank 0 has a worker too, in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import socket
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moeref_conformance.contract.exits import RunOutcome
from moeref_conformance.contract.records import rank_dir
from moeref_conformance.contract.results import version_of, versions
from moeref_conformance.worlds.forked import ENTRY, ForkedWorld, WorldError
from moeref_conformance.worlds.inputs import GivenInputs
from moeref_conformance.worlds.messages import LOST, pack, unpack
from moeref_conformance.worlds.rank import FINISHED, CellRun


@dataclass(frozen=True)
class Place:
    """Where torchrun started this process: `node` counts its machines, `local` the processes on one."""

    rank: int
    size: int
    node: int
    local: int
    host: str

    @classmethod
    def here(cls) -> Place:
        """As the environment says. Raises KeyError naming the variable that torchrun would have set."""
        rank, size, node, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK"))
        return cls(rank, size, node, local, socket.gethostname())


class Worker:
    """Serves one connection. `target_spec` is what every process of torchrun got on its command line."""

    def __init__(self, place: Place, target_spec: str, connection: Connection[Any, Any], entry: str = ENTRY) -> None:
        self.place, self._target_spec, self._connection, self._entry = place, target_spec, connection, entry
        self._folder = Path()
        self._worlds: dict[str, ForkedWorld] = {}
        self._inputs: dict[str, GivenInputs] = {}
        self._number = 0

    def serve(self) -> bool:
        """Answer until told to stop (True) or until rank 0 is gone (False). No process and no file is left."""
        folder = tempfile.TemporaryDirectory(prefix="moeref-conformance-", ignore_cleanup_errors=True)
        with folder, ThreadPoolExecutor(1) as thread:
            self._folder = Path(folder.name)
            try:
                while True:
                    number, method, arguments = self._connection.recv()
                    if method == "stop":
                        return True
                    if method == "close":
                        self._close(thread, *arguments)
                    elif method in ("end", "leave"):  # even while the thread runs a cell
                        for world in list(self._worlds.values()):
                            getattr(world, method)()
                    else:
                        thread.submit(self._answer, number, method, arguments)
            except LOST:
                return False
            finally:
                for backend in list(self._worlds):
                    self._close(thread, backend)
                thread.shutdown()
                self._connection.close()

    def _close(self, thread: ThreadPoolExecutor, backend: str) -> None:
        if world := self._worlds.get(backend):
            world.abort()
            thread.submit(world.close)

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._number = number
        try:
            answer = getattr(self, method)(*arguments)
        except WorldError as error:
            answer = error
        except ValueError as error:
            answer = WorldError(str(error))
        except Exception:
            answer = WorldError(traceback.format_exc())
        with contextlib.suppress(*LOST):  # `serve` reads the connection, notices too, and ends this process
            self._connection.send((number, answer))

    def start(self, backend: str) -> dict[str, Any]:
        """Start a fork server and return its facts."""
        if backend not in self._worlds:
            self._worlds[backend] = ForkedWorld(self._target_spec, entry=self._entry, backend=backend)
        return self._worlds[backend].start()

    def keep(self, name: str, files: Mapping[str, bytes | None]) -> None:
        """Keep a variant's inputs, which cells then refer to by `name`."""
        folder = Path(tempfile.mkdtemp(dir=self._folder, prefix=name))  # what it holds under this name may be changed
        unpack(files, folder)
        # One entry below each key: the file or folder, by its own name.
        self._inputs[name] = GivenInputs.protect(folder, {path.name: next(path.iterdir()) for path in folder.iterdir()})

    def fork(
        self, backend: str, name: str, request: CellRun, places: Mapping[int, Place]
    ) -> tuple[RunOutcome, dict[str, bytes | None]]:
        """Run this process's rank of a cell in the world of this backend.

        `FINISHED` is sent when it has done its work. Rank 0 takes the inputs of the request and writes its record where
        it says; others use those they keep under `name`, and return their record.
        """
        rank = self.place.rank
        local = {r: places[r].local for r in request.part.ranks if places[r].node == self.place.node}
        request = replace(request, part=replace(request.part, ranks=(rank,), local=local))
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="cell", ignore_cleanup_errors=True) as here:
            own = self._inputs[name] if rank else None
            if own:
                request = replace(request, cell_dir=Path(here), inputs=own.paths)
            outcome = self._worlds[backend].fork(request, self._finished)
            if outcome.error:
                raise WorldError(outcome.error)
            if own:
                outcome = replace(outcome, written=own.written())
            return outcome, pack({"": rank_dir(request.cell_dir, rank)}) if rank else {}

    def _finished(self) -> None:
        self._connection.send((self._number, FINISHED))


def installed(target_spec: str) -> dict[str, str]:
    """What must be the same in all processes, read without importing it: the target's name, versions, sources."""
    found = {"target": target_spec, **versions()}
    found |= {name: version_of(name) or "not installed" for name in ("moeref", "transformer-engine", "deep_ep")}
    for module in ("moeref_conformance", "moeref", target_spec.partition(":")[0].partition(".")[0]):
        spec = importlib.util.find_spec(module)
        if spec is not None:
            roots = [Path(place) for place in spec.submodule_search_locations or [spec.origin or os.devnull]]
            found[f"source of {module}"] = _digest(roots)
    return found


def _digest(roots: list[Path]) -> str:
    """Twelve hex digits over the sources in some folders, or in single files."""
    digest = hashlib.sha256()
    for root in roots:
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.suffix in (".py", ".toml", ".json"):
                digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
