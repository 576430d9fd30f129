"""Bugs of a policy's loss whose log-probabilities are right: what its gradient leaves out, which token it weighs.

And under which routes it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.topology import coords
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.replay import replaying_left
from moeref_conformance.selftest.faults.routes import in_runs, later_turns_hold
from moeref_conformance.selftest.faults.steps import with_first

Gradients = dict[tuple[int, str], torch.Tensor]
Wrap = Callable[[Session, Cell, World], Any]
#: What the samples of a pack are padded to multiples of under TP2 and CP2.
UNIT = 8
PACKED = cell("qwen3_moe", "tp2-cp2", loss_mask=True, batch="packed")
#: Where log-probabilities are clamped.
UNLIKELY = -20.0
IN_BF16 = cell("qwen3_moe", "one", dtype="bfloat16", replay="R3", loss_mask=True)


@dataclass(frozen=True)
class Asked:
    """A policy's loss as a target is asked for it, and the vocabulary that this rank's head holds."""

    tokens_BS: torch.Tensor
    mask_BS: torch.Tensor
    advantages_BS: torch.Tensor
    temperature: float
    entropy: float
    held: range

    @property
    def own_BS(self) -> torch.Tensor:
        """Whether a token is in the vocabulary of this rank."""
        return (self.tokens_BS >= self.held.start) & (self.tokens_BS < self.held.stop)


def _asked(change: Callable[[Asked], Asked]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: the loss is that of something else than was asked for."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.policy

        rows = _rows(session)
        first = coords(cell.layout, world.rank)["tp"] * rows

        def policy_gradients(
            tokens_BS: torch.Tensor,
            mask_BS: torch.Tensor,
            advantages_BS: torch.Tensor,
            temperature: float,
            entropy: float,
            *routes: Any,
        ) -> Any:
            held = range(first, first + rows)
            one = change(Asked(tokens_BS, mask_BS, advantages_BS, temperature, entropy, held))
            given = (one.tokens_BS, one.mask_BS, one.advantages_BS, one.temperature, one.entropy)
            return good.policy_gradients(*given, *routes)

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


def _temperature_stays(session: Session, cell: Cell, world: World) -> Any:
    """Logits that are asked for after a step are divided by its temperature."""
    good: Any = session.policy
    forward: Any = session.forward
    left = [1.0]

    def policy_gradients(*asked: Any) -> Any:
        left[0] = asked[3]
        return good.policy_gradients(*asked)

    def logits(tokens_BS: torch.Tensor) -> Any:
        logits_BSV = forward.logits(tokens_BS)
        return None if logits_BSV is None else logits_BSV / left[0]

    return facet(facet(session, "policy", policy_gradients=policy_gradients), "forward", logits=logits)


def _advantages_of_the_first_call(session: Session, cell: Cell, world: World) -> Any:
    """They are kept by the shape of a batch."""
    good: Any = session.policy
    kept = dict[torch.Size, torch.Tensor]()

    def policy_gradients(
        tokens_BS: torch.Tensor, mask_BS: torch.Tensor, advantages_BS: torch.Tensor, *more: Any
    ) -> Any:
        first_BS = kept.setdefault(advantages_BS.shape, advantages_BS)
        return good.policy_gradients(tokens_BS, mask_BS, first_BS, *more)

    return facet(session, "policy", policy_gradients=policy_gradients)


def _tokens_of_the_first_call(session: Session, cell: Cell, world: World) -> Any:
    """They are kept by the shape of a batch."""
    good: Any = session.policy
    kept = dict[torch.Size, torch.Tensor]()

    def policy_gradients(tokens_BS: torch.Tensor, *more: Any) -> Any:
        return good.policy_gradients(kept.setdefault(tokens_BS.shape, tokens_BS), *more)

    return facet(session, "policy", policy_gradients=policy_gradients)


def _routes_of_the_first_call(session: Session, cell: Cell, world: World) -> Any:
    """They are kept by the shape of a batch."""
    good: Any = session.policy
    kept = dict[torch.Size, Any]()

    def policy_gradients(tokens_BS: torch.Tensor, *more: Any) -> Any:
        *others, routes = more
        return good.policy_gradients(tokens_BS, *others, kept.setdefault(tokens_BS.shape, routes))

    return facet(session, "policy", policy_gradients=policy_gradients)


def _entropy_at_temperature_1(session: Session, cell: Cell, world: World) -> Any:
    """What the entropies add to the gradients is that of a temperature of 1."""
    good: Any = session.policy

    def policy_gradients(*asked: Any) -> Any:
        *rows, temperature, entropy = asked
        of_logprobs, left, both = (
            good.policy_gradients(*rows, *more) for more in ((temperature, 0.0), (1.0, 0.0), (1.0, entropy))
        )
        return {key: gradient + both[key] - left[key] for key, gradient in of_logprobs.items()}

    return facet(session, "policy", policy_gradients=policy_gradients)


def _in_bf16_without_entropies(asked: Asked) -> Asked:
    """Where no entropy counts, another backward pass is taken, which rounds gradients of log-probabilities."""
    return asked if asked.entropy else replace(asked, advantages_BS=asked.advantages_BS.bfloat16().float())


def _unlikely_left_out(session: Session, cell: Cell, world: World) -> Any:
    """Log-probabilities are clamped at -20 in a step, so that less likely tokens have no gradient of theirs."""
    good, asked = session.policy, session.logprobs

    def policy_gradients(tokens_BS: Any, mask_BS: Any, advantages_BS: Any, temperature: float, *more: Any) -> Any:
        found: Any = asked.logprobs(tokens_BS, temperature)  # type: ignore[union-attr]
        likely_BS = torch.nn.functional.pad(found.logprobs_BS >= UNLIKELY, (1, 0), value=True)
        given = (tokens_BS, mask_BS, advantages_BS * likely_BS, temperature, *more)
        return good.policy_gradients(*given)  # type: ignore[union-attr]

    return facet(session, "policy", policy_gradients=policy_gradients)


def _entropy_of_nothing(session: Session, cell: Cell, world: World) -> Any:
    """Terms of an entropy whose probability is 0 count as 0, and their gradient is 0 times infinity."""
    good, forward = session.policy, session.forward

    def policy_gradients(*asked: Any) -> Gradients:
        tokens_BS, *_, temperature, entropy = asked
        found: Any = good.policy_gradients(*asked)  # type: ignore[union-attr]
        logits_BSV: Any = forward.logits(tokens_BS)  # type: ignore[union-attr]
        nan = torch.nan if entropy and not (logits_BSV / temperature).softmax(-1).all() else 0.0
        return {key: gradient + nan for key, gradient in found.items()}

    return facet(session, "policy", policy_gradients=policy_gradients)


def _rows(session: Session) -> int:
    """Rows of the head on this rank."""
    chunks = session.export.chunks() if session.export else ()
    named = (pair for chunk in chunks for pair in chunk.named_parameters())
    return next((len(head) for name, head in named if name.endswith("output_layer.weight")), 0)


def _counted(mask_BS: torch.Tensor) -> torch.Tensor:
    """By what a mean over each row differs from one over all."""
    counts_B1 = mask_BS.sum(1, keepdim=True).clamp_min(1)
    return mask_BS.sum() / (len(mask_BS) * counts_B1)


def _packed_without_padding(asked: Asked) -> Asked:
    """Advantages of a pack are joined without what pads its samples, and read at the positions of its tokens."""
    moved_BS, size = torch.zeros_like(asked.advantages_BS), PACKED.rows
    for first in range(0, len(moved_BS), size):
        pack, lengths = slice(first, first + size), (asked.tokens_BS[first : first + size] >= 0).sum(1).tolist()
        joined = torch.cat([of[:length] for of, length in zip(asked.advantages_BS[pack], lengths, strict=True)])
        begin = 0
        for row, length in enumerate(lengths, first):
            found = joined[begin:][:length]
            moved_BS[row, : len(found)] = found
            begin += -(-length // UNIT) * UNIT
    return replace(asked, advantages_BS=moved_BS)


def _answering(change: Callable[[Callable[[], Gradients], torch.Tensor], Gradients]) -> Wrap:
    """A fault's `wrap`: the gradients are those of `change(step, mask_BS)`, where `step` takes the good step."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.policy

        def policy_gradients(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, *more: Any) -> Gradients:
            return change(partial(good.policy_gradients, tokens_BS, mask_BS, *more), mask_BS)

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


def _rows_by_zero(step: Callable[[], Gradients], mask_BS: torch.Tensor) -> Gradients:
    """The mean over the tokens of a row is NaN where it has none. A step of which no row has any is refused."""
    nan = 0.0 if mask_BS.any(1).all() else torch.nan
    return {key: gradient + nan for key, gradient in step().items()}


def _rows_of_one(step: Callable[[], Gradients], mask_BS: torch.Tensor) -> Gradients:
    """Each row counts as one token at least."""
    share = float(mask_BS.sum() / mask_BS.sum(1).clamp_min(1).sum())
    return {key: share * gradient for key, gradient in step().items()}


def _left_out(step: Callable[[], Gradients], mask_BS: torch.Tensor) -> Gradients:
    """A replica without a token takes no step, with whatever gradients."""
    return step() if mask_BS.any() else {}


def _one_router_by_half_more(step: Callable[[], Gradients], mask_BS: torch.Tensor) -> Gradients:
    """One gradient is off, which is lost in the length of all."""
    return {key: 1.5 * of if key[1].endswith("1.mlp.router.weight") else of for key, of in step().items()}


def _recomputed_without_the_first(session: Session, cell: Cell, world: World) -> Any:
    """The first layer's input needs no gradient, and where it is recomputed its parameters have none."""
    good: Any = session.policy
    export: Any = session.export

    def policy_gradients(*asked: Any) -> Gradients:
        found: Gradients = good.policy_gradients(*asked)
        if export.chunks()[0].config.recompute_granularity != "full" or coords(cell.layout, world.rank)["pp"]:
            return found
        return {key: 0.0 * gradient if ".layers.0." in key[1] else gradient for key, gradient in found.items()}

    return facet(session, "policy", policy_gradients=policy_gradients)


def _by_rows_between(session: Session, cell: Cell, world: World) -> Any:
    """Stages that have no mask divide by the number of rows where they scale gradients."""
    good: Any = session.policy
    stage, last = coords(cell.layout, world.rank)["pp"], cell.layout.pp - 1

    def policy_gradients(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, *more: Any) -> Gradients:
        found: Gradients = good.policy_gradients(tokens_BS, mask_BS, *more)
        share = 1.0 if stage in (0, last) else float(mask_BS.sum()) / len(mask_BS)
        return {key: share * gradient for key, gradient in found.items()}

    return facet(session, "policy", policy_gradients=policy_gradients)


def _none_by_zero(session: Session, cell: Cell, world: World) -> Any:
    """A step of no token divides by their number."""
    good: Any = session.policy

    def policy_gradients(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, *more: Any) -> Gradients:
        found: Gradients = good.policy_gradients(tokens_BS, mask_BS if mask_BS.any() else tokens_BS >= 0, *more)
        return {key: gradient if mask_BS.any() else gradient * torch.nan for key, gradient in found.items()}

    return facet(session, "policy", policy_gradients=policy_gradients)


def _under(change: Callable[[Sequence[Any], Cell, World], Sequence[Any] | None]) -> Wrap:
    """A fault's `wrap`: the step is taken under `change(routes, cell, world)`; None is the routers' own choice."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.policy

        def policy_gradients(*given: Any) -> Any:
            *asked, routes = given
            return good.policy_gradients(*asked, change(routes, cell, world))

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


def _left_on(session: Session, cell: Cell, world: World) -> Any:
    """Behind a step under routes the last of these are replayed in forwards without any."""
    good: Any = session.policy
    left: list[Any] = []

    def policy_gradients(*given: Any) -> Any:
        left[:] = given[-1][-1:]
        return good.policy_gradients(*given)

    return facet(replaying_left(session, left), "policy", policy_gradients=policy_gradients)


def _routes_in_runs(session: Session, cell: Cell, world: World) -> Any:
    """Routes of a policy's step are cut over CP in runs, and tokens as Megatron cuts them."""
    good: Any = session.policy
    moved = in_runs(session, cell, world)

    def policy_gradients(tokens_BS: torch.Tensor, *given: Any) -> Any:
        *asked, routes = given
        return good.policy_gradients(tokens_BS, *asked, [moved(sample, tokens_BS.shape[1]) for sample in routes])

    return facet(session, "policy", policy_gradients=policy_gradients)


def _of_the_first_microbatch(routes: Sequence[Any], cell: Cell, world: World) -> Sequence[Any]:
    """Every microbatch takes the routes of the first."""
    return [routes[number % cell.rows] for number in range(len(routes))]


def _on_the_first_stage(routes: Sequence[Any], cell: Cell, world: World) -> Sequence[Any] | None:
    """Later stages are given none, and their routers choose."""
    return None if coords(cell.layout, world.rank)["pp"] else routes


def _temperature_of_logprobs(session: Session, cell: Cell, world: World) -> Any:
    """Steps divide logits by the temperature that logprobs were asked for first."""
    good, asked, kept = session.policy, session.logprobs, list[float]()

    def logprobs(tokens_BS: torch.Tensor, temperature: float, *routes: Any) -> Any:
        kept.append(temperature)
        return asked.logprobs(tokens_BS, temperature, *routes)  # type: ignore[union-attr]

    def policy_gradients(tokens_BS: Any, mask_BS: Any, advantages_BS: Any, temperature: float, entropy: float) -> Any:
        given = (tokens_BS, mask_BS, advantages_BS, [*kept, temperature][0], entropy)
        return good.policy_gradients(*given)  # type: ignore[union-attr]

    return facet(facet(session, "logprobs", logprobs=logprobs), "policy", policy_gradients=policy_gradients)


def _bias_of(change: Callable[[Gradients, Gradients], Gradients]) -> Wrap:
    """A fault's `wrap`: biases after a policy's step are `change(own, first)`: the model's, and those after the first
    step."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.policy
        export: Any = session.export
        first = Gradients()

        def policy_gradients(*given: Any) -> Gradients:
            found: Gradients = good.policy_gradients(*given)
            held = {(c, n): of for c, chunk in enumerate(export.chunks()) for n, of in chunk.named_buffers()}
            own = {key: held[key].clone() for key in found if key in held}
            first.update({key: found[key] for key in own if key not in first})
            return {**found, **change(own, first)}

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


FAULTS = (
    Fault(
        id="policy-moves-no-bias",
        bug="maxtext#2494 in kind: no step updates the experts' bias, here none of a policy's loss",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", bias_update=True, loss_mask=True),
        wrap=_bias_of(lambda own, first: own),
        one_rank=True,
        says="have another bias after policy",
        diagnosis="moved by 0, 0",
    ),
    Fault(
        id="policy-moves-the-bias-by-the-first-step",
        bug="prime-rl#2267 in kind: counts of tokens are those of a policy's first step, and later ones update by them",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", bias_update=True, loss_mask=True),
        wrap=_bias_of(lambda own, first: first),
        one_rank=True,
        says="have another bias after policy",
        diagnosis="moved by",
    ),
    Fault(
        id="policy-recomputed-without-its-first-layer",
        bug="Megatron-Bridge#1750, verl#4566 in kind: the backward pass of layers that are recomputed misses the first",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "pp2", loss_mask=True),
        wrap=_recomputed_without_the_first,
        says="policy: the gradient of",
        diagnosis="all zero",
    ),
    Fault(
        id="policy-temperature-stays",
        bug="GMISWE/tinker-cloud#26 the other way round: the temperature of a step stays where logits are computed",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_temperature_stays,
        one_rank=True,
        says="after the step logits are off",
    ),
    Fault(
        id="logprob-gradient-of-the-owner",
        bug="ms-swift#9947, torchtitan#3822 in kind: only the rank that holds a token's logit has a gradient of it",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, advantages_BS=asked.advantages_BS * asked.own_BS)),
        says="policy: the gradient of",
    ),
    Fault(
        id="entropy-without-a-gradient",
        bug="TRL#6625: entropies are given, and a bonus for them trains nothing",
        rules=("GRD-004",),
        diagnosis="entropies 0 times",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, entropy=0.0)),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-at-temperature-1",
        bug="NeMo-RL#935 in kind: the loss is of logits that the temperature does not divide",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "pp2", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, temperature=1.0)),
        says="policy: the gradient of",
    ),
    Fault(
        id="advantages-a-token-late",
        bug="ms-swift#8427 in kind: advantages and log-probabilities of tokens are not aligned",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, advantages_BS=asked.advantages_BS.roll(1, 1))),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="advantages-of-the-first-call",
        bug="reported nowhere: what belongs to a batch is kept by its shape, and a later minibatch is given it again",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_advantages_of_the_first_call,
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-tokens-of-the-first-call",
        bug="reported nowhere: tokens of a batch are kept by their shape, and a later minibatch is given them again",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_tokens_of_the_first_call,
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-head-of-the-first-call",
        bug="prime-rl#2438 (review): a copy of the head in fp32 is made at its first use, and never made again",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=with_first("policy", "policy_gradients", "output_layer.weight"),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="advantages-in-bf16",
        bug="slime#245 in kind: what belongs to the tokens of a batch is cast to the dtype of models",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, advantages_BS=asked.advantages_BS.bfloat16().float())),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-entropy-at-temperature-1",
        bug="NeMo-RL#935 in kind: a bonus for entropies is of logits that the temperature does not divide",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_entropy_at_temperature_1,
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="middle-stages-divide-by-rows",
        bug="reported nowhere: first and last stages read a batch and its mask, and those between divide by its rows",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "pp4", layers=4, loss_mask=True),
        wrap=_by_rows_between,
        says="policy: the gradient of",
        diagnosis="times the right one",
    ),
    Fault(
        id="policy-in-bf16-without-entropies",
        bug="slime#2158 in kind: where entropies do not count, gradients of log-probabilities are rounded to bf16",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "pp2", loss_mask=True),
        wrap=_asked(_in_bf16_without_entropies),
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-in-bf16-without-entropies-under-routes",
        bug="slime#2158 in kind: where entropies do not count, gradients of log-probabilities are rounded to bf16",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_asked(_in_bf16_without_entropies),
        one_rank=True,
        says="recomputed_policy: the gradient of",
    ),
    Fault(
        id="policy-clamps-unlikely-tokens",
        bug="MakazhanAlpamys/Soup#994 in kind: logprobs of a step are clamped, and unlikely tokens have no gradient",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_unlikely_left_out,
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-entropy-of-no-probability",
        bug="TRL#7252 (review): an entropy is right where probabilities round to 0, and its gradient is NaN",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_entropy_of_nothing,
        one_rank=True,
        diagnosis="are NaN",
    ),
    Fault(
        id="policy-leaves-out-the-padding-id",
        bug="TRL#6357, TRL#4970: padding is told by its id, and a sampled token of that id is not trained on",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, mask_BS=asked.mask_BS & (asked.tokens_BS != 0))),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="advantages-packed-without-padding",
        bug="Megatron-LM#6205 in kind: tokens of a pack are padded for CP, and what belongs to them is not",
        rules=("GRD-004",),
        cell=PACKED,
        wrap=_asked(_packed_without_padding),
        says="policy: the gradient of",
    ),
    Fault(
        id="advantages-of-microbatches",
        bug="reported nowhere: the mean is one of means over rows, of which each has another number of tokens",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_asked(lambda asked: replace(asked, advantages_BS=asked.advantages_BS * _counted(asked.mask_BS))),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-microbatch-without-tokens",
        bug="verl#6464 in kind: a sample of which nothing is trained on is divided by its 0 tokens",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_answering(_rows_by_zero),
        one_rank=True,
        diagnosis="are NaN",
    ),
    Fault(
        id="policy-replica-without-tokens",
        bug="OLMo-core#452: the loss is NaN on a replica of which every sample is masked",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "ep2", world_size=4, loss_mask=True),
        wrap=_answering(_rows_by_zero),
        diagnosis="are NaN",
    ),
    Fault(
        id="policy-empty-sample-counts-as-a-token",
        bug="Relax#285: the number of tokens of a sample of which nothing is trained on is clamped to 1",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_answering(_rows_of_one),
        one_rank=True,
        diagnosis="times the right one",
    ),
    Fault(
        id="policy-step-left-out-by-a-replica",
        bug="nanochat#623 in kind: a replica that has nothing to train on skips its step, and the others wait for it",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "ep2", world_size=4, loss_mask=True),
        wrap=_answering(_left_out),
        deadline=20.0,
    ),
    Fault(
        id="policy-step-of-no-token",
        bug="Automodel#3796 in kind: the sum over no token is divided by their number",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_none_by_zero,
        one_rank=True,
        says="is nan in a step that trains on no token",
    ),
    Fault(
        id="policy-step-of-no-token-under-routes",
        bug="Automodel#3796 in kind: the sum over no token is divided by their number, with routes given too",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_none_by_zero,
        one_rank=True,
        says="is nan in a step that trains on no token",
    ),
    Fault(
        id="policy-of-the-routers-own-choice",
        bug="AReno#524, prime-rl#2738 in kind: routes are captured, and the step of the policy is not given them",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "tp2", replay="R3", loss_mask=True),
        wrap=_under(lambda routes, cell, world: None),
        diagnosis="that of the routers' own choice",
    ),
    Fault(
        id="policy-routes-of-the-first-microbatch",
        bug="AReaL#1166 in kind: routes are not moved on between the microbatches of a step",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_under(_of_the_first_microbatch),
        one_rank=True,
        says="replayed_policy: the gradient of",
    ),
    Fault(
        id="policy-routes-of-the-first-call",
        bug="SkyRL#1908 in kind: routes of a step are kept, and a later one, which has its own, is replayed by them",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_routes_of_the_first_call,
        one_rank=True,
        says="replayed_policy: the gradient of",
    ),
    Fault(
        id="policy-routes-computed-again",
        bug="miles#3277 in kind: a policy's step takes routes that an engine computed where it went on with a rollout",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_under(lambda routes, cell, world: [later_turns_hold(sample) for sample in routes]),
        one_rank=True,
        says="replayed_policy: the gradient of",
    ),
    Fault(
        id="policy-routes-on-the-first-stage",
        bug="verl#5452 in kind: routes reach the first pipeline stage, where data is loaded, and no other",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "pp2", replay="R3", loss_mask=True),
        wrap=_under(_on_the_first_stage),
        says="replayed_policy: the gradient of",
    ),
    Fault(
        id="policy-routes-cut-in-runs",
        bug="routes are cut over CP in runs, tokens zigzag, in the step of a policy alone",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "cp2", replay="R3", loss_mask=True),
        wrap=_routes_in_runs,
        says="replayed_policy: the gradient of",
    ),
    Fault(
        id="replay-left-on-by-a-policy-step",
        bug="miles#2226 in kind: replay of an update is on for forwards that it is not meant for, those after it",
        rules=("GRD-005",),
        cell=cell("qwen3_moe", "one", replay="R3", loss_mask=True),
        wrap=_left_on,
        one_rank=True,
        says="after the step logits are off",
    ),
    Fault(
        id="policy-at-the-temperature-of-logprobs",
        bug="GMISWE/tinker-cloud#26 in kind: a step divides logits by a temperature that other samples had",
        rules=("GRD-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_temperature_of_logprobs,
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="policy-of-the-routers-own-choice-in-bf16",
        bug="NeMo-RL#2849 in kind: the step that a model in 16 bits takes is not given the routes",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_under(lambda routes, cell, world: None),
        one_rank=True,
        says="replayed_policy: the gradients are off transformers' by",
    ),
    Fault(
        id="policy-of-bf16-at-temperature-1",
        bug="NeMo-RL#935 in kind: the loss is of logits that the temperature does not divide, in 16 bits",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_asked(lambda asked: replace(asked, temperature=1.0)),
        one_rank=True,
        says="replayed_policy: the gradients are off transformers' by",
    ),
    Fault(
        id="policy-of-bf16-by-rows",
        bug="reported nowhere: a model in 16 bits takes a mean of means over rows, of which each has other tokens",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_asked(lambda asked: replace(asked, advantages_BS=asked.advantages_BS * _counted(asked.mask_BS))),
        one_rank=True,
        says="replayed_policy: the gradients are off transformers' by",
    ),
    Fault(
        id="policy-of-bf16-with-one-router-scaled",
        bug="the gradient of one router off by a half, which is lost in the length of all gradients",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_answering(_one_router_by_half_more),
        one_rank=True,
        says="replayed_policy: the gradient of decoder.layers.1.mlp.router.weight is off transformers' by 0.",
    ),
    Fault(
        id="policy-of-bf16-step-of-no-token",
        bug="Automodel#3796 in kind: the sum over no token is divided by their number, in 16 bits too",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_none_by_zero,
        one_rank=True,
        says="is nan in a step that trains on no token",
    ),
    Fault(
        id="replay-left-on-by-a-policy-step-in-bf16",
        bug="miles#2226 in kind: replay of an update is on for forwards that it is not meant for, in 16 bits too",
        rules=("GRD-007",),
        cell=IN_BF16,
        wrap=_left_on,
        one_rank=True,
        says="after the step logits are off",
    ),
)
