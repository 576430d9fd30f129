"""A worker: one process of torchrun, which forks its rank of a cell when the coordinator asks for it.

The coordinator, in the process of rank 0, asks with a "number" that the answer repeats:

- {"start": backend}: start a fork server. {"ready": facts}
- {"inputs": name}, with the files. {"have": name}
- {"cell": ...}: fork this process's rank. {"finished": true} when it has done its work, then {"exits", "seconds",
  "strays"} with its record.

Where the kit itself fails, the answer is {"error": text}. These get no answer: {"end": true} and {"leave": true}, as
in `ForkedWorld`, {"close": backend} and {"stop": true}. Losing rank 0 is treated as "stop". The process of rank 0 has a
worker too, in a thread.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeref_conformance.contract.api import Claims
from moeref_conformance.contract.records import rank_dir
from moeref_conformance.contract.results import version_of, versions
from moeref_conformance.worlds.fork_server import cell_from
from moeref_conformance.worlds.forked import ENTRY, ForkedWorld, Part, WorldError
from moeref_conformance.worlds.messages import Gone, Line, pack, unpack


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
    """Serves one line. `target_spec` is what every process of torchrun got on its command line."""

    def __init__(self, place: Place, target_spec: str, line: Line, entry: str = ENTRY) -> None:
        self.place, self._target_spec, self._line, self._entry = place, target_spec, line, entry
        self._worlds: dict[str, ForkedWorld] = {}
        self._inputs: dict[str, dict[str, str]] = {}
        self._cells = 0

    def serve(self) -> bool:
        """Answer until told to stop (True) or until rank 0 is gone (False). No process and no file is left."""
        folder = tempfile.TemporaryDirectory(prefix="moeref-conformance-", ignore_cleanup_errors=True)
        with folder, ThreadPoolExecutor(1) as thread:
            try:
                while True:
                    message, load = self._line.receive()
                    if "stop" in message:
                        return True
                    if "close" in message and (closing := self._worlds.get(message["close"])):
                        closing.abort()
                        thread.submit(closing.close)
                    elif not self._told(message):
                        thread.submit(self._answer, message, load, Path(folder.name))
            except Gone:
                return False
            finally:
                for world in list(self._worlds.values()):
                    world.abort()
                thread.shutdown()
                for world in self._worlds.values():
                    world.close()
                self._line.close()

    def _told(self, message: Mapping[str, Any]) -> bool:
        """Handle a message without an answer, even while the other thread runs a cell; False for other messages."""
        for word in ("end", "leave"):
            if word in message:
                for world in list(self._worlds.values()):
                    getattr(world, word)()
                return True
        return False

    def _answer(self, message: Mapping[str, Any], load: bytes, folder: Path) -> None:
        try:
            try:
                answer, record = self._do(message, load, folder)
            except Gone:
                raise
            except (WorldError, ValueError) as error:
                answer, record = {"error": str(error)}, b""
            except Exception:
                answer, record = {"error": traceback.format_exc()}, b""
            self._line.send({**answer, "number": message["number"]}, record)
        except Gone:
            pass  # `serve` reads the line, notices too, and ends this process

    def _do(self, message: Mapping[str, Any], load: bytes, folder: Path) -> tuple[dict[str, Any], bytes]:
        if "start" in message:
            backend = message["start"]
            if backend not in self._worlds:
                self._worlds[backend] = ForkedWorld(self._target_spec, entry=self._entry, backend=backend)
            return {"ready": self._worlds[backend].start()}, b""
        if "inputs" in message:
            name = message["inputs"]
            where = folder / f"inputs-{name}"
            unpack(load, where)
            # One entry below each key: the file or folder, by its own name.
            self._inputs[name] = {path.name: str(next(path.iterdir())) for path in where.iterdir()}
            return {"have": name}, b""
        return self._run(message, folder)

    def _run(self, message: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
        """Run this process's rank of a cell. Rank 0 writes its record where the runner reads it; others send theirs."""
        cell, rank = cell_from(message["cell"]), self.place.rank
        world = self._worlds[cell.backend]
        world.deadline, world.grace = message["deadline"], message["grace"]
        inputs, cell_dir = message.get("files"), message.get("cell_dir")
        part = Part(
            ranks=(rank,),
            local={int(r): index for r, index in message["local"][str(self.place.node)].items()},
            store=(message["store"][0], message["store"][1]),
            prefix=message["prefix"],
            finished=lambda: self._line.send({"finished": True, "number": message["number"]}),
        )
        self._cells += 1
        here = tempfile.TemporaryDirectory(dir=folder, prefix=f"cell{self._cells}-", ignore_cleanup_errors=True)
        with here:
            outcome = world.run(
                cell,
                Path(cell_dir or here.name),
                inputs or self._inputs[message["inputs_of"]],
                _claims(world.start()["claims"]),
                part if cell.layout.world > 1 else None,
            )
            if outcome.error:
                return {"error": outcome.error}, b""
            record = b"" if cell_dir else pack({"": rank_dir(Path(here.name), rank)})
        exits = [asdict(end) for end in outcome.exits]
        return {"exits": exits, "seconds": outcome.seconds, "strays": outcome.strays}, record


def _claims(plain: Mapping[str, Any]) -> Claims:
    """The Claims that `api.to_plain` wrote."""
    sets: dict[str, Any] = {key: frozenset(value) for key, value in plain.items() if isinstance(value, list)}
    return Claims(**{**plain, **sets})


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
