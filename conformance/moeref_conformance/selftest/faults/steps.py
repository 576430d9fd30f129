"""Bugs of one training step as a trainer makes it: its balancing loss, and how many microbatches each rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell

#: Large enough for the balancing loss to be seen next to the cross entropy.
COEFFICIENT = 1.0


def stepping(change: Callable[[Any, Any, Any], tuple[Any, ExitStack]]) -> Callable[[Rooms], Iterable[Edit]]:
    """The step is taken with the tokens that `change(chunks, layout, tokens)` gives, and within what it has entered."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        room = rooms["megatron"]
        good = room.gradients

        def gradients(chunks: Any, table: Any, tokens_BS: Any) -> Any:
            tokens_BS, stack = change(chunks, table.layout, tokens_BS)
            with stack:
                return good(chunks, table, tokens_BS)

        return [Edit(room, "gradients", gradients)]

    return edits


def balanced(share: Callable[[Any], float]) -> Callable[[Any, Any, Any], tuple[Any, ExitStack]]:
    """Train with megatron-core's auxiliary loss, of which every router hands `share(layout)` to the backward pass."""

    def change(chunks: Any, layout: Any, tokens_BS: Any) -> tuple[Any, ExitStack]:
        from megatron.core.transformer.moe.router import TopKRouter

        stack = ExitStack()
        for chunk in chunks:
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                _while(stack, router, "routing_type", "aux_loss")
                _while(stack, router.config, "moe_aux_loss_coeff", COEFFICIENT)
                _while(stack, router, "attach_and_log_load_balancing_loss", _scaled(router, share(layout)))
        return tokens_BS, stack

    return change


def _scaled(router: Any, share: float) -> Callable[..., Any]:
    good = router.attach_and_log_load_balancing_loss

    def attach(activation: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return good(activation, coefficient, loss * share, *args, **kwargs)

    return attach


def _while(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Hold `owner.name` at `value` until `stack` is left; what the instance did not have itself is taken away again."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _one_more_on_odd_ranks(chunks: Any, layout: Any, tokens_BS: Any) -> tuple[Any, ExitStack]:
    import torch.distributed as dist

    odd = dist.get_rank() % 2
    return tokens_BS.repeat(1 + odd, 1), ExitStack()


FAULTS = (
    Fault(
        id="aux-loss-scaled-by-tp",
        bug="P15 Megatron-LM#5047: the gradient of the auxiliary loss is divided by the size of the tp·cp group",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2"),
        edits=stepping(balanced(lambda layout: 1 / (layout.tp * layout.cp))),
        one_rank=True,
        says="the gradient of decoder.layers.",
    ),
    Fault(
        id="unequal-microbatches",
        bug="P11 verl#5451: ranks of an expert group have unequal numbers of microbatches, and the longer one waits",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "ep2"),
        edits=stepping(_one_more_on_odd_ranks),
        deadline=20.0,
    ),
)
