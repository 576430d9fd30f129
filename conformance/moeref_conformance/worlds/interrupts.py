"""Signals that ask a process to stop: Ctrl-C, SIGTERM from a scheduler, SIGHUP when the terminal is gone."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raised(
    make: Callable[[], BaseException] = KeyboardInterrupt, numbers: tuple[signal.Signals, ...] = STOPS
) -> Iterator[list[int]]:
    """The first of these signals raises an error in the main thread; later ones are ignored. Gives those received.

    A signal that is ignored, as under nohup, stays so. In another thread nothing changes.
    """
    received: list[int] = []
    hook = sys.unraisablehook

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _leave_terminal()
        raise marked(make())  # in no variable: it would keep all frames of its traceback alive, and what they hold

    def marked(error: BaseException) -> BaseException:
        vars(error)["received"] = received
        return error

    def dropped(unraisable: Any) -> None:
        """Python drops what is raised while an object is finalised: the signal comes again a moment later."""
        if getattr(unraisable.exc_value, "received", None) is not received:
            hook(unraisable)
            return
        number = received.pop()
        signal.signal(number, handle)
        threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, number)).start()

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in numbers if main}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, handle)
        sys.unraisablehook = dropped if before else hook
        yield received
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """Send output to nowhere that went to a terminal: writing to one that is gone raises errors."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)
