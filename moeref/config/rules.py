"""What follows from the settings together, and which of them contradict one another.

megatron-core checks some of this when a config is made, some when a layer is built, and some not at all: then one of
two settings has no effect, without a word. Here each is a rule with its source, judged before anything is built. A
derived value wins over all others, but never over one that was asked for: such a contradiction is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moeref.config.settings import Setting
from moeref.dispatcher import DispatcherError, setup_of
from moeref.dispatcher import contradictions as contradictions_of
from moeref.layout import Layout

_ASKED = ("field", "override")


class Effective:
    """The effective settings as rules look at them: a name that nobody has set counts as None."""

    def __init__(self, settings: Mapping[str, Setting], layout: Layout) -> None:
        self.settings, self.layout = settings, layout

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value if name in self.settings else None

    def asked(self, name: str) -> bool:
        return name in self.settings and self.settings[name].origin in _ASKED

    def said(self, *names: str) -> str:
        """`name=value (origin)` of each."""
        return ", ".join(
            f"{name}={self[name]!r} ({self.settings[name].origin if name in self.settings else 'unset'})"
            for name in names
        )


def _replay_reaches_topk(now: Effective) -> Iterator[str]:
    # topk_routing_with_score_function returns from its fused form before it asks RouterReplay (SkyRL 04874ec), and
    # TopKRouter.routing takes another way for these two kinds of balancing.
    if now["moe_enable_routing_replay"]:
        if now["moe_router_fusion"]:
            names = ("moe_enable_routing_replay", "moe_router_fusion")
            yield f"{now.said(*names)}: the fused router never asks for the recorded routes; switch one of them off"
        if now["moe_router_load_balancing_type"] in ("sinkhorn", "quantile_balancing"):
            names = ("moe_enable_routing_replay", "moe_router_load_balancing_type")
            yield f"{now.said(*names)}: this balancing chooses experts itself and never asks for the recorded routes"


def _dispatcher(now: Effective) -> Iterator[str]:
    # One truth: `moeref.dispatcher` knows what goes together. Asked here is what no machine and no version takes;
    # packages, GPU and rows are `dispatcher.select`'s to judge, which is told of them.
    if not now["num_moe_experts"]:
        return
    try:
        setup = setup_of({name: setting.value for name, setting in now.settings.items()}, now.layout)
    except DispatcherError:
        return  # a value beyond the table: the choices of the provider's own class judge it, then its finalisation
    for refusal, names in contradictions_of(setup):
        yield f"{now.said(*names)}: {refusal}" if names else str(refusal)


def _ignored_backend(now: Effective) -> Iterator[str]:
    # Not in that table, since megatron-core takes it and ignores the backend (Megatron-Bridge#5207).
    names = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
    known = now[names[0]] is not None
    if known and now[names[0]] != "flex" and now.asked(names[1]) and now[names[1]] is not None:
        yield f"{now.said(*names)}: only flex has a backend, it would be ignored; ask for dispatcher flex, or for None"


def _router(now: Effective) -> Iterator[str]:
    # TransformerConfig.__post_init__.
    softmax = now["moe_router_score_function"] == "softmax"
    if now["moe_router_enable_expert_bias"] and softmax:
        names = ("moe_router_enable_expert_bias", "moe_router_score_function")
        yield f"{now.said(*names)}: a bias needs scores by sigmoid; ask for moe_router_enable_expert_bias=False too"
    one = now["moe_router_topk"] == 1 and now["moe_router_load_balancing_type"] != "sinkhorn"
    if one and softmax and not now["moe_router_pre_softmax"]:
        yield f"{now.said('moe_router_topk', 'moe_router_pre_softmax')}: softmax over one chosen expert is always 1"
    kinds, factors = now["moe_router_load_balancing_type"], now["moe_aux_loss_coeff"]
    if isinstance(kinds, list) and not (isinstance(factors, list) and len(factors) == len(kinds)):
        yield f"{now.said('moe_router_load_balancing_type', 'moe_aux_loss_coeff')}: a list wants a coefficient each"


def _interleaved(now: Effective) -> Iterator[str]:
    # Megatron-LM's own arguments refuse it: two sends and two receives between the same two ranks in one batch.
    if now.layout.vpp > 1 and now.layout.pp == 2 and now.asked("overlap_p2p_comm") and not now["overlap_p2p_comm"]:
        yield f"{now.said('overlap_p2p_comm')}: pp=2 with virtual stages computes wrongly without it"


RULES: tuple[Callable[[Effective], Iterator[str]], ...] = (
    _replay_reaches_topk,
    _dispatcher,
    _ignored_backend,
    _router,
    _interleaved,
)


def contradictions(settings: Mapping[str, Setting], layout: Layout) -> list[str]:
    """Every contradiction between effective settings, with values and origins."""
    now = Effective(settings, layout)
    return [problem for rule in RULES for problem in rule(now)]


def derive(settings: Mapping[str, Setting], layout: Layout) -> dict[str, Setting]:
    """Settings that follow from others and were not asked for."""
    now, found = Effective(settings, layout), {}
    # Two switches of one decision: clearing one leaves the other in charge (Megatron-Bridge#5740).
    dispatcher = now["moe_token_dispatcher_type"]
    if now["moe_enable_deepep"] and not now.asked("moe_enable_deepep") and dispatcher not in (None, "flex"):
        reason = f"DeepEP is a backend of flex, and the dispatcher is {dispatcher}"
        found["moe_enable_deepep"] = Setting(False, "derived", reason)
    return found
