"""For torch's fake process group: wide worlds in which only the groups of one rank are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def own_groups(rank: int) -> Iterator[None]:
    """`new_group` makes no group that lacks `rank`. It returns the mark that torch returns, which reads them all."""
    real = dist.new_group

    def new_group(ranks: list[int] | None = None, **more: Any) -> Any:
        if ranks is None or rank in ranks:
            return real(ranks, **more)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = real
