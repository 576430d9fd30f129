"""Rank entry: megatron-core's dispatchers and moeref's on the same rows, and a loop over experts as judge of both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from moeref_conformance.contract.api import Cell, Claims, Info, Session, Target, World

from moeref.dispatcher import reference

HIDDEN, INNER = 5, 8
DISPATCHERS = {"allgather": MoEAllGatherTokenDispatcher, "alltoall": MoEAlltoAllTokenDispatcher}
#: Both sides work in float64; sums over more than two ranks may be taken in another order.
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


class Nothing:
    """A target that is never opened: the entry below does everything."""

    info = Info(name="dispatch", version="0")
    claims = Claims(facets=frozenset(), families=frozenset({"dispatch"}), backends=frozenset({"gloo"}))

    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]:
        raise NotImplementedError


target = Nothing()


@dataclass(frozen=True)
class Case:
    """Rows of each rank by its number, experts, k, and capacity dropping. `crowd` sends all rows to the first k."""

    name: str
    rows: Callable[[int], int] = lambda rank: 6
    experts: int = 8
    topk: int = 2
    crowd: bool = False
    factor: float | None = None
    policy: str = "probs"
    pad: bool = False

    @property
    def uneven(self) -> bool:
        return len({self.rows(rank) for rank in range(8)}) > 1


CASES = (
    Case("dropless"),
    Case("one expert a rank", experts=4, topk=1),
    Case("all experts", experts=4, topk=4),
    Case("empty experts", crowd=True),
    Case("uneven", rows=lambda rank: 3 + 2 * rank),
    Case("uneven, one rank without rows", rows=lambda rank: 4 * rank % 7, topk=3),
    Case("drop by weight", factor=0.5, rows=lambda rank: 16),
    Case("drop by weight, crowded", factor=1.0, crowd=True),
    Case("drop by position", factor=0.5, policy="position", crowd=True),
    Case("drop uneven", factor=1.0, rows=lambda rank: 8 + 4 * rank),
    Case("drop by weight and pad", factor=1.0, pad=True, rows=lambda rank: 16),
    Case("drop by weight and pad, crowded", factor=1.0, pad=True, crowd=True),
    Case("capacity beyond the rows", factor=4.0, topk=3, crowd=True),
)


@dataclass
class Inputs:
    """What a rank starts with, made from its number: rows, weights and experts (T, k), and how the loss weighs rows."""

    rows: torch.Tensor
    weights: torch.Tensor
    experts: torch.Tensor
    loss: torch.Tensor


def inputs(case: Case, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(97 * rank + 1)
    rows, draw = case.rows(rank), lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)
    chosen = torch.arange(case.experts).expand(rows, -1) if case.crowd else draw(rows, case.experts).argsort(1)
    return Inputs(
        draw(rows, HIDDEN).requires_grad_(),
        (draw(rows, case.topk) + 0.1).requires_grad_(),
        chosen[:, : case.topk].contiguous(),
        draw(rows, HIDDEN),
    )


def parameters(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second weight of every expert, whole: (E, H, I) and (E, I, H)."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((case.experts, HIDDEN, INNER), (case.experts, INNER, HIDDEN))
    one, two = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return one, two


def scattered(case: Case, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and map (T, E)."""
    zeros = torch.zeros(given.rows.shape[0], case.experts, dtype=torch.float64)
    return zeros.scatter(1, given.experts, given.weights), reference.routing_map(given.experts, case.experts)


def dropped(case: Case, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and map as megatron-core's router leaves them, so that both sides dispatch the same."""
    weights, chosen = scattered(case, given)
    if case.factor is None:
        return weights, chosen
    drop = moe_utils.apply_router_token_dropping
    return drop(weights, chosen, case.topk, case.factor, case.policy, case.pad)


@dataclass
class Result:
    rows: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    out: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


def run(case: Case, given: Inputs, dispatch: Callable[..., Any], mine: range, etp: int, of: int) -> Result:
    """Dispatch, experts with this rank's share of their inner dimension, combine, and all gradients."""
    share = slice(etp * INNER // of, (etp + 1) * INNER // of)
    one, two = parameters(case)
    one = one[mine.start : mine.stop, :, share].clone().requires_grad_()
    two = two[mine.start : mine.stop, share].clone().requires_grad_()
    rows, weights, counts, combine = dispatch(case, given)
    outputs = [
        torch.tanh(piece @ first) @ second * weight[:, None]
        for piece, weight, first, second in zip(
            rows.split(counts.tolist()), weights.split(counts.tolist()), one, two, strict=True
        )
    ]
    out = combine(torch.cat(outputs))
    gradients = torch.autograd.grad((out * given.loss).sum(), (given.rows, given.weights, one, two))
    return Result(rows, weights, counts, out, gradients)


def config(case: Case, name: str, layout: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=48,  # of attention, which is not there, in heads that TP 6 and TP 8 divide
        num_attention_heads=24,
        add_bias_linear=False,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=INNER,
        moe_token_dispatcher_type=name,
        moe_router_load_balancing_type="none",
        moe_expert_capacity_factor=case.factor,
        moe_pad_expert_input_to_capacity=case.pad,
        moe_token_drop_policy=case.policy,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )


def of_megatron(name: str, mine: range, layout: Any) -> Callable[..., Any]:
    def dispatch(case: Case, given: Inputs) -> Any:
        cfg = config(case, name, layout)
        groups = moe_utils.get_default_pg_collection()
        real = DISPATCHERS[name](len(mine), list(mine), config=cfg, pg_collection=groups)
        weights, chosen = dropped(case, given)
        rows, probs = real.dispatch_preprocess(given.rows[:, None], chosen, weights)
        rows, probs = real.token_dispatch(rows, probs)
        rows, counts, probs = real.dispatch_postprocess(rows, probs)

        def combine(outputs: torch.Tensor) -> torch.Tensor:
            return real.combine_postprocess(real.token_combine(real.combine_preprocess(outputs)))[:, 0]

        return rows, probs, counts, combine

    return dispatch


def of_moeref(name: str, groups: reference.Groups) -> Callable[..., Any]:
    def dispatch(case: Case, given: Inputs) -> Any:
        found = reference.DISPATCH[name](given.rows, *dropped(case, given), groups)
        return found.rows_RH, found.weights_R, found.counts_L, found.combine

    return dispatch


def by_rows(case: Case, members: list[int], me: int, mine: range) -> Iterator[tuple[str, torch.Tensor]]:
    """Counts, output and gradients from one loop over experts and the rows they are sent, without any communication."""
    one, two = (p.requires_grad_() for p in parameters(case))
    everyone = [inputs(case, rank) for rank in members]
    weights, chosen = map(torch.cat, zip(*(dropped(case, given) for given in everyone), strict=True))
    rows = torch.cat([given.rows for given in everyone])
    out = torch.zeros_like(rows)
    for expert in range(case.experts):
        at = chosen[:, expert].nonzero()[:, 0]
        sent = torch.tanh(rows[at] @ one[expert]) @ two[expert]
        out = out.index_add(0, at, weights[at, expert, None] * sent)
    loss = (out * torch.cat([given.loss for given in everyone])).sum()
    here = members.index(me)
    given = everyone[here]
    gradients = torch.autograd.grad(loss, (given.rows, given.weights, one, two), materialize_grads=True)
    yield "counts", chosen.sum(0)[mine.start : mine.stop]
    yield "out", out.split([len(each.rows) for each in everyone])[here]
    for name, gradient in zip(("rows", "weights", "one", "two"), gradients, strict=True):
        yield name, gradient if name in ("rows", "weights") else gradient[mine.start : mine.stop]


def compare(target: Target, cell: Cell, world: World, inputs_: dict[str, str], folder: Path) -> None:
    """All cases under the cell's layout; what was compared goes to done.json."""
    layout = cell.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
    )
    found = moe_utils.get_default_pg_collection()
    groups = reference.Groups(ep=found.ep, etp=found.expt_tp, etp_ep=found.tp_ep)
    etp, of = dist.get_rank(found.expt_tp), dist.get_world_size(found.expt_tp)
    share = slice(etp * INNER // of, (etp + 1) * INNER // of)
    members = dist.get_process_group_ranks(found.tp_ep)
    done = []
    for case in (replace(case, experts=math.lcm(case.experts, layout.ep)) for case in CASES):
        mine = groups.experts(case.experts)
        expected = dict(by_rows(case, members, world.rank, mine))
        expected["one"], expected["two"] = expected["one"][:, :, share], expected["two"][:, share]
        for name in DISPATCHERS:
            given = inputs(case, world.rank)
            ours = run(case, given, of_moeref(name, groups), mine, etp, of)
            results = {"moeref": ours}
            if not (name == "allgather" and case.uneven and len(members) > 1):  # megatron-core refuses it
                real = run(case, given, of_megatron(name, mine, layout), mine, etp, of)
                results["megatron-core"] = real
                assert torch.equal(ours.counts, real.counts.cpu()), (case.name, name, ours.counts, real.counts)
                torch.testing.assert_close(ours.out, real.out, **CLOSE)
                for a, b in zip(ours.gradients, real.gradients, strict=True):
                    torch.testing.assert_close(a, b, **CLOSE)
                assert torch.equal(ours.rows, real.rows), (case.name, name)
                assert torch.equal(ours.weights, real.weights), (case.name, name)
            for who, result in results.items():
                say = lambda text, who=who, name=name, case=case: f"{who} {name}, {case.name}: {text}"  # noqa: E731
                assert torch.equal(result.counts.cpu(), expected["counts"]), (who, name, case.name)
                torch.testing.assert_close(result.out, expected["out"], msg=say, **CLOSE)
                names = ("rows", "weights", "one", "two")
                for part, gradient in zip(names, result.gradients, strict=True):
                    torch.testing.assert_close(gradient, expected[part], msg=say, **CLOSE)
            done.append([case.name, name, *results])
    (folder / "done.json").write_text(json.dumps(done))
