"""How the processes of torchrun talk: messages over one connection each, and folders packed into them.

A message is a line of JSON, and after it bytes if it carries any. A connection that is closed, or whose machine no
longer answers, is gone: the kernel says so, also between messages.
"""

from __future__ import annotations

import io
import json
import socket
import tarfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path, PurePosixPath
from typing import Any

#: Bytes one message may carry: the record of a rank of a tiny model is some megabytes.
MOST = 2 << 30
#: Files with a rank's output, and how many bytes of their end are sent.
PRINTED, PRINTED_MOST = ("stdout.txt", "stderr.txt"), 1 << 20
#: A machine that has not answered for this long, in seconds, is gone: idle, between probes, and with data under way.
IDLE, INTERVAL, PROBES = 5, 2, 5


class Gone(ConnectionError):
    """The other end of a line is gone."""


class Line:
    """One end of a connection. Any thread may send, one at a time receives."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    @classmethod
    def over(cls, connected: socket.socket) -> Line:
        """The line over a connected TCP socket, which it takes over."""
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
        return cls(Connection(connected.detach()))

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """Both ends of a line within this process."""
        here, there = Pipe()
        return cls(here), cls(there)

    def send(self, message: Mapping[str, Any], load: bytes = b"") -> None:
        """Send a message. Raises Gone if the line is lost. If interrupted, closes it, as half a message may be sent."""
        with self._lock:
            try:
                self.connection.send_bytes(json.dumps(message).encode() + b"\n" + load)
            except OSError as error:
                raise Gone(str(error)) from error
            except BaseException:
                self.connection.close()
                raise

    def receive(self, most: int = MOST) -> tuple[dict[str, Any], bytes]:
        """The next message and the bytes it carries; waits for it. Raises Gone, also for one of over `most` bytes."""
        try:
            data = self.connection.recv_bytes(most)
        except EOFError:
            raise Gone("its connection was closed") from None
        except OSError as error:
            raise Gone(str(error)) from error
        head, _, load = data.partition(b"\n")
        message: dict[str, Any] = json.loads(head)
        return message, load

    def close(self) -> None:
        """Close this end, so that the other end raises Gone. Safe to call more than once."""
        with self._lock:
            self.connection.close()


def pack(paths: Mapping[str, Path]) -> bytes:
    """Files and folders as a tar file in memory, each by its own name below its key, which may be empty.

    A rank's scratch folder is left out. Raises ValueError if there is too much to send.
    """
    size, out = 0, io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key, path in ((key, path.resolve()) for key, path in paths.items()):
            inside = [path]
            if path.is_dir():
                top = tarfile.TarInfo(str(PurePosixPath(key, path.name)))  # even if nothing is in it
                top.type, top.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(top)
                inside = sorted(p for p in path.rglob("*") if p.is_file())
            for file in inside:
                relative = file.relative_to(path.parent)
                if relative.parts[1:2] == ("scratch",):
                    continue
                start = max(0, file.stat().st_size - PRINTED_MOST) if file.name in PRINTED else 0
                info = tarfile.TarInfo(str(PurePosixPath(key, relative)))
                info.size = file.stat().st_size - start
                size += info.size
                if size > MOST * 9 // 10:
                    raise ValueError(f"{path} has more than {MOST >> 30} GiB, too much to send to another machine")
                with file.open("rb") as data:
                    data.seek(start)
                    tar.addfile(info, data)
    return out.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """What `pack` packed, below `folder`; nothing is written outside it."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        tar.extractall(folder, filter="data")
