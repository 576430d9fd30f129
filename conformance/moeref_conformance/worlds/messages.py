"""How the processes of torchrun talk: one connection each, and files in messages.

Messages are pickled, as in torch.distributed and torchrun themselves. What arrives before the token is never unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import Any

#: Files with a rank's output, and how many bytes of their end are sent.
PRINTED, PRINTED_MOST = ("stdout.txt", "stderr.txt"), 1 << 20
#: A machine that has not answered for this long, in seconds, is gone: idle, between probes, and with data under way.
IDLE, INTERVAL, PROBES = 5, 2, 5
#: What a connection raises that is lost: closed, or its machine no longer answers.
LOST = (EOFError, OSError)


def connection_over(connected: socket.socket) -> Connection[Any, Any]:
    """A connection over a TCP socket, which it takes over. The kernel notices a lost one also between messages."""
    connected.settimeout(None)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, IDLE),
        (socket.TCP_KEEPINTVL, INTERVAL),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, (IDLE + INTERVAL * PROBES) * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(connected.detach())


def pack(paths: Mapping[str, Path]) -> dict[str, bytes | None]:
    """Files and folders, each by its own name below its key, which may be empty. Contents by path; None for a folder.

    A rank's scratch folder is left out.
    """
    return {
        str(PurePosixPath(key, inside.relative_to(path.resolve().parent))): _content(inside)
        for key, path in paths.items()
        for inside in _below(path.resolve())
    }


def unpack(files: Mapping[str, bytes | None], folder: Path) -> None:
    """Write what `pack` packed below `folder`."""
    for name, content in files.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def _below(path: Path) -> Iterator[Path]:
    yield path  # even if nothing is in it
    yield from (p for p in sorted(path.rglob("*")) if p.is_file() and p.relative_to(path).parts[0] != "scratch")


def _content(path: Path) -> bytes | None:
    if path.is_dir():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - PRINTED_MOST) if path.name in PRINTED else 0)
        return file.read()
