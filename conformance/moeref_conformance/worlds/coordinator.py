"""The coordinator: rank 0's connections to all processes that torchrun started.

The processes find each other through the store at MASTER_ADDR and MASTER_PORT. Each then has one connection to the
process of rank 0, so that the loss of a process is seen at once and reported with its machine.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any

from moeref_conformance.contract.checks import BadInput
from moeref_conformance.worlds.forked import ENTRY, WorldError
from moeref_conformance.worlds.messages import LOST, connection_over
from moeref_conformance.worlds.worker import Place, Worker, installed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_SECONDS = 300.0  # until all processes have come; their imports may take long on a shared file system
HELLO_SECONDS, TOKEN = 10.0, 32  # another program on the port may send nothing, or too much


class Coordinator(AbstractContextManager["Coordinator"]):
    """All processes of torchrun, seen from rank 0. `gone` has the ranks that were lost, and why."""

    def __init__(
        self,
        places: Mapping[int, Place],
        connections: Mapping[int, Connection[Any, Any]],
        worker: Worker,
        store: Store,
    ) -> None:
        self.places, self._connections = dict(places), dict(connections)
        self.gone: dict[int, str] = {}
        self._store = store  # this process may serve the store, which ends with this object
        self._number = 0
        self._worker = threading.Thread(target=worker.serve, name="worker of rank 0")
        self._worker.start()

    @classmethod
    def gather(cls, place: Place, target_spec: str, entry: str = ENTRY) -> Coordinator:
        """Wait for all others. Raises WorldError naming those that do not come, BadInput if they differ."""
        ours, theirs = Pipe()
        connections, places, found = {0: ours}, {0: place}, {0: installed(target_spec)}
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=place.size) as server:
            token = secrets.token_hex(TOKEN // 2)
            store = open_store(place)
            store.set(prefix("coordinator"), json.dumps([server.getsockname()[1], token]))
            until = time.monotonic() + JOIN_SECONDS
            while len(connections) < place.size:
                server.settimeout(max(0.001, until - time.monotonic()))
                try:
                    connection = connection_over(server.accept()[0])
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(place.size) if rank not in connections)
                    raise WorldError(f"ranks {missing} of torchrun did not come in {JOIN_SECONDS:g} s") from None
                if hello := _hello(connection, token):
                    other, facts = hello
                    connections[other.rank], places[other.rank], found[other.rank] = connection, other, facts
        coordinator = cls(places, connections, Worker(place, target_spec, theirs, entry), store)
        try:
            coordinator.alike(found)
        except BadInput:
            coordinator.close()
            raise
        return coordinator

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell all to stop. Returns when the ranks of this process are gone; other processes end theirs too."""
        self.tell(self.places, "stop")
        self._worker.join()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def host(self, rank: int) -> str:
        """The machine of a rank, with its number where several have one name; empty if there is only one."""
        place = self.places[rank]
        if len({p.node for p in self.places.values()}) == 1:
            return ""
        namesakes = {p.node for p in self.places.values() if p.host == place.host}
        return place.host if len(namesakes) == 1 else f"{place.host}#{place.node}"

    def name(self, rank: int, coords: str = "") -> str:
        """`rank 3 (tp1 pp1 on node2)`."""
        where = " on ".join(filter(None, (coords, self.host(rank) or self.places[rank].host)))
        return f"rank {rank} ({where})"

    def alike(self, found: Mapping[int, Mapping[str, str]]) -> None:
        """Raise BadInput naming what differs between the processes, and where."""
        for key in sorted(set().union(*found.values())):
            values = {rank: facts.get(key, "not there") for rank, facts in sorted(found.items())}
            odd = [rank for rank, value in values.items() if value != values[0]]
            if odd:
                told = f"{values[0]} for {self.name(0)}, {values[odd[0]]} for {self.name(odd[0])}"
                more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
                raise BadInput(f"processes of torchrun differ in {key}: {told}{more}. Install the same everywhere")

    def tell(self, ranks: Iterable[int], method: str, *arguments: Any) -> int:
        """Send a call to those still connected, as `Worker` describes. Returns the number that answers repeat."""
        self._number += 1
        for rank in ranks:
            if connection := self._connections.get(rank):
                try:
                    connection.send((self._number, method, arguments))
                except OSError as error:
                    self.lose(rank, str(error))
        return self._number

    def hear(self, ranks: Iterable[int], number: int, seconds: float) -> Iterator[tuple[int, Any]]:
        """Answers to call `number` that come from `ranks` within `seconds`, at most one from each.

        Ranks whose connection is closed are lost. Late answers to earlier calls are dropped.
        """
        waiting = {connection: rank for rank in ranks if (connection := self._connections.get(rank))}
        for ready in wait(list(waiting), seconds):
            rank = waiting[ready]  # type: ignore[index]
            try:
                answered, answer = self._connections[rank].recv()
            except LOST as error:
                self.lose(rank, str(error) or "its connection was closed")
                continue
            if answered == number:
                yield rank, answer

    def lose(self, rank: int, why: str) -> None:
        """Record that the process of this rank is gone."""
        self.gone.setdefault(rank, f"the process that torchrun started for it is gone: {why}")
        if connection := self._connections.pop(rank, None):
            connection.close()

    def ask(self, ranks: Iterable[int], method: str, *arguments: Any, seconds: float) -> dict[int, Any]:
        """The answers of all. Raises WorldError if one answers with an error, not in time, or is gone."""
        answers: dict[int, Any] = {}
        until, number = time.monotonic() + seconds, self.tell(ranks, method, *arguments)
        while waiting := set(ranks) - answers.keys():
            for rank, answer in self.hear(waiting, number, 1.0):
                if isinstance(answer, WorldError):
                    raise type(answer)(f"{self.name(rank)}: {answer}")
                answers[rank] = answer
            if time.monotonic() > until:
                for rank in waiting - answers.keys():
                    self.lose(rank, f"no answer in {seconds:g} s")
            for rank in waiting & self.gone.keys() - answers.keys():
                raise WorldError(f"{self.name(rank)}: {self.gone[rank]}")
        return answers


def join(place: Place, target_spec: str) -> Connection[Any, Any]:
    """The connection to the process of rank 0. Raises WorldError if it does not come."""
    try:
        store, until = open_store(place), time.monotonic() + JOIN_SECONDS
        while not store.check([prefix("coordinator")]):  # `store.wait` would block signals
            if time.monotonic() > until:
                raise WorldError(f"the process of rank 0 did not come in {JOIN_SECONDS:g} s")
            time.sleep(0.1)
        port, token = json.loads(store.get(prefix("coordinator")))
        connection = connection_over(socket.create_connection((address()[0], port), JOIN_SECONDS))
        connection.send_bytes(token.encode())
        connection.send((place, installed(target_spec)))
    except WorldError:
        raise
    except (OSError, RuntimeError) as error:  # torch's store errors are RuntimeErrors
        raise WorldError(f"the process of rank 0 cannot be reached at {address()[0]}: {error}") from error
    return connection


def _hello(connection: Connection[Any, Any], token: str) -> tuple[Place, dict[str, str]] | None:
    """What a process says that has connected, after the token. For another program None, and it is disconnected."""
    with contextlib.suppress(*LOST):  # it is not one of ours
        if connection.poll(HELLO_SECONDS) and hmac.compare_digest(connection.recv_bytes(TOKEN), token.encode()):
            hello: tuple[Place, dict[str, str]] = connection.recv()
            return hello
    connection.close()
    return None


def open_store(place: Place) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's own, or if there is none, one in rank 0's process."""
    from torch._C._distributed_c10d import TCPStore

    serve = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and place.rank == 0
    host, port = address()
    return TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=JOIN_SECONDS))


def address() -> tuple[str, int]:
    """Where the store is."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def prefix(name: str) -> str:
    """The kit's key `name` in the store, another one after every restart of the processes."""
    return f"moeref-conformance/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"
