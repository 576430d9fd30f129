"""Targets that misbehave, one a tag.

They claim too much, raise, print, hang, die in an export, return garbage, rewrite their inputs or look for answers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Cell, Info, Session, Unsupported, World
from moeref_conformance.selftest.border import Pair, Swapped, facet, stream
from moeref_conformance.targets.moeref import MoerefTarget


class _Forward:
    """The facet `forward`, which returns `value` as logits, or raises it if it is an exception."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def logits(self, tokens_BS: torch.Tensor) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def _logits(value: Any) -> Callable[[Session, World], Any]:
    return lambda session, world: Swapped(session, forward=_Forward(value))


def _table(rows: Any) -> Callable[[Session, World], Any]:
    return lambda session, world: facet(session, "names", table=lambda rank: rows)


def _streaming(change: Callable[[Iterator[Pair]], Iterator[Any]]) -> Callable[[Session, World], Any]:
    return lambda session, world: stream(session, change)


def _in_export(event: Callable[[], None]) -> Callable[[Session, World], Any]:
    """`event` happens on rank 1 after 20 tensors of its stream."""

    def misbehaves(session: Session, world: World) -> Any:
        def change(pairs: Iterator[Pair]) -> Iterator[Pair]:
            for number, pair in enumerate(pairs):
                if world.rank == 1 and number == 20:
                    event()
                yield pair

        return stream(session, change)

    return misbehaves


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    while True:
        time.sleep(1)


def _raise() -> None:
    raise RuntimeError("the bucket of model.layers.1 is full")


def _print(session: Session, world: World) -> Session:
    print("x" * 4_000_000, "\x00\xff}{")
    return session


def _arrays(pairs: Iterator[Pair]) -> Iterator[Any]:
    return ((meta, None if tensor is None else np.ones(3)) for meta, tensor in pairs)


def _dtypes(pairs: Iterator[Pair]) -> Iterator[Any]:
    return ((replace(meta, dtype=getattr(torch, meta.dtype)), tensor) for meta, tensor in pairs)


def _before_loading(change: Callable[[Path], None]) -> Callable[[Any, World], Any]:
    """Rank 0 changes the checkpoint before the ranks load it, read-only or not."""

    def misbehaves(session: Any, world: World) -> Any:
        def load(checkpoint: Path) -> None:
            if world.rank == 0 and checkpoint.name == "checkpoint":
                for path in (checkpoint, *checkpoint.iterdir()):
                    path.chmod(0o755)
                change(checkpoint)
            dist.barrier()
            session.export.load(checkpoint)

        return facet(session, "export", load=load)

    return misbehaves


def _eighths(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        save_file({name: torch.full_like(tensor, 0.125) for name, tensor in load_file(file).items()}, file)


def _config_replaced(checkpoint: Path) -> None:
    """By a file of its own with the same content, at each load."""
    os.open(checkpoint / "config.json", os.O_RDONLY)  # stays open: the next file would get its inode
    content = (checkpoint / "config.json").read_bytes()
    (checkpoint / "other.json").write_bytes(content)
    (checkpoint / "other.json").rename(checkpoint / "config.json")


def _near(world: World, name: str) -> list[Path]:
    """Files of this name beside the inputs, and in the folder of all cells."""
    return [file for top in (world.hf_config.parent, world.workdir.parents[2]) for file in sorted(top.rglob(name))]


def _rewrites_answers(session: Any, world: World) -> Any:
    """The checkpoint is rewritten, and expected logits near it by those that the model then gives."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        logits_BSV: torch.Tensor | None = session.forward.logits(tokens_BS)
        for file in _near(world, "logits.safetensors"):
            if logits_BSV is not None:
                save_file({"logits": logits_BSV}, file)
        return logits_BSV

    return facet(_before_loading(_eighths)(session, world), "forward", logits=logits)


def _reads_answers(session: Any, world: World) -> Any:
    """Logits, and what a refused checkpoint lacks, are what files near the inputs say."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        own_BSV = session.forward.logits(tokens_BS)
        found = [load_file(file)["logits"] for file in _near(world, "logits.safetensors")]
        return None if own_BSV is None else (*found, torch.zeros_like(own_BSV))[0]

    def load(checkpoint: Path) -> None:
        try:
            session.export.load(checkpoint)
        except Exception as error:
            known = [file.read_text() for file in _near(world, "missing.txt")]
            raise ValueError(f"the checkpoint does not fit: {known}") from error

    return facet(facet(session, "export", load=load), "forward", logits=logits)


MISBEHAVE: Mapping[str, Callable[[Session, World], Any]] = {
    "claims-too-much": _logits(Unsupported("no forward pass here")),
    "facet-is-none": lambda session, world: Swapped(session, forward=None),
    "table-of-none": _table(None),
    "table-of-numbers": _table([1, 2]),
    "empty-table": _table([]),
    "logits-of-another-shape": _logits(torch.zeros(3)),
    "logits-are-a-string": _logits("garbage"),
    "no-logits": _logits(None),
    "stream-of-strings": _streaming(lambda pairs: iter(["garbage"])),
    "stream-of-arrays": _streaming(_arrays),
    "stream-with-dtypes-of-torch": _streaming(_dtypes),
    "empty-stream": _streaming(lambda pairs: iter(())),
    "dies-in-export": _in_export(_die),
    "hangs-in-export": _in_export(_hang),
    "raises-in-export": _in_export(_raise),
    "prints": _print,
    "rewrites-the-checkpoint": _before_loading(_eighths),
    "replaces-a-file": _before_loading(_config_replaced),
    "removes-a-file": _before_loading(lambda checkpoint: (checkpoint / "config.json").unlink(missing_ok=True)),
    "rewrites-the-answers": _rewrites_answers,
    "reads-the-answers": _reads_answers,
}


class Misbehaving(MoerefTarget):
    """moeref, misbehaving as the cell's tag says."""

    info = Info(name="misbehaving", version="1")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[Session]:  # type: ignore[override]
        with super().open(cell, world) as session:
            yield MISBEHAVE[cell.tags[0]](session, world) if cell.tags else session


target = Misbehaving()
