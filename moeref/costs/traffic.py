"""Batches over replicas, groups over nodes, bytes that the experts' dispatcher sends, and what padding wastes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeref.costs.activations import Shape
from moeref.costs.training import CostError, Training
from moeref.dispatcher.padding import Packed, PaddingError, Plan, round_up
from moeref.layout import Layout

#: Kinds of groups that exchange data in every layer or step, as `Layout.groups` names them.
KINDS = ("tp", "cp", "etp", "ep", "pp", "dp-cp", "edp")


def batch_problem(training: Training, layout: Layout, group: int | None = None) -> tuple[str, str] | None:
    """(what is wrong with the batch, fix); None if it divides. `group`: `microbatch_group_size_per_vp_stage`, or pp.

    `num_microbatches_calculator.ConstantNumMicroBatches` refuses what does not divide over replicas, the interleaved
    schedule microbatches that are no multiple of pp (`forward_backward_pipelining_with_interleaving`).
    """
    size, step = training.global_batch_size, training.micro_batch_size * layout.dp
    if size is None:
        return None
    if size % step:
        product = f"micro_batch_size·dp = {training.micro_batch_size}·{layout.dp}"
        text = f"global_batch_size={size} is not divisible by {product}"
        return text, f"use a multiple of {step}"
    made = size // step
    if layout.vpp > 1 and group is not None and group > layout.pp:
        if made < group or 0 < made % group < layout.pp:
            text = f"{made} microbatches leave a group of less than pp={layout.pp} microbatches, or have no whole one"
            return f"{text} (microbatch_group_size_per_vp_stage={group})", f"use a multiple of {step * group}"
    elif layout.vpp > 1 and made % layout.pp:
        text = f"{made} microbatches are no multiple of pp={layout.pp}, which vpp={layout.vpp} needs"
        return text, f"use a global_batch_size that is a multiple of {step * layout.pp}"
    return None


@dataclass(frozen=True)
class Crossing:
    """Groups of one kind: their size, their number, and how many have ranks on more than one node."""

    size: int
    groups: int
    across: int


def crossings(layout: Layout, gpus_per_node: int) -> dict[str, Crossing]:
    """By kind, the groups of more than one rank; ranks fill nodes in order. Raises CostError for a size below 1."""
    if type(gpus_per_node) is not int or gpus_per_node < 1:
        raise CostError(f"gpus_per_node={gpus_per_node!r} must be an integer and at least 1")
    found = {}
    for kind in KINDS:
        groups = layout.groups(kind)
        if len(groups[0]) > 1:
            across = sum(len({rank // gpus_per_node for rank in group}) > 1 for group in groups)
            found[kind] = Crossing(len(groups[0]), len(groups), across)
    return found


def dispatch_bytes(shape: Shape, dispatcher: str) -> int:
    """Bytes that a rank sends to others to bring its rows to the experts of one layer, with balanced experts.

    The combine sends as many back, and so does the backward of each. `alltoall` sends a row once for every expert,
    DeepEP and HybridEP once for every rank with one of its experts, `allgather` to every rank. ETP then gathers the
    rows that arrive; that is counted for `alltoall` and `allgather`.
    """
    model, layout = shape.model, shape.layout
    row, others = shape.width * model.hidden, layout.ep * layout.etp - 1
    if dispatcher == "allgather":
        return shape.R * row * others
    if dispatcher == "alltoall":
        over_ep = shape.R * model.top_k * (layout.ep - 1) // layout.ep
        return (over_ep + shape.R * model.top_k * (layout.etp - 1)) * row
    return round(shape.R * row * _other_ranks(model.experts, model.top_k, layout.ep) * layout.etp)


def _other_ranks(experts: int, top_k: int, ep: int) -> float:
    """The expected number of other EP ranks with one of `top_k` distinct experts, each set of them equally likely."""
    missed = math.comb(experts - experts // ep, top_k) / math.comb(experts, top_k)
    return (ep - 1) * (1 - missed)


@dataclass(frozen=True)
class Waste:
    """Tokens of samples, and rows after each sample and each packed sequence is padded."""

    samples: int
    packs: int
    tokens: int
    padded: int

    @property
    def share(self) -> float:
        """Padding among all rows."""
        return 1 - self.tokens / self.padded


def waste(plan: Plan, lengths: Mapping[int, int], budget: int | None) -> Waste:
    """The padding of samples by length and number, packed longest first into sequences of at most `budget` tokens.

    None packs nothing: each sample is a sequence. Raises CostError for a sample that does not fit, and for no samples.
    """
    if not lengths:
        raise CostError("lengths: there are no samples")
    if budget is not None and max(lengths) > budget:
        raise CostError(f"a sample of {max(lengths)} tokens does not fit into sequences of {budget}")
    packs = _packed(plan, lengths, budget)
    tokens = sum(length * number for length, number in lengths.items())
    padded = sum(pack.total * number for pack, number in packs)
    return Waste(sum(lengths.values()), sum(number for _, number in packs), tokens, padded)


def _packed(plan: Plan, lengths: Mapping[int, int], budget: int | None) -> list[tuple[Packed, int]]:
    """Packed sequences and how often each occurs."""
    try:
        if budget is None:
            return [(plan.pack([length]), number) for length, number in lengths.items()]
        return [(plan.pack(pack), number) for pack, number in _next_fit(plan, lengths, budget)]
    except PaddingError as error:
        raise CostError(str(error)) from error


def _next_fit(plan: Plan, lengths: Mapping[int, int], budget: int) -> list[tuple[Sequence[int], int]]:
    """Samples in packs, longest first; whole packs of one length are made at once.

    A pack has at most `budget` tokens. If the plan fixes the length, its padded samples have to fit into that as well.
    """
    room = budget * plan.sample if plan.fixed is None else plan.padded(budget)
    packs: list[tuple[Sequence[int], int]] = []
    rest: list[int] = []
    for length, number in sorted(lengths.items(), reverse=True):
        left, rows = number, round_up(length, plan.sample)
        taken = sum(round_up(each, plan.sample) for each in rest)
        fits = max(0, min((budget - sum(rest)) // length, (room - taken) // rows, left))
        rest, left = [*rest, *[length] * fits], left - fits
        if not left:
            continue
        packs += [(rest, 1)] if rest else []
        most = min(budget // length, room // rows)
        whole, left = divmod(left, most)
        packs += [([length] * most, whole)] if whole else []
        rest = [length] * left
    return [*packs, (rest, 1)] if rest else packs


def read_lengths(text: str) -> dict[int, int]:
    """Lengths of samples and their numbers, from lines `LENGTH` or `LENGTH NUMBER`. Raises CostError for other text."""
    found: Counter[int] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        if len(words) > 2 or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
            raise CostError(f"line {number}: {line[:80]!r} is neither LENGTH nor LENGTH NUMBER")
        length, times = int(words[0]), int(words[-1]) if len(words) == 2 else 1
        if not length or not times:
            raise CostError(f"line {number}: {line[:80]!r}: lengths and numbers are at least 1")
        found[length] += times
    return dict(found)
