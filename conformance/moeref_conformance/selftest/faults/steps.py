"""Bugs of a training step: its load-balancing loss, and how many microbatches each rank has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from moeref_conformance.contract.api import Cell, Layout, Session, World
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell

#: Large enough for the balancing loss to be seen next to the cross entropy.
COEFFICIENT = 1.0


def balanced(share: Callable[[Layout], float]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: steps have megatron-core's auxiliary loss, scaled by `share(layout)`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients

        def gradients(tokens_BS: Any) -> Any:
            with ExitStack() as stack:
                for router in _routers(session):
                    _while(stack, router, "routing_type", "aux_loss")
                    _while(stack, router.config, "moe_aux_loss_coeff", COEFFICIENT)
                    _while(stack, router, "attach_and_log_load_balancing_loss", _scaled(router, share(cell.layout)))
                return good.gradients(tokens_BS)

        return facet(session, "gradients", gradients=gradients)

    return wrap


def _routers(session: Session) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = session.export.chunks() if session.export else ()
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def _scaled(router: Any, share: float) -> Callable[..., Any]:
    good = router.attach_and_log_load_balancing_loss

    def attach(activation: Any, coefficient: float, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return good(activation, coefficient, loss * share, *args, **kwargs)

    return attach


def _while(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set `owner.name` to `value` until `stack` is left. An attribute that only the class had is removed again."""
    own = vars(owner)
    if name in own:
        stack.callback(setattr, owner, name, own[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)


def _one_more_on_odd_ranks(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.gradients
    return facet(
        session, "gradients", gradients=lambda tokens_BS: good.gradients(tokens_BS.repeat(1 + world.rank % 2, 1))
    )


FAULTS = (
    Fault(
        id="aux-loss-scaled-by-tp",
        bug="P15 Megatron-LM#5047: the gradient of the auxiliary loss is divided by the size of the tp·cp group",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=balanced(lambda layout: 1 / (layout.tp * layout.cp)),
        one_rank=True,
        says="the gradient of decoder.layers.",
    ),
    Fault(
        id="unequal-microbatches",
        bug="P11 verl#5451: ranks of an expert group have unequal numbers of microbatches, and the longer one waits",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_one_more_on_odd_ranks,
        deadline=20.0,
    ),
)
