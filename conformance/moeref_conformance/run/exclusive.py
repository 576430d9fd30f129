"""One run at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moeref_conformance.contract.checks import BadInput

#: What a file system answers that cannot lock folders, such as Lustre without `flock` or NFS without a lock daemon.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextmanager
def exclusive(folders: Iterable[Path]) -> Iterator[None]:
    """Make and lock folders. Raises `BadInput` for one that another run holds; the lock of a dead run is free."""
    with ExitStack() as held:
        for folder in sorted({folder.resolve() for folder in folders}):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"{folder}: another run is writing there; wait for it, or name another folder") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
        yield
