"""Bugs that only MiniMax-M2 can have: of its norms over all heads, and of keys that its config alone has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Change, config_of, each_chunk, read_as
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.config import always

#: The mean of squares of heads [..., heads, width], and the first of this rank's heads, of so many.
Mean = Callable[[torch.Tensor], torch.Tensor]
First = Callable[[int], int]


def _tp() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def _own(heads: int) -> int:
    return _tp().rank() * heads // _tp().size()


def _of_all(squares: torch.Tensor) -> torch.Tensor:
    """As it should be."""
    from megatron.core.tensor_parallel import mappings

    mean = mappings.reduce_from_tensor_model_parallel_region(squares.mean((-2, -1), keepdim=True))
    every: torch.Tensor = mappings.copy_to_tensor_model_parallel_region(mean)
    return every / _tp().size()


def _without_gradients(squares: torch.Tensor) -> torch.Tensor:
    mean = squares.mean((-2, -1), keepdim=True)
    dist.all_reduce(mean, group=_tp())
    return mean / _tp().size()


def _norm(module: Any, mean: Mean, first: First, x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = module.weight.view(-1, x.shape[-1])
    start = first(len(weight))
    return x * torch.rsqrt(mean(x.square()) + module.eps) * weight[start : start + x.shape[-2]]


def _normed(mean: Mean = _of_all, first: First = _own) -> Change:
    """Norms of queries and keys have this mean of squares, and the scales of these heads."""

    def change(chunk: Any) -> None:
        for name, module in chunk.named_modules():
            if name.endswith(("q_layernorm", "k_layernorm")):
                module.forward = partial(_norm, module, mean, first)

    return each_chunk(change)


def _by_its_share_alone(cell: Cell, world: World) -> tuple[Cell, World]:
    """The width that turns is not read, and without a share heads turn whole."""
    return cell, read_as(world, lambda config: {"rotary_dim": None})


def _mtp_of_the_config(session: Session, cell: Cell, world: World) -> Any:
    """There are as many multi-token prediction layers as the config says, whatever the files hold."""
    return always(mtp_num_layers=config_of(world).get("num_mtp_modules", 0))(session, cell, world)


FAULTS = (
    Fault(
        id="rotary-dim-not-read",
        bug="transformers#48241: MiniMax-M2's files have rotary_dim and no partial_rotary_factor, so heads turn whole",
        rules=("FWD-001",),
        diagnosis="hidden states differ from the attention of layer 0 on",
        cell=cell("minimax_m2", "one"),
        given=_by_its_share_alone,
        one_rank=True,
        says="logits differ from transformers",
    ),
    Fault(
        id="mtp-that-no-file-has",
        bug="reported nowhere: MiniMax-M2's config has three MTP modules, and its files have none",
        rules=("CFG-001",),
        cell=cell("minimax_m2", "tp1", backend="static"),
        wrap=_mtp_of_the_config,
        says="mtp_num_layers=3, not 0",
    ),
    Fault(
        id="heads-normed-one-by-one",
        bug="vllm-metal#788 in kind: megatron-core's norm of each head in place of one over all heads",
        rules=("FWD-001",),
        cell=cell("minimax_m2", "one"),
        wrap=_normed(lambda squares: squares.mean(-1, keepdim=True)),
        one_rank=True,
    ),
    Fault(
        id="heads-of-a-rank-normed-alone",
        bug="exllamav3#141, yalis#36: the mean of squares is that of this TP rank's heads",
        rules=("FWD-001",),
        also=("FWD-002",),
        diagnosis="hidden states differ from the attention of layer 0 on",
        cell=cell("minimax_m2", "tp2"),
        wrap=_normed(lambda squares: squares.mean((-2, -1), keepdim=True)),
    ),
    Fault(
        id="heads-normed-by-the-first-scales",
        bug="sglang#20967 in kind: TP ranks scale their heads by other heads' part of the norm's weight",
        rules=("FWD-001",),
        also=("FWD-002",),
        diagnosis="hidden states differ from the attention of layer 0 on",
        cell=cell("minimax_m2", "tp2"),
        wrap=_normed(first=lambda heads: 0),
    ),
    Fault(
        id="heads-normed-without-gradients-of-others",
        bug="Megatron-Bridge 0.6.2's norm of MiniMax-M2: squares are summed over TP unseen by autograd",
        rules=("GRD-001",),
        cell=cell("minimax_m2", "tp2"),
        wrap=_normed(_without_gradients),
    ),
)
