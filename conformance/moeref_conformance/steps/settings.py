"""The record `settings`: which steps leave other settings of torch than they found, which hold for all later code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")
#: How torch is asked for the dtype of new tensors.
DTYPE = "torch.get_default_dtype()"


def of_torch() -> dict[str, str]:
    """What torch says of new tensors and of gradients, by how it is asked. In inference mode grad mode is off too."""
    return {
        DTYPE: str(torch.get_default_dtype()),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),
    }


class Settings:
    """What steps leave otherwise than they found it and than the session was made with. `left` has step, setting and
    both values. Making the session may set all but the default dtype.
    """

    def __init__(self) -> None:
        self.left: list[list[str]] = []
        self._first = _all()

    def opened(self) -> None:
        """Begin: the session is made."""
        self._compare("open", self._first, [DTYPE])
        self._first = _all() | {DTYPE: self._first[DTYPE]}

    def around(self, step: str, action: Callable[[], T]) -> T:
        """What `action` gives. A step that raises is no finding: it ends the rank, or is a refusal."""
        before = _all()
        answer = action()
        self._compare(step, before, before)
        return answer

    def _compare(self, step: str, before: dict[str, str], names: Iterable[str]) -> None:
        after = _all()
        changed = [name for name in names if after[name] not in (before[name], self._first[name])]
        self.left += [[step, name, before[name], after[name]] for name in changed]


def _all() -> dict[str, str]:
    casts = {f"torch.is_autocast_enabled({of!r})": str(torch.is_autocast_enabled(of)) for of in ("cpu", "cuda")}
    return of_torch() | casts
