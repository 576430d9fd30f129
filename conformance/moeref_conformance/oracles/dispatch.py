"""Expected paddings, found by counting rows, and expected outputs of a dispatch, computed by a loop over rows.

No least common multiples and no communication: a packed sequence is split as context and sequence parallelism split it,
and every row of a group goes to its experts one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import DispatcherRequest, Layout, Padding, PadRequest
from moeref_conformance.contract.requests.exchange import EXCHANGES, given, local_experts, parameters

#: Rows that a quantised GEMM takes, by recipe: megatron-core's `get_fp8_align_size` (16, 32 for mxfp8), 32 for nvfp4's
#: hardware, and the block of blockwise scaling.
GEMM_ROWS = {"bf16": 1, "tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 32}
#: Dispatchers that exchange equal pieces, and the rows that a piece is a multiple of: HYBRIDEP_TOKEN_ALIGNMENT.
EQUAL = {"allgather": 1, "flex-hybridep": 64}
PACKAGES = {"flex-deepep": "deep_ep", "flex-hybridep": "hybrid_ep"}


def even_sample(layout: Layout, length: int) -> bool:
    """Whether a sample can be split into the chunks of context parallelism."""
    return layout.cp == 1 or length % (2 * layout.cp) == 0


def rank_rows(layout: Layout, samples: tuple[int, ...], total: int) -> int | None:
    """Rows of each rank: every CP rank takes two chunks of every sample and of the tail, TP ranks an equal part of
    them. None if it cannot be split so."""
    pieces = [*samples, total - sum(samples)]
    if pieces[-1] < 0 or not all(even_sample(layout, piece) for piece in pieces):
        return None
    of_cp = sum(piece if layout.cp == 1 else 2 * (piece // (2 * layout.cp)) for piece in pieces)
    return None if of_cp % layout.tp else of_cp // layout.tp


def broken(layout: Layout, request: PadRequest, rank: int, padding: Padding) -> list[str]:
    """What is wrong with the padding of one rank of the request."""
    lengths, samples, total = request.lengths[rank], padding.samples[rank], padding.totals[rank]
    if len(samples) != len(lengths):
        return [f"{len(lengths)} samples became {len(samples)}"]
    problems = []
    for length, sample in zip(lengths, samples, strict=True):
        if sample < length:
            problems.append(f"a sample of {length} became {sample}")
        elif not even_sample(layout, sample):
            problems.append(f"a sample of {length} became {sample}, which does not split into {2 * layout.cp} chunks")
    rows, wanted = rank_rows(layout, samples, total), GEMM_ROWS[request.precision]
    if not problems and rows is None:
        over = f"cp {layout.cp}, tp {layout.tp}"
        problems.append(f"samples of {list(samples)} became {total}, which does not split over {over}")
    elif rows is not None and rows % wanted:
        problems.append(f"{total} gives a rank {rows} rows, where {request.precision} takes {wanted} at a time")
    return problems


@lru_cache(maxsize=4096)
def least(layout: Layout, request: PadRequest) -> Padding:
    """The least padding with which nothing is wrong, found by counting up."""
    samples = tuple(
        tuple(next(n for n in itertools.count(length) if even_sample(layout, n)) for length in lengths)
        for lengths in request.lengths
    )
    wanted = GEMM_ROWS[request.precision]
    equal = EQUAL.get(request.dispatcher, 1)

    def keeps(of_rank: tuple[int, ...], total: int) -> bool:
        rows = rank_rows(layout, of_rank, total)
        return rows is not None and rows % wanted == 0 and rows % equal == 0

    def total(of_rank: tuple[int, ...], start: int) -> int:
        return next(n for n in itertools.count(start) if keeps(of_rank, n))

    totals = tuple(total(of_rank, sum(of_rank)) for of_rank in samples)
    if request.dispatcher in EQUAL:
        totals = tuple(total(of_rank, max(totals)) for of_rank in samples)
    return Padding(samples=samples, totals=totals)


def cannot_work(layout: Layout, request: DispatcherRequest) -> str:
    """Why megatron-core fails with this dispatcher, at the latest in its first step; empty if it works."""
    name, group = request.dispatcher, layout.expert_tp * layout.ep
    if name not in ("alltoall", "allgather", "flex-deepep", "flex-hybridep"):
        return "megatron-core has no such dispatcher"
    if name in EQUAL and group > 1 and not request.equal_rows:
        return "it exchanges equal pieces only"
    if name not in PACKAGES:
        return ""
    if not request.gpu:
        return "its kernels need a GPU"
    if PACKAGES[name] not in request.packages:
        return f"{PACKAGES[name]} is not installed"
    if request.precision == "fp32":
        return "its kernels do not take fp32"
    if name == "flex-deepep" and group == 1:
        return "there is nobody to exchange with"
    return ""


@dataclass(frozen=True)
class Looped:
    """The loop's results for one rank. `received` counts rows by their bytes; `gradients` has the keys GRADIENTS.

    `parts_TKH` are the outputs of each row's experts before they are weighted, zero for padding rows.
    `padding` has the bytes of the padding rows of each rank of the group.
    """

    y_TH: torch.Tensor
    parts_TKH: torch.Tensor
    counts_E: torch.Tensor
    received: dict[int, Counter[bytes]]
    gradients: dict[str, torch.Tensor]
    padding: dict[int, list[bytes]]


def row_bytes(row_H: torch.Tensor) -> bytes:
    """A row as a key."""
    return row_H.detach().contiguous().view(torch.uint8).numpy().tobytes()


def looped(layout: Layout, dispatcher: str, exchange: int, rank: int) -> Looped:
    """Exchange number `exchange` for `rank`, from one loop over the rows of its whole etp·ep group."""
    return _group(layout, dispatcher, exchange, tuple(topology.group(layout, "etp_ep", rank)))[rank]


@lru_cache(maxsize=256)
def _group(layout: Layout, dispatcher: str, number: int, members: tuple[int, ...]) -> dict[int, Looped]:
    starts = {rank: given(EXCHANGES[number], layout, dispatcher, rank) for rank in members}
    experts = starts[members[0]].rows.experts
    one, two = (parameter.requires_grad_() for parameter in parameters(experts))
    loss, counts = 0 * one.sum(), dict[int, torch.Tensor]()
    parts, outputs = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    received: dict[int, Counter[bytes]] = {expert: Counter() for expert in range(experts)}
    padding: dict[int, list[bytes]] = {rank: [] for rank in members}
    for rank, start in starts.items():
        rows = start.rows
        counts[rank], out = torch.zeros(experts, dtype=torch.int64), list[torch.Tensor]()
        for place, row in enumerate(rows.x_TH):
            mine = row.new_zeros(rows.experts_TK.shape[1], len(row))
            if rows.padding_T[place]:
                padding[rank].append(row_bytes(row))
            else:
                chosen = rows.experts_TK[place].tolist()
                mine = torch.stack([torch.tanh(row @ one[expert]) @ two[expert] for expert in chosen])
                for expert in chosen:
                    counts[rank][expert] += 1
                    received[expert][row_bytes(row)] += 1
            out.append(mine)
        parts[rank] = torch.stack(out) if out else rows.x_TH.new_zeros(0, rows.experts_TK.shape[1], rows.x_TH.shape[1])
        outputs[rank] = (rows.weights_TK[..., None] * parts[rank]).sum(1)
        loss = loss + (outputs[rank] * start.loss_TH).sum()
    leaves = [leaf for start in starts.values() for leaf in (start.rows.x_TH, start.rows.weights_TK)]
    gradients = torch.autograd.grad(loss, (one, two, *leaves), materialize_grads=True)
    made = {}
    for place, rank in enumerate(members):
        local, share = local_experts(layout, rank, experts)
        cut = slice(local.start, local.stop)
        of_rows = {"x": gradients[2 + 2 * place], "weights": gradients[3 + 2 * place]}
        made[rank] = Looped(
            y_TH=outputs[rank].detach(),
            parts_TKH=parts[rank].detach(),
            counts_E=counts[rank],
            received={expert: received[expert] for expert in local},
            gradients={**of_rows, "one": gradients[0][cut, :, share], "two": gradients[1][cut, share]},
            padding=padding,
        )
    return made
