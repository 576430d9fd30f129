"""Bugs of a training step: its loss, gradients that get lost, and how many microbatches each rank has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.cells import ROUTER_LOSS_COEFFICIENT
from moeref_conformance.selftest.border import config_of, facet, inventory
from moeref_conformance.selftest.faults.base import Fault, cell

#: As in published configs, which a framework may read and apply unasked.
COEFFICIENT = 1e-3


def _weights_of_the_first_step(session: Session, cell: Cell, world: World) -> Any:
    """Weights that the first training step gathers are those of all forwards after it."""
    good: Any = session.gradients
    forward: Any = session.forward
    gathered = list[tuple[torch.nn.Parameter, torch.Tensor]]()

    def exchanged() -> None:
        for parameter, other in gathered:
            now = parameter.data.clone()
            parameter.data.copy_(other)
            other.copy_(now)

    def gradients(*given: torch.Tensor) -> Any:
        if not gathered:
            gathered.extend((of, of.data.clone()) for chunk in session.export.chunks() for of in chunk.parameters())  # type: ignore[union-attr]
        return good.gradients(*given)

    def logits(tokens_BS: torch.Tensor) -> Any:
        exchanged()
        try:
            return forward.logits(tokens_BS)
        finally:
            exchanged()

    return facet(facet(session, "gradients", gradients=gradients), "forward", logits=logits)


def _other_bias(
    bias: Callable[[Any, Any, Any, Any], Any],
) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: updated biases are those that `bias` makes of the facet, the tokens, the model's own and the
    right one by key."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients

        def gradients(tokens_BS: Any) -> Any:
            answer = good.gradients(tokens_BS)
            held = {(c, n): b for c, chunk in enumerate(session.export.chunks()) for n, b in chunk.named_buffers()}  # type: ignore[union-attr]
            right = {key: value for key, value in answer.items() if key in held}
            own = {key: held[key].clone() for key in right}
            return {**answer, **bias(good, tokens_BS, own, right)}

        return facet(session, "gradients", gradients=gradients)

    return wrap


def _each_microbatch(good: Any, tokens_BS: Any, own: Any, right: Any) -> Any:
    """Every row moves the bias that the one before it left; routes hardly change by that."""
    of_rows = [good.gradients(row_S[None]) for row_S in tokens_BS]
    return {key: own[key] + sum(answer[key] - own[key] for answer in of_rows) for key in right}


def _with_an_evaluation(good: Any, tokens_BS: Any, own: Any, right: Any) -> Any:
    """Other tokens are counted too: those that an evaluation ran before the step."""
    answer = good.gradients(torch.cat([tokens_BS, tokens_BS[:1].flip(1).repeat(len(tokens_BS), 1)]))
    return {key: answer[key] for key in right}


def _with_forwards_before(of: str, method: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: tokens of forwards by this method stay in the counts, until a step updates the bias."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        counted: list[torch.Tensor] = []
        asked: Any = getattr(getattr(session, of), method)

        def forward(tokens_BS: torch.Tensor, *more: Any) -> Any:
            counted.append(tokens_BS)
            return asked(tokens_BS, *more)

        def bias(good: Any, tokens_BS: Any, own: Any, right: Any) -> Any:
            fit = [one for one in counted if one.shape[1] == tokens_BS.shape[1]]
            counted.clear()
            answer = good.gradients(torch.cat([tokens_BS, *fit]))
            return {key: answer[key] for key in right}

        return _other_bias(bias)(facet(session, of, **{method: forward}), cell, world)

    return wrap


def _with_the_step_before(session: Session, cell: Cell, world: World) -> Any:
    """Counts are not set back after an update: each step counts the tokens of those before it too."""
    counted: list[torch.Tensor] = []

    def bias(good: Any, tokens_BS: Any, own: Any, right: Any) -> Any:
        counted.append(tokens_BS)
        answer = good.gradients(torch.cat(counted)) if len(counted) > 1 else right
        return {key: answer[key] for key in right}

    return _other_bias(bias)(session, cell, world)


def _gradients_of_the_idle_unset(session: Any, cell: Cell, world: World) -> Any:
    """What experts without tokens have for a gradient is what the memory held."""
    good: Any = session.gradients

    def gradients(tokens_BS: Any) -> Any:
        answer = good.gradients(tokens_BS)
        idle = {key: value for key, value in answer.items() if ".local_experts." in key[1] and not value.any()}
        return {**answer, **{key: torch.full_like(value, 1e-3) for key, value in idle.items()}}

    return facet(session, "gradients", gradients=gradients)


def with_first(name: str, method: str, part: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: a facet's method computes with copies that its first call made of weights of this name.

    Other calls do not.
    """

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good: Callable[..., Any] = getattr(getattr(session, name), method)
        kept: dict[tuple[int, str], torch.Tensor] = {}

        def call(*asked: Any) -> Any:
            held = {key: tensor for key, tensor in inventory(session).items() if part in key[1]}
            now = {key: tensor.clone() for key, tensor in held.items()}
            for key, tensor in held.items():
                tensor.copy_(kept.setdefault(key, now[key]))
            answer = good(*asked)
            for key, tensor in held.items():
                tensor.copy_(now[key])
            return answer

        return facet(session, name, **{method: call})

    return wrap


def _experts_added_up(session: Any, cell: Cell, world: World) -> Any:
    """Gradients of experts are added to those of the steps before, where EP gives them buffers of their own."""
    good: Any = session.gradients
    sums: dict[Any, torch.Tensor] = {}

    def gradients(tokens_BS: Any) -> Any:
        answer = good.gradients(tokens_BS)
        for key, value in answer.items():
            if ".experts." in key[1] and cell.layout.ep > 1:
                sums[key] = sums.get(key, 0) + value
        return {**answer, **sums}

    return facet(session, "gradients", gradients=gradients)


@contextmanager
def _of_own_tokens(cell: Cell, world: World) -> Iterator[None]:
    """Ranks do not add up their tokens."""
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]

    def updated(tokens_LE: Any, bias_LE: Any, rate: float, **groups: Any) -> Any:
        return bias_LE + rate * (tokens_LE.mean(-1, keepdim=True) - tokens_LE).sign()

    with mock.patch.object(finalize, "get_updated_expert_bias", updated):
        yield


@contextmanager
def _of_exchanged_tokens(cell: Cell, world: World) -> Iterator[None]:
    """The ranks that exchange tokens add them up, and not others."""
    from megatron.core import parallel_state

    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]

    def updated(tokens_LE: Any, bias_LE: Any, rate: float, **groups: Any) -> Any:
        torch.distributed.all_reduce(tokens_LE, group=parallel_state.get_expert_tensor_and_model_parallel_group())
        return bias_LE + rate * (tokens_LE.mean(-1, keepdim=True) - tokens_LE).sign()

    with mock.patch.object(finalize, "get_updated_expert_bias", updated):
        yield


def is_replayed(router: Any) -> bool:
    """Whether a router of megatron-core takes given experts now, in place of its own."""
    action = router.router_replay and router.router_replay.router_replay_action
    return bool(action) and action.name != "RECORD"


def _counted_by_its_own_choice(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Where experts are replayed, a router counts those that it would have chosen itself."""
    from megatron.core.transformer.moe.router import TopKRouter

    good: Any = TopKRouter.__call__

    def called(self: Any, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        probs_TE, taken_TE = good(self, hidden, padding_mask=padding_mask)
        if is_replayed(self) and torch.is_grad_enabled():
            with torch.no_grad():
                best_TK = (self.gating(hidden).flatten(0, -2).sigmoid() + self.expert_bias).topk(self.topk).indices
                more_TE = torch.zeros_like(probs_TE).scatter(1, best_TK, 1.0) - taken_TE.float()
                if padding_mask is not None:
                    more_TE = more_TE[~padding_mask.flatten()]
                self.local_tokens_per_expert += more_TE.sum(0)
        return probs_TE, taken_TE

    return mock.patch.object(TopKRouter, "__call__", called)


def _counted_in_replayed_forwards(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """A router counts the given experts of forwards without gradients too, until a step updates the bias."""
    from megatron.core.transformer.moe.router import TopKRouter

    good: Any = TopKRouter.__call__

    def called(self: Any, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        probs_TE, taken_TE = good(self, hidden, padding_mask=padding_mask)
        if is_replayed(self) and not torch.is_grad_enabled():
            counted_TE = taken_TE if padding_mask is None else taken_TE[~padding_mask.flatten()]
            self.local_tokens_per_expert += counted_TE.sum(0)
        return probs_TE, taken_TE

    return mock.patch.object(TopKRouter, "__call__", called)


def _counted_in_old_logprobs(session: Session, cell: Cell, world: World) -> Any:
    """As `_counted_in_replayed_forwards`, in forwards alone that give log-probabilities."""
    good: Any = session.logprobs

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> Any:
        with _counted_in_replayed_forwards(cell, world):
            return good.logprobs(tokens_BS, temperature, *routes)

    return facet(session, "logprobs", logprobs=logprobs)


def with_loss(
    of: str = "gradients", method: str = "gradients", **settings: Any
) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: steps of a facet have a loss of megatron-core's routers, by settings of router and config."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = getattr(session, of)

        def gradients(*given: Any) -> Any:
            with ExitStack() as stack:
                for router in _routers(session):
                    for name, value in settings.items():
                        _while(stack, router if name == "routing_type" else router.config, name, value)
                return getattr(good, method)(*given)

        return facet(session, of, **{method: gradients})

    return wrap


def _loss_of_the_files(session: Session, cell: Cell, world: World) -> Any:
    """Steps have the loss of routers that the config of the files names."""
    config = config_of(world)
    alpha = config.get("text_config", config).get("aux_loss_alpha", 0.0)
    return with_loss(routing_type="seq_aux_loss", moe_aux_loss_coeff=alpha)(session, cell, world)


def _times(factor: Callable[[Cell], float], part: str = "") -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: gradients of parameters whose name contains `part` are multiplied by `factor(cell)`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients

        def gradients(tokens_BS: Any) -> Any:
            found = good.gradients(tokens_BS)
            return {key: factor(cell) * one if part in key[1] else one for key, one in found.items()}

        return facet(session, "gradients", gradients=gradients)

    return wrap


def _routers(session: Session) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    chunks = session.export.chunks() if session.export else ()
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


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


def _last_forward_alone(session: Session, cell: Cell, world: World) -> Any:
    """Every call clears the gradients of the one before: those of the last row are left."""
    good: Any = session.gradients

    def gradients(tokens_BS: Any) -> Any:
        return {name: grad / len(tokens_BS) for name, grad in good.gradients(tokens_BS[-1:]).items()}

    return facet(session, "gradients", gradients=gradients)


def _never_cleared(session: Session, cell: Cell, world: World) -> Any:
    """Every step adds to the gradients of those before it."""
    good: Any = session.gradients
    kept: dict[Any, Any] = {}

    def gradients(tokens_BS: Any) -> Any:
        for key, gradient in good.gradients(tokens_BS).items():
            kept[key] = kept[key] + gradient if key in kept else gradient
        return dict(kept)

    return facet(session, "gradients", gradients=gradients)


def _bias_updated_after(name: str, method: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: after each call of a facet's method the bias of every router is moved by Megatron's rate."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good = getattr(getattr(session, name), method)

        def called(*given: Any) -> Any:
            answer = good(*given)
            for router in _routers(session):
                if router.expert_bias is not None:
                    router.expert_bias.add_(router.config.moe_router_bias_update_rate)
            return answer

        return facet(session, name, **{method: called})

    return wrap


def _equal_pipelines_alone(session: Session, cell: Cell, world: World) -> Any:
    raise NotImplementedError(f"pp={cell.layout.pp}: training and inference must have the same number of stages")


FAULTS = (
    Fault(
        id="forwards-with-weights-of-the-first-step",
        bug="Megatron-LM#6336: steps move weights, and forwards go on with those that were gathered before",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_weights_of_the_first_step,
        one_rank=True,
        says="after the step logits are off",
    ),
    Fault(
        id="gradients-of-the-last-call",
        bug="SkyRL#2008: each forward_backward clears gradients, and accumulation over calls is lost",
        rules=("GRD-001",),
        diagnosis="tokens that are trained on do not count",
        cell=cell("qwen3_moe", "one"),
        wrap=_last_forward_alone,
        one_rank=True,
    ),
    Fault(
        id="experts-of-the-first-step",
        bug="Primus#983: nothing that caches of quantised experts see tells that weights moved: steps have the first",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=with_first("gradients", "gradients", ".experts."),
        says="the gradient of",
    ),
    Fault(
        id="head-of-the-first-step",
        bug="prime-rl#2438 (review) in kind: a copy of the head is made in the first step, and never made again",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=with_first("gradients", "gradients", "output_layer.weight"),
        one_rank=True,
        says="the gradient of",
    ),
    Fault(
        id="gradients-never-cleared",
        bug="SkyRL#2008 the other way round: calls accumulate, and no step clears what the last one left",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_never_cleared,
        one_rank=True,
        diagnosis="with those of the step before",
    ),
    Fault(
        id="linear-attention-summed-over-tp",
        bug="slime#1748: gathered before linear attention that every rank computes: the backward pass sums equal parts",
        rules=("GRD-001",),
        cell=cell("qwen3_next", "tp2"),
        wrap=_times(lambda cell: cell.layout.tp, "self_attention.in_proj"),
        says="in_proj",
    ),
    Fault(
        id="replayed-routes-move-the-bias",
        bug="prime-rl#2953: the router's bias is updated from replayed routes, which the bias did not choose",
        rules=("EXP-006",),
        cell=cell("glm4_moe", "ep2", replay="R3"),
        wrap=_bias_updated_after("replay", "step"),
        diagnosis="arithmetic, not movement",
        one_rank=True,
    ),
    Fault(
        id="forwards-move-the-bias",
        bug="Megatron-LM#4433: tokens of a warm-up forward are counted, and the next update of the bias uses them",
        rules=("EXP-006", "FWD-003"),
        cell=cell("glm4_moe", "ep2"),
        wrap=_bias_updated_after("forward", "logits"),
        diagnosis="not as before the forward: buffer",
    ),
    Fault(
        id="pipeline-refused",
        bug="AReaL#1560: unequal pipelines are refused for every engine, where one has the limit",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_equal_pipelines_alone,
        says="must have the same number of stages",
    ),
    Fault(
        id="aux-loss-nobody-asked-for",
        bug="Megatron-LM#5694: router_aux_loss_coef of the model's config adds the auxiliary loss to a step without it",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=with_loss(routing_type="aux_loss", moe_aux_loss_coeff=COEFFICIENT),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="sequence-loss-nobody-asked-for",
        bug="DeepSeek-V3's config.json has a balancing loss over each sequence, which RL leaves out",
        rules=("GRD-001",),
        cell=cell("deepseek_v3", "tp2", layers=3),
        wrap=with_loss(routing_type="seq_aux_loss", moe_aux_loss_coeff=COEFFICIENT),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="sequence-loss-of-the-files",
        bug="Megatron-Bridge#5165: aux_loss_alpha, in Kimi's files from pre-training, turns a loss of routers on",
        rules=("GRD-001",),
        cell=cell("kimi_k25", "one"),
        wrap=_loss_of_the_files,
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="z-loss-nobody-asked-for",
        bug="a z-loss of the routers' logits, which a framework's recipe of pre-training leaves on",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=with_loss(moe_z_loss_coeff=COEFFICIENT),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="router-loss-of-a-part",
        bug="Megatron-LM#5047, Megatron-LM#5007: the loss of the routers is divided by the ranks of TP or CP once more",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "cp2", batch="pairs", router_loss="aux_loss"),
        wrap=with_loss(moe_aux_loss_coeff=ROUTER_LOSS_COEFFICIENT / 2),
        diagnosis="aux_loss counts 0.5 times",
    ),
    Fault(
        id="z-loss-of-each-rank",
        bug="Megatron-LM#1652: the z-loss of each rank's tokens is added up over TP and CP where their mean is wanted",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2", batch="pairs", router_loss="z_loss"),
        wrap=with_loss(moe_z_loss_coeff=ROUTER_LOSS_COEFFICIENT * 2),
        diagnosis="z_loss counts 2 times",
    ),
    Fault(
        id="global-loss-of-megatron",
        bug="Megatron-LM#3672: the global loss is divided by the number of replicas twice",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "ep2", batch="pairs", router_loss="global_aux_loss"),
        one_rank=True,
        claims={"router_losses": frozenset({"global_aux_loss"})},
        diagnosis="global_aux_loss counts 0.5 times",
    ),
    Fault(
        id="router-loss-forgotten",
        bug="B3 in kind: the coefficient stays in the user's file, and no step has the loss that was asked for",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", batch="pairs", router_loss="aux_loss"),
        wrap=with_loss(moe_aux_loss_coeff=0.0),
        one_rank=True,
        diagnosis="aux_loss is left out",
    ),
    Fault(
        id="sequence-loss-over-the-microbatch",
        bug="the balancing loss of sequences is computed over all tokens of a microbatch of several",
        rules=("GRD-001",),
        cell=cell("deepseek_v3", "one", layers=3, batch="pairs", router_loss="seq_aux_loss"),
        wrap=with_loss(routing_type="aux_loss"),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="bias-never-moves",
        bug="the rate of the experts' bias is read, and no step updates it",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_other_bias(lambda good, tokens_BS, own, right: own),
        one_rank=True,
        diagnosis="moved by 0, 0",
    ),
    Fault(
        id="mtp-bias-never-moves",
        bug="megatron-core 0.19.2 (read): routers in evaluation mode, as those of MTP may be, have no bias updated",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", mtp=1, bias_update=True),
        wrap=_other_bias(lambda good, tokens_BS, own, right: {k: own[k] if "mtp" in k[1] else right[k] for k in own}),
        one_rank=True,
        diagnosis="moved by 0, 0",
    ),
    Fault(
        id="bias-towards-the-busy",
        bug="reported nowhere: the sign of the update is that of the count less the mean",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_other_bias(lambda good, tokens_BS, own, right: {k: 2 * own[k] - right[k] for k in own}),
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-updated-each-microbatch",
        bug="the experts' bias is updated after each microbatch where a step has one update",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_other_bias(_each_microbatch),
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-an-evaluation",
        bug="Megatron-LM#4433: tokens of a forward that is no training step are counted in the next update",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_other_bias(_with_an_evaluation),
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-forwards-before",
        bug="Megatron-LM#4433: tokens of a forward stay in the counts that the next step's update of the bias uses",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_with_forwards_before("forward", "logits"),
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-old-logprobs",
        bug="torchtitan#4148 in kind: routers count in forwards without gradients, here in those of old logprobs",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_with_forwards_before("logprobs", "logprobs"),
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-the-step-before",
        bug="prime-rl#2267 in kind: counts of tokens are not set back where the bias is updated",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "one", bias_update=True),
        wrap=_with_the_step_before,
        one_rank=True,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-of-the-own-tokens",
        bug="each replica updates the experts' bias by its own tokens, and replicas drift apart",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", bias_update=True),
        patch=_of_own_tokens,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-of-the-exchanged-tokens",
        bug="reported nowhere: the tokens of experts are added up over EP, and replicas beyond it drift apart",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "tp1", world_size=2, bias_update=True),
        patch=_of_exchanged_tokens,
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-the-routers-own-choice",
        bug="reported nowhere: under given routes the experts' bias is updated by what routers would have chosen",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", batch="packed", replay="R3", bias_update=True),
        patch=_counted_by_its_own_choice,
        says="have another bias after step-a",
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-replayed-forwards",
        bug="Megatron-LM#4433 in kind: routes of forwards that compute log-probabilities count in the next update",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", batch="packed", replay="R3", bias_update=True),
        patch=_counted_in_replayed_forwards,
        says="have another bias after step-a",
        diagnosis="moved by",
    ),
    Fault(
        id="bias-counts-replayed-logprobs",
        bug="torchtitan#4148 in kind: routes count in forwards without gradients, here in those of old logprobs",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", batch="packed", replay="R3", bias_update=True),
        wrap=_counted_in_old_logprobs,
        says="have another bias after step-a",
        diagnosis="moved by",
    ),
    Fault(
        id="loss-summed-over-tokens",
        bug="the sum over the tokens of a row where their mean is wanted, the same under every layout",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2"),
        wrap=_times(lambda cell: 16.0),
        one_rank=True,
        diagnosis="16 times the right one",
    ),
    Fault(
        id="router-gradient-lost",
        bug="the weights of experts are detached from the router, whose gradient is zero under every layout",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "tp2"),
        wrap=_times(lambda cell: 0.0, "router.weight"),
        one_rank=True,
        says="mlp.router.weight",
        diagnosis="all zero",
    ),
    Fault(
        id="expert-gradient-lost",
        bug="a grouped GEMM whose last group has no weight gradient, under every layout",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "ep2", experts="grouped", expert_format="fused"),
        wrap=_times(lambda cell: 0.0, "linear_fc1.weight7"),
        one_rank=True,
        says="linear_fc1.weight7",
        diagnosis="all zero",
    ),
    Fault(
        id="idle-experts-gradients-unset",
        bug="MSLK#158: a grouped GEMM leaves the gradients of experts without tokens as memory has them",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "ep2"),
        wrap=_gradients_of_the_idle_unset,
        one_rank=True,
        says="local_experts",
    ),
    Fault(
        id="expert-gradients-never-cleared",
        bug="verl#1766 in kind: of a model's buffers of gradients those of experts under EP are not known, nor zeroed",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "ep2"),
        wrap=_experts_added_up,
        says="experts",
        diagnosis="with those of the step before",
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
