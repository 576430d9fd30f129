"""What a target warns of: by `warnings`, or by `logging` from level WARNING on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: Warnings kept, and characters of each.
MOST, LENGTH = 100, 10_000


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the texts of all warnings until the end of the block. Loggers pass them on as before."""
    texts: list[str] = []
    keeper = _Keeper(texts)
    # A logger that does not propagate would keep its records to itself.
    loggers = [logging.getLogger(), *(logger for logger in _loggers() if not logger.propagate)]
    for logger in loggers:
        logger.addHandler(keeper)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield texts
    finally:
        texts += [str(warning.message) for warning in caught]
        texts[:] = [text[:LENGTH] for text in texts[:MOST]]
        for logger in loggers:
            logger.removeHandler(keeper)


class _Keeper(logging.Handler):
    """Appends each record's message to a list."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def _loggers() -> list[logging.Logger]:
    return [entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)]
