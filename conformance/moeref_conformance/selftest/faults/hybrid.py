"""Bugs that only the fused linears, zero-centred norms and fp32 parameters of Qwen3-Next and Qwen3.5 can have.

The tiny model has 8 key heads of 22 channels, 16 value heads of 10, and 8 KV groups of 2 query heads of 8 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import Pair, rearranged
from moeref_conformance.selftest.faults.base import Fault, cell

#: Channels of all queries, of all keys, of all values of a gated delta net.
_QKV = (8 * 22, 8 * 22, 16 * 10)


def _as_in_the_file(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """A rank's rows in the file's order: in_proj_qkvz (q, k, v, v, z, z for each key head), then in_proj_ba."""
    if not row.local.endswith("self_attention.in_proj.weight"):
        return None
    heads, width = 8 // world.size, 2 * 22 + 2 * 20
    qkvz = torch.arange(heads * width).view(heads, width)
    ba = torch.arange(heads * 4).view(heads, 4) + qkvz.numel()
    parts = [*torch.split(qkvz, [22, 22, 20, 20], 1), *torch.split(ba, [2, 2], 1)]
    held = torch.cat([part.flatten() for part in parts])  # for each row of the rank, its row in the file
    return torch.cat([held.argsort() + rank * len(held) for rank in range(world.size)])


def _channels_in_one_run(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """Each rank takes a contiguous part of the file's channels [q | k | v], not its part of q, of k and of v."""
    if not row.local.endswith("self_attention.conv1d.weight"):
        return None
    return _as_parts_lie(torch.arange(rows).view(world.size, -1))


def _as_parts_lie(of_ranks: torch.Tensor) -> torch.Tensor:
    """The rows [rank, (q, k, v)] that ranks hold, in the file's order: all of q, all of k, all of v."""
    q, k, v = torch.split(of_ranks, [size // len(of_ranks) for size in _QKV], 1)
    return torch.cat([q.flatten(), k.flatten(), v.flatten()])


def _projections_in_one_run(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """Each rank takes a contiguous part of in_proj_qkv [q | k | v], not its part of q, of k and of v."""
    if not row.local.endswith("self_attention.in_proj.weight"):
        return None
    of_ranks = torch.arange(rows).view(world.size, -1)
    width = sum(_QKV)
    qkv, rest = torch.split(of_ranks, [width // world.size, (rows - width) // world.size], 1)
    return torch.cat([_as_parts_lie(qkv).view(world.size, -1), rest], 1).flatten()


def _states_of_their_own(chunk: Any) -> None:
    """Every 64 tokens a gated delta net begins with a state of zeros."""

    def alone(rule: Any, *of_tokens: torch.Tensor, **others: Any) -> Any:
        along = {name for name, of in others.items() if isinstance(of, torch.Tensor)}
        parts = []
        for first in range(0, of_tokens[0].shape[1], 64):
            few = [of[:, first : first + 64] for of in of_tokens]
            more = {name: of[:, first : first + 64] if name in along else of for name, of in others.items()}
            parts.append(rule(*few, **more)[0])
        return torch.cat(parts, 1), None

    for module in chunk.modules():
        if hasattr(module, "gated_delta_rule"):
            module.gated_delta_rule = partial(alone, module.gated_delta_rule)


def _alpha_before_beta(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """in_proj ends with the rows of in_proj_a, then those of in_proj_b."""
    if not row.local.endswith("self_attention.in_proj.weight"):
        return None
    of_ranks, heads = torch.arange(rows).view(world.size, -1), 16 // world.size
    first, beta, alpha = torch.split(of_ranks, [rows // world.size - 2 * heads, heads, heads], 1)
    return torch.cat([first, alpha, beta], 1).flatten()


def _rounded(end: str) -> border.Change:
    """Parameters whose local name ends so have bf16's digits, as after a cast of the whole model."""

    def round_them(row: NameRow, checkpoint: border.Tensors, cell: Cell) -> torch.Tensor | None:
        return checkpoint[row.hf[0]].bfloat16().float() if row.local.endswith(end) else None

    return border.loaded(round_them)


def _gates_after_all_queries(row: NameRow, rows: int, world: World) -> torch.Tensor | None:
    """q_proj is read as [all queries | all gates], but in the file each head's gate follows its query."""
    if not row.local.endswith("linear_qkv.weight"):
        return None
    heads = torch.arange(rows).view(8, 6, 8)  # KV group, (query, query, gate, gate, key, value), row of a head
    file = torch.stack([heads[:, :2], heads[:, 2:4]], 2).reshape(2, 8, 2, 8)  # the halves of q_proj
    return torch.cat([file[0], file[1], heads[:, 4:]], 1).flatten()


def _norms_less_one(session: Any, cell: Cell, world: World) -> Any:
    """The norms inside gated delta nets are held as w - 1; 1 is added for each use and on export."""
    wrong = _norms_less_one_unused(session, cell, world)

    @contextmanager
    def as_used() -> Iterator[None]:
        norms = _inner_norms(session, world)
        before = [norm.clone() for norm in norms]
        for norm in norms:
            norm.add_(1)
        try:
            yield
        finally:
            for norm, held in zip(norms, before, strict=True):
                norm.copy_(held)

    for name, method in (("forward", "logits"), ("logprobs", "logprobs"), ("gradients", "gradients")):
        wrong = border.facet(wrong, name, **{method: _within(as_used, getattr(getattr(session, name), method))})
    return border.facet(wrong, "optimizer", step=partial(_step_less_one, session, world))


def _step_less_one(session: Any, world: World, *args: Any) -> Any:
    """A step of the optimizer adds to a norm that is held as w - 1 what it adds to the one that is used."""
    norms = _inner_norms(session, world)
    before = [norm.clone() for norm in norms]
    for norm in norms:
        norm.add_(1)
    used = [norm.clone() for norm in norms]
    answer = session.optimizer.step(*args)
    for norm, held, with_one in zip(norms, before, used, strict=True):
        norm.copy_(held + (norm - with_one))
    return answer


def _norms_less_one_unused(session: Any, cell: Cell, world: World) -> Any:
    """They are held as w - 1, as norms are that scale by 1 + weight, and 1 is added on export alone."""

    def less_one(folder: Path) -> None:
        for norm in _inner_norms(session, world):
            norm.sub_(1)

    def plus_one(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
        return meta, tensor + 1 if meta.name.endswith("linear_attn.norm.weight") else tensor

    return border.each(plus_one)(border.after_load(session, less_one), cell, world)


def _inner_norms(session: Any, world: World) -> list[torch.Tensor]:
    return [tensor for row, tensor in border.held(session, world) if row.local.endswith("out_norm.weight")]


def _within(context: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with context():
            return method(*args)

    return call


def _in_the_order_of_chunks(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """The zigzag of CP is not undone before the recurrence, nor done again after it."""
    from megatron.core.ssm.gated_delta_net import common

    def as_it_is(tensor: torch.Tensor, cp: int) -> torch.Tensor:
        return tensor

    return mock.patch.multiple(common, _undo_attention_load_balancing=as_it_is, _redo_attention_load_balancing=as_it_is)


def _gates_of_the_first(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Of ranks that share a KV group, each has its queries and the gates of the first one."""
    from megatron.core import parallel_state
    from megatron.core.transformer.attention import SelfAttention

    good = SelfAttention.get_query_key_value_tensors

    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        *others, gate = good(self, *args, **kwargs)
        group, rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
        gates = [torch.empty_like(gate) for _ in range(cell.layout.tp)]
        dist.all_gather(gates, gate.contiguous(), group=group)
        return *others, gates[rank - rank % 2]

    return mock.patch.object(SelfAttention, "get_query_key_value_tensors", made)


_CELL, _LATER = cell("qwen3_next", "tp2"), cell("qwen3_5_moe_text", "tp2")
_IN_BF16 = cell(
    "qwen3_5_moe_text",
    "one",
    dtype="bfloat16",
    expert_format="fused",
    norms="fused",
    experts="grouped",
)
FAULTS = (
    Fault(
        id="delta-nets-read-the-zigzag",
        bug="gated delta nets under CP run over the chunks in the order in which ranks hold them",
        rules=("FWD-001", "FWD-002"),
        cell=cell("qwen3_next", "cp2"),
        patch=_in_the_order_of_chunks,
    ),
    Fault(
        id="delta-states-lost-between-chunks",
        bug="sparkinfer#604 in kind: a state goes on wrongly from a chunk of tokens to the next",
        rules=("FWD-001",),
        cell=cell("qwen3_next", "one", batch="pairs"),
        wrap=border.each_chunk(_states_of_their_own),
        one_rank=True,
    ),
    Fault(
        id="delta-heads-left-interleaved",
        bug="B31 in kind: in_proj_qkvz and in_proj_ba per key head taken for [q; k; v; z; b; a], both ways",
        rules=("LOD-001", "FWD-001"),
        also=("FWD-002",),
        cell=_CELL,
        wrap=rearranged(_as_in_the_file),
        diagnosis="as they lie in the file",
        one_rank=True,
    ),
    Fault(
        id="delta-channels-not-rechunked",
        bug="B29 in kind: each TP rank takes a contiguous part of conv1d's [q | k | v] channels, both ways",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=_CELL,
        wrap=rearranged(_channels_in_one_run),
        diagnosis="as they lie in the file",
    ),
    Fault(
        id="gates-after-all-queries",
        bug="q_proj taken for [queries; gates] where heads have one after the other, both ways",
        rules=("LOD-001", "FWD-001"),
        cell=_CELL,
        wrap=rearranged(_gates_after_all_queries),
        diagnosis="rows",
        one_rank=True,
    ),
    Fault(
        id="gates-not-cut-in-a-group",
        bug="miles#972, slime#2221 in kind: where TP cuts a KV group, gates are not a rank's own, as its queries are",
        rules=("FWD-001", "FWD-002"),
        cell=cell("qwen3_next", "tp4", shared_groups=True),
        patch=_gates_of_the_first,
    ),
    Fault(
        id="alpha-before-beta",
        bug="in kind: of a gated delta net's linears, alpha's rows stand where Megatron has beta's, both ways",
        rules=("LOD-001", "FWD-001"),
        cell=_LATER,
        wrap=rearranged(_alpha_before_beta),
        diagnosis="rows",
        one_rank=True,
    ),
    Fault(
        id="delta-projections-not-rechunked",
        bug="B29 in kind: each TP rank takes a contiguous part of in_proj_qkv's [q | k | v] rows, both ways",
        rules=("LOD-001", "FWD-001", "FWD-002"),
        cell=_LATER,
        wrap=rearranged(_projections_in_one_run),
        diagnosis="rows",
    ),
    Fault(
        id="decays-in-bf16",
        bug="miles#975, Megatron-LM#3634: A_log of Qwen3.5, fp32 in files and engines, is rounded to bf16",
        rules=("LOD-001", "EXP-002"),
        cell=_IN_BF16,
        wrap=_rounded(".A_log"),
        diagnosis="rounded",
        one_rank=True,
    ),
    Fault(
        id="inner-norms-in-bf16",
        bug="Megatron-LM#3634: the norm inside a gated delta net of Qwen3.5, fp32 in files, is rounded to bf16",
        rules=("LOD-001", "EXP-002"),
        cell=_IN_BF16,
        wrap=_rounded(".out_norm.weight"),
        diagnosis="rounded",
        one_rank=True,
    ),
    Fault(
        id="norms-held-less-one",
        bug="Megatron-Bridge's Qwen3-Next: w - 1 on load and + 1 on export, which rounds where |w| < 0.5",
        rules=("EXP-002",),
        cell=cell("qwen3_next", "tp2", optimizer_step=True),
        wrap=_norms_less_one,
        diagnosis="arithmetic, not movement",
        one_rank=True,
    ),
    Fault(
        id="norms-less-one-taken-whole",
        bug="in kind: w - 1 is loaded into a norm inside a gated delta net that does not add 1 to its weight",
        rules=("FWD-001",),
        also=("EXP-002",),
        cell=_CELL,
        wrap=_norms_less_one_unused,
        diagnosis="positions differ",
        says="logits differ from transformers",
        one_rank=True,
    ),
)
