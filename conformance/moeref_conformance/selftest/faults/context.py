"""Bugs of context parallelism: how a sequence is split, what each part attends to, and how the parts are joined.

Megatron splits a sequence into 2·CP chunks, of which CP rank r computes chunks r and 2·CP-1-r ("zigzag").
"""

from __future__ import annotations

from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell


def zigzag(length: int, cp: int) -> torch.Tensor:
    """Positions `[S]` in the order in which the CP ranks hold them, rank by rank."""
    chunks_S = torch.arange(length).chunk(2 * cp)
    return torch.cat([chunks_S[i] for rank in range(cp) for i in (rank, 2 * cp - 1 - rank)])


def _cut_in_runs(session: Session, cell: Cell, world: World) -> Any:
    """Each CP rank takes one run of the tokens and treats them as those at its zigzag positions."""
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        order_S, taken_BS = zigzag(tokens_BS.shape[1], cell.layout.cp), torch.empty_like(tokens_BS)
        taken_BS[:, order_S] = tokens_BS
        found_BSV = good.logits(taken_BS)
        return None if found_BSV is None else found_BSV[:, order_S]

    return facet(session, "forward", logits=logits)


def _joined_by_rank(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found_BSV = good.logits(tokens_BS)
        return None if found_BSV is None else found_BSV[:, zigzag(tokens_BS.shape[1], cell.layout.cp)]

    return facet(session, "forward", logits=logits)


def _own_keys_alone(session: Session, cell: Cell, world: World) -> Session:
    """Attention is computed again over this rank's part of the sequence, whose positions ascend."""

    def attend(module: Any, args: tuple[Any, ...], out: Any) -> torch.Tensor:
        query_BHSQ, key_BHSQ, value_BHSV = (part_SBHC.permute(1, 2, 0, 3) for part_SBHC in args[:3])
        found_BHSV = torch.nn.functional.scaled_dot_product_attention(
            query_BHSQ, key_BHSQ, value_BHSV, is_causal=True, scale=module.softmax_scale
        )
        return found_BHSV.permute(2, 0, 1, 3).flatten(2)

    for chunk in session.export.chunks() if session.export else ():
        for attention in chunk.modules():
            if hasattr(attention, "core_attention"):
                core: Any = attention.core_attention
                core.register_forward_hook(attend)
    return session


FAULTS = (
    Fault(
        id="tokens-cut-in-runs",
        bug="ms-swift#5683 in kind: tokens are cut in runs, rotary embeddings zigzag",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "cp2-pp2"),
        wrap=_cut_in_runs,
    ),
    Fault(
        id="keys-of-the-own-rank",
        bug="slime#1737 in kind: context parallelism is dropped, each rank attends to its own keys alone",
        rules=("FWD-002",),
        diagnosis="hidden states differ from the attention of layer 0 on",
        also=("FWD-001",),
        cell=cell("deepseek_v3", "tp2-cp2-ep2", layers=3),
        wrap=_own_keys_alone,
    ),
    Fault(
        id="logits-joined-by-rank",
        bug="ms-swift#10071: parts are joined in another order than they were cut in",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "cp2-pp2"),
        wrap=_joined_by_rank,
        diagnosis="positions in the order",
    ),
)
