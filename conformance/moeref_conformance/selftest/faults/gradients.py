"""Bugs of the backward pass: gradients that are not summed where they must be, or not over the right ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import each_chunk, facet
from moeref_conformance.selftest.faults.base import Fault, cell

Wrap = Callable[[Session, Cell, World], Any]


def marked(attribute: str, value: Any, part: str = "") -> Wrap:
    """Set an attribute of Megatron's on all parameters that have it and whose name contains `part`."""

    def change(chunk: Any) -> None:
        for name, parameter in chunk.named_parameters():
            if part in name and hasattr(parameter, attribute):
                setattr(parameter, attribute, value)

    return each_chunk(change)


def _untied(chunk: Any) -> None:
    chunk.share_embeddings_and_output_weights = False


def _replicas_alone(cell: Cell, world: World) -> AbstractContextManager[Any]:
    from megatron.core.distributed import DistributedDataParallel

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", nothing)


def _tied_before_replicas(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Replicas own parts of the gradient: of two stages' copies of the tied weight one is a replica's own alone."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    good = DistributedDataParallel.finish_grad_sync

    def synchronised(self: Any, *args: Any, **kwargs: Any) -> None:
        replica, stage = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        tied = [of for of in self.module.parameters() if getattr(of, "shared_embedding", False)]
        own = [(of, of.main_grad.clone()) for of in tied if replica != stage]
        good(self, *args, **kwargs)
        for of, gradient in own:
            of.main_grad.copy_(gradient)

    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", synchronised)


def _shares_of_groups_alone(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """The outputs of `linear_qkv` are gathered by the function whose backward cuts a gradient instead of summing it."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import attention

    cut = tensor_parallel.gather_from_tensor_model_parallel_region
    return mock.patch.object(attention, "all_gather_last_dim_from_tensor_parallel_region", cut)


def configured(**values: Any) -> Wrap:
    """Set options of TransformerConfig after the model is built. The session reports them as given."""

    def change(chunk: Any) -> None:
        for module in chunk.modules():
            if hasattr(module, "config"):
                vars(module.config).update(values)

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.config
        return facet(each_chunk(change)(session, cell, world), "config", given=lambda: {**good.given(), **values})

    return wrap


def _counted_first(count: Callable[[Any], float]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: gradients are divided by the `count` of what the first step was given."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.gradients
        first: list[float] = []

        def gradients(*given: torch.Tensor) -> Any:
            first.append(count(given))
            factor = first[-1] / first[0] if first[0] else 1.0
            return {key: factor * one for key, one in good.gradients(*given).items()}

        return facet(session, "gradients", gradients=gradients)

    return wrap


FAULTS = (
    Fault(
        id="experts-reduced-as-dense",
        bug="P15 Megatron-LM#5916, in 0.16.1: experts with ETP other than TP at EP=1 are reduced over the dense grid",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2-etp1"),
        wrap=marked("allreduce", True, ".experts."),
        says="local_experts",
    ),
    Fault(
        id="norms-not-summed-over-tp",
        bug="Megatron-LM#1446: parameters that see some of the tokens lack the mark that sums their gradients over TP",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=marked("sequence_parallel", False),
        says="layernorm",
        diagnosis="not summed over tp",
    ),
    Fault(
        id="tied-gradients-not-summed",
        bug="embedding and tied head on two stages, each with its own gradient alone",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2", tied=True),
        wrap=each_chunk(_untied),
        says="embedding.word_embeddings.weight",
    ),
    Fault(
        id="tied-gradients-of-parts",
        bug="Megatron-LM#844 in kind: gradients are cut over replicas before stages sum those of a tied weight",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2", world_size=4, tied=True),
        patch=_tied_before_replicas,
        says="embedding.word_embeddings.weight",
    ),
    Fault(
        id="mean-over-dp-never-taken",
        bug="gradients stay those of each data-parallel replica's own rows",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp1", world_size=2),
        patch=_replicas_alone,
        diagnosis="not averaged over dp",
    ),
    Fault(
        id="shared-groups-not-summed",
        bug="TP ranks that share a KV group keep the gradient of its key and value from their own query heads alone",
        rules=("GRD-001",),
        diagnosis="nearest the loss is of model.layers.1.self_attn.q_proj",
        cell=cell("qwen3_moe", "tp4", shared_groups=True),
        patch=_shares_of_groups_alone,
        says="decoder.layers.0.input_layernorm.weight",
    ),
    Fault(
        id="batched-sends-cross",
        bug="megatron-core with PP=2, VPP and batch_p2p_comm: activations and gradients cross between two ranks",
        rules=("GRD-001",),
        also=("CFG-004",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4),
        wrap=configured(batch_p2p_comm=True, overlap_p2p_comm=False),
    ),
    Fault(
        id="tokens-of-the-first-step",
        bug="reported nowhere: the number of tokens that a step is divided by is kept from the first one",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_counted_first(lambda given: float(given[1].sum())),
        one_rank=True,
        diagnosis="times the right one",
    ),
    Fault(
        id="microbatches-of-the-first-step",
        bug="reported nowhere: the number of microbatches that a step is divided by is kept from the first one",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=_counted_first(lambda given: float(len(given[0]))),
        one_rank=True,
        diagnosis="2 times the right one",
    ),
)
