"""The routers of a model chunk, and whether megatron-core's RouterReplay can record and replay them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_config import TransformerConfig

from moeref.replay import RouteError, Routes, select_layers
from moeref.replay.routes import check_distinct

AuxLoss = Literal["refuse", "native"]
#: Fields of TransformerConfig under which the experts of a token are not those of RouterReplay, and why.
_OTHER_CHOICE = {
    "moe_expert_capacity_factor": "drops tokens of full experts after the choice",
    "moe_router_force_load_balancing": "routes by random scores",
    "moe_router_force_biased": "adds a random bias to the scores",
}
#: Routers inside a `recording` or `replaying` block. Before the first forward they have no action that would show it.
SCOPED: weakref.WeakSet[RouterReplay] = weakref.WeakSet()


@dataclass(frozen=True)
class Router:
    """A router and the global number of its layer; multi-token prediction layers are numbered after the decoder's."""

    layer: int
    module: TopKRouter
    mtp: bool

    @property
    def replay(self) -> RouterReplay:
        """megatron-core's RouterReplay of this router."""
        return self.module.router_replay


def routers(chunk: torch.nn.Module) -> list[Router]:
    """The routers of one chunk, in the order in which they run.

    MTP layers are numbered by their module names, because their `layer_number` starts again at 1.
    """
    found = []
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter):
            parts = name.split(".")
            mtp = "mtp" in parts
            layer = module.config.num_layers + int(parts[parts.index("mtp") + 2]) if mtp else module.layer_number - 1
            found.append(Router(layer, module, mtp))
    return found


def config_of(chunk: torch.nn.Module) -> TransformerConfig:
    """The TransformerConfig of a model, also of a wrapped one, for example in DistributedDataParallel."""
    configs = (getattr(module, "config", None) for module in chunk.modules())
    return next(config for config in configs if isinstance(config, TransformerConfig))


def _why_unsupported(config: TransformerConfig, *, mtp: bool) -> str:
    """Why a model with this config cannot be recorded or replayed; "" if it can."""
    if config.overlap_moe_expert_parallel_comm:
        return "overlap_moe_expert_parallel_comm alternates between layers of two microbatches; set it to False"
    if config.cuda_graph_impl != "none":
        # An empty list captures whole layers. The field is cuda_graph_scope in megatron-core 0.16.
        parts = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
        names = {str(getattr(part, "name", part)) for part in ([parts] if isinstance(parts, str) else parts)}
        if not names or names & {"full", "full_iteration", "moe", "moe_router"}:
            return "a CUDA graph that holds the router repeats the routes of its capture; leave the router out of it"
    for field, effect in _OTHER_CHOICE.items():
        if getattr(config, field, None) not in (None, False):
            return f"{field}={getattr(config, field)} {effect}; unset it"
    if mtp and getattr(config, "mtp_use_repeated_layer", False) and (config.mtp_num_layers or 0) > 1:
        return "mtp_use_repeated_layer runs one router for several layers; replay without mtp=True"
    return ""


def checked_routers(chunk: torch.nn.Module, *, mtp: bool, aux_loss: AuxLoss) -> list[Router]:
    """The routers of `chunk` to record or replay, with `mtp` and `aux_loss` as in `moeref.megatron.replay.replaying`.

    Raises RouteError for one that cannot be.
    """
    if reason := _why_unsupported(config_of(chunk), mtp=mtp):
        raise RouteError(reason)
    found = [router for router in routers(chunk) if mtp or not router.mtp]
    for router in found:
        config = router.module.config
        kind = router.module.routing_type  # as the router reads it; a list of names for several losses
        where = f"layer {router.layer}"
        if router.module.router_replay is None:
            raise RouteError(f"{where}: build the model with moe_enable_routing_replay=True")
        if router.replay in SCOPED or router.replay.router_replay_action is not None:
            raise RouteError(f"{where} is recorded or replayed already; blocks cannot be nested")
        if config.moe_router_fusion:
            raise RouteError(f"{where}: the fused router bypasses RouterReplay; set moe_router_fusion=False")
        if kind in ("sinkhorn", "quantile_balancing"):
            raise RouteError(f"{where}: {kind} routing ignores RouterReplay; use another load balancing type")
        if aux_loss == "refuse" and router.module.is_aux_loss_enabled():
            losses = kind if isinstance(kind, str) else ", ".join(kind)
            raise RouteError(
                f"{where}: {losses} is computed over the router's own top-k, not over the replayed routes; "
                f"set moe_router_load_balancing_type='none', or pass aux_loss='native' to accept that"
            )
    layers = [router.layer for router in found]
    if len(set(layers)) < len(layers):
        raise RouteError(f"two routers of one chunk have the same layer: {layers}")
    return found


def check_fit(given: Routes, walked: Sequence[Router]) -> None:
    """Raise RouteError for routes of other experts or layers than those of the routers, or with an expert twice."""
    for router in walked:
        config = router.module.config
        if (given.experts, given.top_k) != (config.num_moe_experts, router.module.topk):
            raise RouteError(
                f"layer {router.layer} routes to top-{router.module.topk} of {config.num_moe_experts} experts, the "
                f"routes are top-{given.top_k} of {given.experts}"
            )
    chosen = select_layers(given, [router.layer for router in walked])
    if chosen.idx_TLK.size and int(chosen.idx_TLK.max()) >= given.experts:
        raise RouteError(f"routes with expert {int(chosen.idx_TLK.max())} of {given.experts}")
    check_distinct(chosen.idx_TLK, chosen.layers, given.start)
