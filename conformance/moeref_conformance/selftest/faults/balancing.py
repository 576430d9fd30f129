"""Bugs of routers: groups of experts, losses of routers, their bias, and the route of a replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.cells import ROUTER_LOSS_COEFFICIENT
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.steps import is_replayed, with_loss

Patch = Callable[[Cell, World], AbstractContextManager[Any]]


def _groups(best: int, masked: float) -> Patch:
    """A fault's `patch`: groups are chosen by the sum of their `best` experts; those of others score `masked`."""

    def chosen(
        scores: torch.Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
    ) -> Any:
        of_groups_TGE = scores.view(num_tokens, num_groups, -1)
        kept_TK = of_groups_TGE.topk(best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        out_TG = torch.ones(num_tokens, num_groups, dtype=torch.bool).scatter(1, kept_TK, False)
        return of_groups_TGE.masked_fill(out_TG[..., None], masked).flatten(1).topk(topk, dim=-1)

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.transformer.moe import moe_utils

        return mock.patch.object(moe_utils, "group_limited_topk", chosen)

    return patch


def _replayed_within_own_groups(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Experts of a route weigh nothing outside of the groups that the router chooses itself."""
    from megatron.core.transformer.moe import router

    good = router.topk_routing_with_score_function

    def routed(logits: torch.Tensor, *given: Any, router_replay: Any = None, **named: Any) -> Any:
        probs_TE, map_TE = good(logits, *given, router_replay=router_replay, **named)
        action = router_replay and router_replay.router_replay_action
        if not action or action.name == "RECORD":
            return probs_TE, map_TE
        scores_TGE = (logits.sigmoid() + named["expert_bias"]).unflatten(1, (named["num_groups"], -1))
        best_TG = scores_TGE.topk(2, dim=-1).values.sum(-1)
        own_TG = torch.zeros_like(best_TG).scatter(1, best_TG.topk(named["group_topk"], dim=-1).indices, 1.0)
        return probs_TE * own_TG.repeat_interleave(scores_TGE.shape[2], 1), map_TE

    return mock.patch.object(router, "topk_routing_with_score_function", routed)


def _empty_stack(session: Session, cell: Cell, world: World) -> Any:
    """The update stacks the bias of all routers of a rank, of which there may be none."""
    good: Any = session.gradients
    export: Any = session.export

    def gradients(*given: torch.Tensor) -> Any:
        found = good.gradients(*given)
        torch.stack(
            [buffer for chunk in export.chunks() for name, buffer in chunk.named_buffers() if "expert_bias" in name]
        )
        return found

    return facet(session, "gradients", gradients=gradients)


def _replayed_with(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Patch:
    """A fault's `patch`: logits of a replayed router are what `change` makes of the router and the right ones."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.transformer.moe.router import TopKRouter

        good = TopKRouter.gating

        def gating(self: Any, input: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = good(self, input)
            return change(self, logits) if is_replayed(self) else logits

        return mock.patch.object(TopKRouter, "gating", gating)

    return patch


def _without_its_bias(router: Any, logits: torch.Tensor) -> torch.Tensor:
    return torch.sub(logits, router.bias)


def _in_its_dtype(router: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits.to(router.weight.dtype).to(logits.dtype)


def _from_zero(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """A search for the largest logits that begins at 0, below which none counts."""
    from megatron.core.transformer.moe import router

    good = router.topk_routing_with_score_function

    def routed(logits: torch.Tensor, *given: Any, **named: Any) -> Any:
        return good(logits.clamp_min(0.0), *given, **named)

    return mock.patch.object(router, "topk_routing_with_score_function", routed)


def _counted_as_dispatched(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """A balancing loss counts the experts that tokens go to, by bias and groups, and not those of their scores."""
    from megatron.core.transformer.moe import router

    routed, scored = router.topk_routing_with_score_function, router.compute_routing_scores_for_aux_loss
    maps = list[torch.Tensor]()

    def routing(*given: Any, **named: Any) -> Any:
        probs_TE, map_TE = routed(*given, **named)
        maps[:] = [map_TE]
        return probs_TE, map_TE

    return mock.patch.multiple(
        router,
        topk_routing_with_score_function=routing,
        compute_routing_scores_for_aux_loss=lambda *given, **named: (maps[0], scored(*given, **named)[1]),
    )


FAULTS = (
    Fault(
        id="router-loss-counts-the-dispatched",
        bug="ISEEKYAN/Megatron-LM#223: a balancing loss has counts of experts within groups, and scores beyond them",
        rules=("GRD-001",),
        cell=cell("deepseek_v3", "tp2", layers=3, batch="pairs", router_loss="seq_aux_loss"),
        patch=_counted_as_dispatched,
        one_rank=True,
    ),
    Fault(
        id="groups-masked-with-zeros",
        bug="sglang#3705, DeepSeek-V3#741: experts of other groups score 0, more than those that a bias makes negative",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "one", layers=3),
        patch=_groups(2, 0.0),
        one_rank=True,
    ),
    Fault(
        id="groups-by-their-best-expert",
        bug="vLLM#13474: groups are chosen by their best expert, as DeepSeek-V2's are, and not by the best two",
        rules=("FWD-001",),
        cell=cell("deepseek_v3", "one", layers=3),
        patch=_groups(1, -torch.inf),
        one_rank=True,
    ),
    Fault(
        id="negative-logits-of-routers",
        bug="flashinfer#2822, vLLM#37605: a fused router takes other experts where their logits are negative",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        patch=_from_zero,
        one_rank=True,
    ),
    Fault(
        id="router-loss-of-a-part-with-a-mask",
        bug="Megatron-LM#1652: under per-token loss the loss of routers is scaled by the tokens of a CP rank alone",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "cp2", batch="pairs", loss_mask=True, router_loss="aux_loss"),
        wrap=with_loss(moe_aux_loss_coeff=ROUTER_LOSS_COEFFICIENT / 2),
        diagnosis="aux_loss counts 0.5 times",
    ),
    Fault(
        id="router-loss-beside-a-policys-left-out",
        bug="Automodel#1408 in kind: the loss of routers reaches the gradients of one step, and not of a policy's",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "ep2", batch="pairs", loss_mask=True, router_loss="aux_loss"),
        wrap=with_loss("policy", "policy_gradients", moe_aux_loss_coeff=0.0),
        one_rank=True,
        says="policy: the gradient of",
        diagnosis="aux_loss is left out",
    ),
    Fault(
        id="router-loss-beside-a-policys-lost-in-packs",
        bug="unsloth#6904: a policy's step has the loss of routers, but for the path that packed samples take",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "ep2", batch="packed", loss_mask=True, router_loss="aux_loss"),
        wrap=with_loss("policy", "policy_gradients", moe_aux_loss_coeff=0.0),
        one_rank=True,
        says="policy: the gradient of",
        diagnosis="aux_loss is left out",
    ),
    Fault(
        id="router-loss-beside-a-policys-of-each-microbatch",
        bug="NVIDIA-NeMo/labs-molt#134, NeMo-RL#3888: beside an RL loss that of routers is divided by another number",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "ep2", batch="pairs", loss_mask=True, router_loss="z_loss"),
        wrap=with_loss("policy", "policy_gradients", moe_z_loss_coeff=ROUTER_LOSS_COEFFICIENT * 2),
        one_rank=True,
        says="policy: the gradient of",
        diagnosis="z_loss counts 2 times",
    ),
    Fault(
        id="router-loss-beside-a-policys-of-each-token",
        bug="verl#6609: a policy's loss tells no number of tokens, and that of routers under CP is not divided by it",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "cp2", batch="pairs", loss_mask=True, router_loss="aux_loss"),
        wrap=with_loss("policy", "policy_gradients", moe_aux_loss_coeff=ROUTER_LOSS_COEFFICIENT * 8),
        says="policy: the gradient of",
        diagnosis="aux_loss counts 8 times",
    ),
    Fault(
        id="bias-of-no-router",
        bug="radixark/Megatron-LM#55 in kind: the update of the bias fails on a stage of dense layers",
        rules=("RUN-001",),
        cell=cell("glm4_moe", "pp2-first1", bias_update=True, layers=4),
        wrap=_empty_stack,
        says="non-empty TensorList",
    ),
    Fault(
        id="replayed-without-the-routers-bias",
        bug="reported nowhere: a router that is patched for replay knows no bias of its linear, as gpt-oss has it",
        rules=("RPL-004",),
        also=("RPL-003", "LGP-004"),
        cell=cell("gpt_oss", "ep2", replay="R3"),
        patch=_replayed_with(_without_its_bias),
        one_rank=True,
    ),
    Fault(
        id="replayed-logits-in-bf16",
        bug="prime-rl#2952 in kind: a router that is patched for replay does not know in which dtype it multiplies",
        rules=("CFG-013",),
        cell=cell("deepseek_v3", "tp2-ep2", layers=3, dtype="bfloat16", replay="R3"),
        patch=_replayed_with(_in_its_dtype),
        says="as logits in fp32 do not have it",
        one_rank=True,
    ),
    Fault(
        id="replayed-within-own-groups",
        bug="ISEEKYAN/Megatron-LM#79 in kind: scores of replayed experts are 0 outside of the groups of the own choice",
        rules=("RPL-004",),
        diagnosis="hidden states differ from the MLP or MoE of layer 2 on",
        also=("LGP-004",),
        cell=cell("deepseek_v3", "one", batch="packed", replay="R3", layers=3),
        patch=_replayed_within_own_groups,
        one_rank=True,
    ),
)
