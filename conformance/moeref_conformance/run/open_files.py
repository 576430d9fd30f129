"""The limit of open files, which ranks inherit: connections of every process group count against it."""

from __future__ import annotations

import resource

from moeref_conformance.contract.checks import BadInput

#: Enough for imports, and for eight ranks with all groups of a layout over gloo.
NEEDED = 512


def allow_open_files(needed: int = NEEDED) -> None:
    """Raise the soft limit to the hard one, if it is lower than `needed`. Raises `BadInput` if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _least(soft) >= needed:
        return
    if _least(hard) < needed:
        raise BadInput(
            f"processes may open {hard} files here, and a run needs {needed}: raise the hard limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _least(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
