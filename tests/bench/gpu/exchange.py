"""DeepEP and HybridEP with unequal numbers of tokens a rank: a whole round trip, against arithmetic and all-to-all.

An expert e multiplies its rows by 1 + e/E, so that a row's output is known without any exchange: it is the row times
the sum of its weights times that. The kernels are called as megatron-core calls them. HybridEP exchanges equal
pieces, so its rows are padded to what the padding plan gives; DeepEP gets them as they are, one rank has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeref.dispatcher import padding, reference
from moeref.layout import Layout
from tests.bench.gpu import models
from tests.bench.gpu.figures import Figure, close, ratio, timed

#: Relative distance: rows travel in bf16, and the outputs of eight experts are summed in it.
MOST = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Rows:
    """This rank's rows with their experts and weights, and who computes what."""

    x_TH: torch.Tensor
    experts_TK: torch.Tensor
    weights_TK: torch.Tensor
    experts: int
    group: Any

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // dist.get_world_size(self.group)

    @property
    def map_TE(self) -> torch.Tensor:
        """Boolean, which experts a row goes to."""
        return reference.routing_map(self.experts_TK, self.experts)

    @property
    def weights_TE(self) -> torch.Tensor:
        """The weights, zero elsewhere."""
        spread = self.weights_TK.new_zeros(len(self.x_TH), self.experts)
        return spread.scatter(1, self.experts_TK, self.weights_TK)

    def factors(self, local_experts: torch.Tensor) -> torch.Tensor:
        """What the experts of this rank multiply by."""
        mine = local_experts + dist.get_rank(self.group) * self.local
        return 1 + mine / self.experts


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Distances from arithmetic and times against the reference's all-to-all, of each way there is here."""
    from megatron.core import parallel_state

    group = parallel_state.get_expert_model_parallel_group()
    model = sizes.model(layers=1)
    given = _rows(model, sizes.tokens, device, group)
    ways = _ways(device)
    factors = 1 + given.experts_TK / given.experts
    expected_TH = given.x_TH * (given.weights_TK * factors).sum(1, keepdim=True).to(given.x_TH)
    if spoil:
        expected_TH = expected_TH.roll(1, 1)
    most, against = MOST[given.x_TH.dtype], "the row times its weights"
    found = [close(f"{name}, round trip", way(given), expected_TH, most, against) for name, way in ways.items()]
    first, *others = timed(device, *(partial(way, given) for way in ways.values()), rounds=sizes.rounds)
    names = list(ways)[1:]
    return [*found, *(ratio(n, t, first, "reference all-to-all") for n, t in zip(names, others, strict=True))]


def _rows(model: Any, most: int, device: torch.device, group: Any) -> Rows:
    """Random rows, a different number on each rank and none on the last."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    count = 0 if rank == size - 1 else most - 7 * rank
    generator = torch.Generator().manual_seed(rank)
    scores_TE = torch.rand(count, model.experts, generator=generator)
    weights_TK, experts_TK = scores_TE.topk(model.top_k)
    x_TH = torch.randn(count, model.hidden, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Rows(x_TH.to(device, dtype), experts_TK.to(device), weights_TK.to(device), model.experts, group)


def _ways(device: torch.device) -> dict[str, Callable[[Rows], torch.Tensor]]:
    """The reference first; then what is installed, or on a CPU the reference's other way."""
    ways: dict[str, Callable[[Rows], torch.Tensor]] = {"reference all-to-all": partial(_reference, "alltoall")}
    if device.type == "cpu":
        return {**ways, "reference all-gather": partial(_reference, "allgather")}
    from megatron.core.transformer.moe import fused_a2a

    if fused_a2a.fused_dispatch is not None:
        ways["DeepEP"] = _deepep
    if fused_a2a.hybrid_ep_dispatch is not None:
        ways["HybridEP"] = _hybridep
    return ways


def _reference(name: str, given: Rows) -> torch.Tensor:
    groups = reference.Groups(ep=given.group, etp_ep=given.group)
    got = reference.DISPATCH[name](given.x_TH, given.weights_TE, given.map_TE, groups)
    numbers_R = torch.arange(given.local, device=given.x_TH.device).repeat_interleave(got.counts_L)
    scale_R = got.weights_R * given.factors(numbers_R)
    return got.combine((got.rows_RH * scale_R[:, None]).to(got.rows_RH.dtype))


def _deepep(given: Rows) -> torch.Tensor:
    from megatron.core.transformer.moe import fused_a2a

    answer = fused_a2a.fused_dispatch(given.x_TH, given.experts_TK, given.weights_TK, given.experts, given.group)
    rows_RH, local_RK, weights_RK, _, handle = answer
    # A row comes once for all experts of a rank; -1 stands for those of other ranks.
    scale_R = (weights_RK * given.factors(local_RK)).masked_fill(local_RK < 0, 0).sum(1, keepdim=True)
    home_TH, _ = fused_a2a.fused_combine((rows_RH * scale_R).to(rows_RH.dtype), given.group, handle)
    return home_TH  # type: ignore[no-any-return]


def _hybridep(given: Rows) -> torch.Tensor:
    from megatron.core.transformer.moe import fused_a2a

    counts: list[int] = [0] * dist.get_world_size(given.group)
    dist.all_gather_object(counts, len(given.x_TH), group=given.group)
    plan = padding.plan(Layout(ep=len(counts)), dispatcher="flex-hybridep")
    missing = plan.group(counts)[dist.get_rank(given.group)] - len(given.x_TH)
    x_TH, weights_TE, map_TE = (_padded(t, missing) for t in (given.x_TH, given.weights_TE, given.map_TE))
    answer = fused_a2a.hybrid_ep_dispatch(x_TH, map_TE, weights_TE, given.group, given.local)
    rows_RH, weights_R, _, counts_L, handle = answer
    counts_L = counts_L.to(rows_RH.device, torch.int64)
    numbers_R = torch.arange(given.local, device=rows_RH.device).repeat_interleave(counts_L)
    scale_R = weights_R[: len(numbers_R)] * given.factors(numbers_R)
    outputs_RH = torch.zeros_like(rows_RH)
    outputs_RH[: len(numbers_R)] = rows_RH[: len(numbers_R)] * scale_R[:, None]
    home_TH: torch.Tensor = fused_a2a.hybrid_ep_combine(outputs_RH, handle, None, None)
    return home_TH[: len(given.x_TH)]


def _padded(rows: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
