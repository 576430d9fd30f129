"""A full disk: a failure of the machine, which a rank meets wherever it writes."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from moeref_conformance.contract.records import Crash

#: How Python, safetensors and torch tell of it, in whatever raised last.
TOLD = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
LEAST = 1 << 20  # bytes: with less, ranks cannot even record why they failed


def full_disk(crashes: Sequence[Crash], folder: Path) -> str:
    """What to do about the full disk that ended ranks whose records are in `folder`; empty if none did."""
    if not crashes:
        return ""
    told = next((crash.detail for crash in crashes if is_full(crash.detail)), "")
    place = os.statvfs(folder)
    free = place.f_bavail * place.f_frsize
    if not told and free >= LEAST:
        return ""
    return (
        f"a disk is full, so the cell says nothing about the target: {free >> 20} MiB are free for records in "
        f"{folder.parent} (TMPDIR or --keep names another place). {told}".rstrip()
    )


def is_full(told: str) -> bool:
    """Whether an error, or what a rank printed, says so."""
    return any(text in told for text in TOLD)
