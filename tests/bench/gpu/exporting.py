"""Export of a model of several GB to host memory: GB/s and tensors/s, next to what the link itself allows.

The link's own limit is one copy of as many bytes into pinned memory. Between the two are one copy into pageable memory,
and the finished full tensors copied one by one with nothing to assemble.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeref.exporter import Plan, export
from tests.bench.gpu import models
from tests.bench.gpu.figures import Disagreement, Figure, ratio, timed


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Rates of each way, and the time of each over that of the pinned copy."""
    built = models.made(sizes.model(layers=sizes.layers), device)
    chunk, plan = built.chunks[0], Plan(built.shard_map)
    fulls = [full for _, full in export(plan, 0, built.chunks) if full is not None]
    total = sum(t.nbytes for t in fulls)
    if spoil:
        fulls[-1].view(torch.uint8).bitwise_xor_(1)
    if bytes_sum(fulls) != bytes_sum(list(chunk.parameters())):
        raise Disagreement("the bytes of the exported tensors are not those of the model")
    flat = torch.empty(total, dtype=torch.uint8, device=device).random_(0, 256)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pageable = torch.zeros(total, dtype=torch.uint8)  # touched, so that no page is missing
    fill_pinned = partial(_fill, plan, built, device, pinned)
    fill_pinned()
    if bytes_sum([pinned]) != bytes_sum([t.reshape(-1).view(torch.uint8) for t in fulls]):
        raise Disagreement("what arrived in pinned memory is not what was exported")
    copied = partial(_to_host, device)
    ways: dict[str, Callable[[], Any]] = {
        "one copy into pinned memory": lambda: pinned.copy_(flat),
        "one copy into pageable memory": lambda: pageable.copy_(flat),
        "finished tensors, one `.cpu()` each": lambda: [copied(t) for t in fulls],
        "export, assembled on the device only": partial(_stream, plan, built, device, lambda full: None),
        "export, one `.cpu()` each": partial(_stream, plan, built, device, copied),
        "export into pinned memory": fill_pinned,
    }
    times = timed(device, *ways.values(), rounds=min(sizes.rounds, 5), warmup=1)
    link, *others = times
    found = [Figure("model", total / 1e9, "GB", note=f"{len(fulls)} tensors")]
    for name, taken in zip(ways, times, strict=True):
        note = f"{len(fulls) / taken.seconds:.3g} tensors/s" if name not in list(ways)[:2] else ""
        found.append(Figure(name, total / 1e9 / taken.seconds, "GB/s", note=note))
    return [*found, *(ratio(n, t, link, next(iter(ways))) for n, t in zip(list(ways)[1:], others, strict=True))]


def _stream(plan: Plan, built: models.Built, device: torch.device, into: Callable[[torch.Tensor], Any]) -> None:
    for _, full in export(plan, 0, built.chunks):
        if full is not None:
            into(full)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fill(plan: Plan, built: models.Built, device: torch.device, pinned: torch.Tensor) -> None:
    at = 0

    def into(full: torch.Tensor) -> None:
        nonlocal at
        raw = full.reshape(-1).view(torch.uint8)
        pinned[at : at + raw.numel()].copy_(raw, non_blocking=True)
        at += raw.numel()

    _stream(plan, built, device, into)


def _to_host(device: torch.device, full: torch.Tensor) -> torch.Tensor:
    """A copy on the host, also where the tensor is there already."""
    return full.cpu() if device.type == "cuda" else +full


def bytes_sum(tensors: list[torch.Tensor]) -> int:
    """The sum of all bytes, each tensor's weighted by nothing: the same however they are cut and ordered."""
    return sum(int(_sum(t.detach().reshape(-1).view(torch.uint8))) for t in tensors)


def _sum(raw: torch.Tensor) -> torch.Tensor:
    # A sum of uint8 makes int64 as it goes, not beforehand.
    return raw.sum(dtype=torch.int64)
