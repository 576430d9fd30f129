"""Bugs of context parallelism: how a sequence is cut, what each part attends to, and how the parts are joined."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell


def _cut_in_runs(rooms: Rooms) -> Iterable[Edit]:
    sequence = rooms["layout.sequence"]
    return [Edit(sequence, "zigzag", sequence.contiguous)]


def _own_keys_alone(rooms: Rooms) -> Iterable[Edit]:
    context = rooms["megatron.context"]
    good = context.causal_mask

    def causal_mask(length: int, cp: int, cp_rank: int, device: Any) -> torch.Tensor:
        allowed: torch.Tensor = good(length, cp, cp_rank, device)
        mine = torch.arange(length, device=device) // (length // cp) == cp_rank
        return allowed & mine

    return [Edit(context, "causal_mask", causal_mask)]


def _joined_by_rank(rooms: Rooms) -> Iterable[Edit]:
    return [Edit(rooms["megatron.context"], "restore", lambda joined, cp: joined)]


FAULTS = (
    Fault(
        id="tokens-cut-in-runs",
        bug="ms-swift#5683 in kind: tokens are cut in runs, rotary embeddings zigzag",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "cp2-pp2"),
        edits=_cut_in_runs,
    ),
    Fault(
        id="keys-of-the-own-rank",
        bug="slime#1737 in kind: context parallelism is dropped, each rank attends to its own keys alone",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("deepseek_v3", "tp2-cp2-ep2", layers=3),
        edits=_own_keys_alone,
    ),
    Fault(
        id="logits-joined-by-rank",
        bug="ms-swift#10071: parts are joined in another order than they were cut in",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "cp2-pp2"),
        edits=_joined_by_rank,
        diagnosis="positions in the order",
    ),
)
