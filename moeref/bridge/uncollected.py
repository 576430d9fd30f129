"""Building many objects that stay, without the garbage collector, which would look at all of them again and again."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def uncollected(build: Callable[P, T]) -> Callable[P, T]:
    """`build` with the collector of cycles off, if it was on. Nothing that it makes is a cycle."""

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return build(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return built
