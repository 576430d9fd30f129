"""Bugs of multi-token prediction: layers taken for the decoder's, and a loss that not all ranks reduce."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, TensorMeta, World
from moeref_conformance.selftest.border import described, facet
from moeref_conformance.selftest.faults.base import Fault, cell


def _experts_of_the_decoder(meta: TensorMeta) -> TensorMeta:
    """The loop over experts counts MTP layers from 0, as it does the decoder's."""
    return replace(meta, name=re.sub(r"layers\.2\.(mlp\.experts\.)", r"layers.1.\1", meta.name))


def _reduced_by_the_first(session: Any, cell: Cell, world: World) -> Any:
    """The first context-parallel rank reduces the loss over all of them."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        if topology.coords(cell.layout, world.rank)["cp"] == 0:
            dist.all_reduce(torch.zeros(1))
        good: torch.Tensor | None = session.forward.logits(tokens_BS)
        return good

    return facet(session, "forward", logits=logits)


FAULTS = (
    Fault(
        id="mtp-experts-under-decoder-names",
        bug="NeMo-RL#3908: the loop over grouped experts lacks the exception for MTP that its sibling has",
        rules=("EXP-001",),
        cell=cell("glm4_moe", "ep2", mtp=1),
        wrap=described(_experts_of_the_decoder),
        says="model.layers.2.mlp.experts.0.down_proj.weight was never sent",
        one_rank=True,
    ),
    Fault(
        id="loss-reduced-by-one-rank",
        bug="verl#5895: the MTP loss is reduced by the first context-parallel rank alone",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "cp2"),
        wrap=_reduced_by_the_first,
        says="waits in all_reduce",
        deadline=20.0,
    ),
)
