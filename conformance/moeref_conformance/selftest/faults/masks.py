"""Bugs of a loss mask: which predictions count in a training step, and by how many tokens each sum is divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.cells import ROUTER_LOSS_COEFFICIENT
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.batches import mean_of_replicas
from moeref_conformance.selftest.faults.steps import with_loss

Gradients = dict[tuple[int, str], torch.Tensor]


def _masking(change: Callable[[torch.Tensor, Cell], torch.Tensor | None]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: a step gets `change(mask_BS, cell)`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients
        return facet(
            session, "gradients", gradients=lambda rows_BS, mask_BS: good.gradients(rows_BS, change(mask_BS, cell))
        )

    return wrap


def _cut_in_runs(mask_BS: torch.Tensor, cell: Cell) -> torch.Tensor:
    """CP ranks take runs of the mask, and two chunks of the tokens: the mask that comes to the same."""
    chunks = torch.arange(mask_BS.shape[1]).chunk(2 * cell.layout.cp)
    zigzag = [chunks[part] for rank in range(cell.layout.cp) for part in (rank, -1 - rank)]
    at_S = torch.cat(zigzag)
    counted_BS = mask_BS.roll(-1, 1)
    moved_BS = counted_BS.clone()
    moved_BS[:, at_S] = counted_BS
    return moved_BS.roll(1, 1)


def _without_the_padding_id(session: Session, cell: Cell, world: World) -> Any:
    """Tokens of id 0 pass for padding, whatever the mask says."""
    good: Any = session.gradients
    return facet(
        session, "gradients", gradients=lambda rows_BS, mask_BS: good.gradients(rows_BS, mask_BS & (rows_BS != 0))
    )


def _divided(of_none: float = 0.0) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: the mean over rows of their own means, which is `of_none` for one without tokens."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients

        def gradients(rows_BS: torch.Tensor, mask_BS: torch.Tensor) -> Gradients:
            alone = [mask_BS & (torch.arange(len(mask_BS)) == row)[:, None] for row in range(len(mask_BS))]
            found = [good.gradients(rows_BS, one_BS) for one_BS in alone if one_BS.any()]
            none = of_none * (len(alone) - len(found))
            return {key: torch.stack([one[key] for one in found]).sum(0) / len(alone) + none for key in found[0]}

        return facet(session, "gradients", gradients=gradients)

    return wrap


def where_none(change: Callable[[Any, torch.Tensor], Gradients]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: the gradients of a step that trains on no token are those of `change(facet, rows_BS)`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients

        def gradients(rows_BS: torch.Tensor, mask_BS: torch.Tensor) -> Gradients:
            if mask_BS.any():
                found: Gradients = good.gradients(rows_BS, mask_BS)
                return found
            return change(good, rows_BS)

        return facet(session, "gradients", gradients=gradients)

    return wrap


def _by_accident(good: Any, rows_BS: torch.Tensor) -> Gradients:
    raise ZeroDivisionError("division by zero")


def _by_zero(good: Any, rows_BS: torch.Tensor) -> Gradients:
    return {key: torch.full_like(one, torch.nan) for key, one in good.gradients(rows_BS, rows_BS >= 0).items()}


def _by_all(session: Session, cell: Cell, world: World) -> Any:
    """The sum over what is trained on is divided by all tokens."""
    good: Any = session.gradients

    def gradients(rows_BS: torch.Tensor, mask_BS: torch.Tensor) -> Gradients:
        share = float(mask_BS.float().mean())
        return {key: share * one for key, one in good.gradients(rows_BS, mask_BS).items()}

    return facet(session, "gradients", gradients=gradients)


FAULTS = (
    Fault(
        id="router-loss-by-trained-tokens",
        bug="verl#6836: the loss of routers grows with all tokens, and is divided by those that are trained on",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", batch="pairs", loss_mask=True, router_loss="aux_loss"),
        wrap=with_loss(moe_aux_loss_coeff=ROUTER_LOSS_COEFFICIENT * 32 / 12),
        diagnosis="aux_loss counts 2.67 times",
    ),
    Fault(
        id="loss-mask-ignored",
        bug="reported nowhere: prompts and answers of tools are trained on",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_masking(lambda mask_BS, cell: mask_BS | True),
    ),
    Fault(
        id="loss-mask-a-token-late",
        bug="reported nowhere: the mask of tokens is laid on the logits at their places, which predict the next ones",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_masking(lambda mask_BS, cell: mask_BS.roll(1, 1)),
    ),
    Fault(
        id="loss-mask-without-the-padding-id",
        bug="Megatron-Bridge#4660: padding is told by its id, and labels of that id in a sample are not trained on",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", batch="packed", loss_mask=True),
        wrap=_without_the_padding_id,
        one_rank=True,
    ),
    Fault(
        id="loss-mask-cut-in-runs",
        bug="reported nowhere: CP cuts the tokens into chunks and the mask into runs",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "cp2", loss_mask=True),
        wrap=_masking(_cut_in_runs),
    ),
    Fault(
        id="mask-divided-by-all-tokens",
        bug="reported nowhere: the loss of what is trained on is divided by the number of all tokens",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2", loss_mask=True),
        wrap=_by_all,
        diagnosis="times the right one",
    ),
    Fault(
        id="mask-mean-of-rows",
        bug="prime-rl#2359 in kind: each sample is divided by its own tokens",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", batch="pairs", loss_mask=True),
        wrap=_divided(),
    ),
    Fault(
        id="microbatch-without-tokens",
        bug="verl#6464: a microbatch of which nothing is trained on is divided by 0 tokens",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_divided(of_none=torch.nan),
        diagnosis="are NaN",
    ),
    Fault(
        id="mask-mean-of-replicas",
        bug="prime-rl#2359: replicas divide by their own tokens, before the mean over replicas",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=mean_of_replicas,
    ),
    Fault(
        id="gradients-of-no-token",
        bug="Automodel#3796: a step in which nothing is trained on divides by 0 tokens",
        rules=("GRD-003",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=where_none(_by_zero),
        one_rank=True,
        says="is nan in a step that trains on no token",
    ),
    Fault(
        id="empty-step-fails-by-accident",
        bug="Automodel#3796 in kind: a step in which nothing is trained on fails in a division by 0 tokens",
        rules=("GRD-006",),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=where_none(_by_accident),
        says="does not say so: ZeroDivisionError: division by zero",
    ),
    Fault(
        id="empty-step-trains-on-a-row",
        bug="reported nowhere: so as not to be empty, a step in which nothing is trained on trains on its first row",
        rules=("GRD-003",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=where_none(
            lambda good, rows_BS: good.gradients(rows_BS, (torch.arange(len(rows_BS)) == 0)[:, None] & (rows_BS >= 0))
        ),
        one_rank=True,
        says="in a step that trains on no token",
    ),
)
