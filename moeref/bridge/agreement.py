"""Work that all ranks of a group begin and end together, or not at all.

A rank that refuses on its own would leave the others waiting for it, or with half of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moeref.bridge.regions import BridgeError
from moeref.layout import Layout

#: What a rank sends that refuses; digests are not negative.
_REFUSED = -1
#: The most bytes of a rank's error that the others get.
_TEXT = 480


@contextmanager
def all_or_none(
    digest: int, device: torch.device, group: dist.ProcessGroup | None, error: Callable[[str], Exception]
) -> Iterator[None]:
    """Run the block on every rank of `group`. If one raises, all do.

    After the block one 8-byte all-gather compares what the ranks say. A rank whose block raised raises its own error.
    Another rank raises `error(reason)` if any rank raised or has another `digest` of its work. A process that is not in
    the group, or alone in it, compares nothing.
    """
    refused: Exception | None = None
    try:
        yield
    except Exception as mine:
        refused = mine
    said = _gathered(_REFUSED if refused else digest, device, group)
    if refused:
        raise refused
    others = [rank for rank, one in enumerate(said) if one != digest]
    if others:
        is_refusal = any(said[rank] == _REFUSED for rank in others)
        raise error(f"ranks {others} {'refused (their own error says why)' if is_refusal else 'plan otherwise'}")


def _gathered(mine: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    if not dist.is_initialized() or dist.get_world_size(group) <= 1:
        return []
    sent = torch.tensor([mine], dtype=torch.int64, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [int(one) for one in received]


def failures(mine: str, device: torch.device, group: dist.ProcessGroup | None) -> dict[int, str]:
    """Why ranks of `group` failed, by rank, the same on all of them: one all-gather at the end of common work.

    Every rank calls it, with an empty text if it did not fail. A text is cut after _TEXT bytes.
    """
    if not dist.is_initialized() or dist.get_world_size(group) <= 1:
        return {0: mine} if mine else {}
    raw = mine.encode(errors="replace")[:_TEXT].ljust(_TEXT, b"\0")
    sent = torch.tensor(list(raw), dtype=torch.uint8, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    texts = (bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in received)
    return {rank: text for rank, text in enumerate(texts) if text}


def check_place(layout: Layout, rank: int, group: dist.ProcessGroup | None) -> None:
    """Raise BridgeError unless `group` has the ranks of `layout` and this process is `rank` of it."""
    size, here = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
    if here < 0:
        raise BridgeError(f"rank {rank} of {layout.text}: this process is not in the group")
    if (size, here) != (layout.world, rank):
        raise BridgeError(
            f"rank {rank} of {layout.text}, which has {layout.world} ranks: this process is rank {here} of a group of "
            f"{size}; give the group that holds the layout's ranks in order"
        )


def device_of(chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors that `group` exchanges are made: with the parameters, unless these are on the host and the group is
    NCCL's, which cannot send from there. Then on the current CUDA device."""
    held = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    here = dist.get_rank(group) if dist.is_initialized() else -1
    if held.type == "cpu" and here >= 0 and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return held
