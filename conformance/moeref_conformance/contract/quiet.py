"""Keeps what packages say while they are imported off the terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """No warnings of megatron-core, torch and transformers, unless Python was asked for some (`-W`, PYTHONWARNINGS)."""
    if sys.warnoptions:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
