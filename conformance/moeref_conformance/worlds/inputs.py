"""The inputs of a cell as its ranks get them: read-only copies, hashed before and compared after.

Nothing lies beside the copies, and judges read the originals. So a target that writes to what it was given changes no
expected value and no other cell, and is told.
"""

from __future__ import annotations

import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from moeref_conformance.contract.exits import RunOutcome


@dataclass(frozen=True)
class _State:
    """One file or folder, not through a link. `content` is the hash of a file, empty for anything else."""

    mode: int
    inode: int
    size: int
    changed: int  # nanoseconds
    content: str

    @classmethod
    def of(cls, path: Path) -> _State:
        about = path.lstat()
        regular = path.is_file() and not path.is_symlink()
        return cls(about.st_mode, about.st_ino, about.st_size, about.st_mtime_ns, _hash(path) if regular else "")


@dataclass(frozen=True)
class GivenInputs:
    """Inputs below `folder` that ranks may read: `paths` by name, and the states in which they were given."""

    folder: Path
    paths: dict[str, str]
    before: Mapping[str, _State]

    @classmethod
    def protect(cls, folder: Path, paths: Mapping[str, Path]) -> GivenInputs:
        """Make everything below `folder` read-only, and remember it."""
        for path in folder.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        return cls(folder, {name: str(path) for name, path in paths.items()}, _states(folder))

    def written(self) -> tuple[str, ...]:
        """What is no longer as it was given, such as `checkpoint/config.json was changed`. Empty: all is."""
        now, said = _states(self.folder), dict[str, str]()
        for name in sorted(self.before.keys() | now.keys()):
            if self.before.get(name) != now.get(name):
                said[name] = _what(self.before.get(name), now.get(name))
        # Of a folder whose entries tell why it differs, nothing more is said.
        folders = {str(parent) for name in said for parent in Path(name).parents}
        return tuple(f"{name} {what}" for name, what in said.items() if name not in folders)


@contextmanager
def given(inputs: Mapping[str, str], beside: Path | None = None) -> Iterator[GivenInputs]:
    """Copies of these files and folders in a folder of their own, below `beside`, for one cell."""
    with tempfile.TemporaryDirectory(prefix="moeref-inputs-", dir=beside, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        paths = {key: folder / Path(path).resolve().name for key, path in inputs.items()}
        for key, path in inputs.items():
            if Path(path).is_dir():
                shutil.copytree(path, paths[key], copy_function=shutil.copyfile)
            else:
                shutil.copyfile(path, paths[key])
        yield GivenInputs.protect(folder, paths)


class Copies(ExitStack):
    """Copies for the cells of a run. One that a cell has left as it was serves the next cell with the same inputs.

    They lie below `folder`, which goes with the run even where a cell is broken off.
    """

    def __init__(self, folder: Path | None = None, most: int = 4) -> None:
        super().__init__()
        self._folder, self._most, self._lock = folder, most, threading.Lock()
        self._kept: list[tuple[Mapping[str, str], GivenInputs, ExitStack]] = []
        self.callback(self._drop, 0)

    def run(self, inputs: Mapping[str, str], run: Callable[[dict[str, str]], RunOutcome]) -> RunOutcome:
        """What `run` gives for the paths of a copy, and what was written to it."""
        own, held = self._take(inputs)
        with held:
            outcome = run(dict(own.paths))
            written = own.written()
            if not written and not outcome.error:
                with self._lock:
                    self._kept.append((inputs, own, held.pop_all()))
        self._drop(self._most)
        return replace(outcome, written=(*written, *outcome.written))

    def _take(self, inputs: Mapping[str, str]) -> tuple[GivenInputs, ExitStack]:
        with self._lock:
            for kept in self._kept:
                if kept[0] == inputs:
                    self._kept.remove(kept)
                    return kept[1:]
        held = ExitStack()
        return held.enter_context(given(inputs, self._folder)), held

    def _drop(self, most: int) -> None:
        """Remove the copies that were kept first, until there are no more than `most`."""
        with self._lock:
            while len(self._kept) > most:
                self._kept.pop(0)[2].close()


def fingerprint(inputs: Mapping[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Key, relative name and hash of every file: equal for equal inputs, wherever they are."""
    return tuple(
        (key, str(file.relative_to(path)), _hash(file))
        for key, path in sorted(inputs.items())
        for file in sorted([Path(path), *Path(path).rglob("*")])
        if file.is_file()
    )


def _states(folder: Path) -> dict[str, _State]:
    return {str(path.relative_to(folder)): _State.of(path) for path in folder.rglob("*")}


def _what(before: _State | None, now: _State | None) -> str:
    if before is None:
        return "was added"
    if now is None:
        return "was removed"
    same = before.inode == now.inode and stat.S_IFMT(before.mode) == stat.S_IFMT(now.mode)
    return "was changed" if same else "was replaced"


def _hash(file: Path) -> str:
    try:
        return xxhash.xxh3_64_hexdigest(file.read_bytes())
    except OSError as error:  # a target may have taken away the right to read it
        return type(error).__name__
