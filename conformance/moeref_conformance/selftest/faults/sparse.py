"""Bugs that only sparse attention (DSA) can have: its indexers, the keys they choose, and layers that share them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from moeref_conformance.contract.api import Cell, Session, TensorMeta, World
from moeref_conformance.selftest.border import Pair, each, each_chunk, facet, read_as
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.config import always
from moeref_conformance.selftest.faults.gradients import configured
from moeref_conformance.selftest.faults.steps import with_first

_STATIC = cell("glm_moe_dsa", "tp1", backend="static")
_SHARING = cell("glm_moe_dsa", "one", replay="R3", batch="packed", layers=4)
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"


def _all_keys(chunk: Any) -> None:
    """Attention takes all keys before a query, whatever indexers choose."""
    for module in chunk.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 1 << 20


def _without_norm_biases(meta: TensorMeta, tensor: torch.Tensor) -> Pair | None:
    """Norms have a weight alone."""
    return None if meta.name.endswith(".k_norm.bias") else (meta, tensor)


@contextmanager
def _among_all_samples(cell: Cell, world: World) -> Iterator[None]:
    """The best keys are chosen among those of all packed samples; those of other samples count for nothing."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    good = dsa.fused_qk_topk_naive

    def chosen(*args: Any, varlen_starts: torch.Tensor | None = None, **kwargs: Any) -> Any:
        first = None if varlen_starts is None else torch.zeros_like(varlen_starts)
        return good(*args, varlen_starts=first, **kwargs)

    with mock.patch(f"{_DSA}.fused_qk_topk_naive", chosen):
        yield


@contextmanager
def _keys_of_the_first_layer(cell: Cell, world: World) -> Iterator[None]:
    """Layers that share keys take those of the first layer."""
    with mock.patch(f"{_DSA}.source_dsa_compute_layer", return_value=1):
        yield


def _trained(session: Session, cell: Cell, world: World) -> Any:
    """Indexers are parameters like all others, and weight decay moves them."""
    good: Any = session.optimizer

    def make(settings: Any = None) -> None:
        for chunk in session.export.chunks() if session.export else ():
            for name, parameter in chunk.named_parameters():
                if ".indexer." in name:
                    parameter.requires_grad_(True)
        good.make(settings)

    return facet(session, "optimizer", make=make)


def _rope_by_head_dim(config: dict[str, Any]) -> dict[str, Any]:
    """Where a config has a `head_dim`, that many numbers of a head are rotated."""
    return {"qk_rope_head_dim": config.get("head_dim", config["qk_rope_head_dim"])}


def _with_a_loss(session: Session, cell: Cell, world: World) -> Any:
    """Indexers are trained on a loss of their own."""
    for chunk in session.export.chunks() if session.export else ():
        for name, parameter in chunk.named_parameters():
            if ".indexer." in name:
                parameter.requires_grad_(True)
    return configured(dsa_indexer_loss_coeff=0.001)(session, cell, world)


FAULTS = (
    Fault(
        id="indexers-with-a-loss",
        bug="Megatron-Bridge#2469 (review): the provider gives indexers a loss of 0.001, for which nobody has asked",
        rules=("GRD-001",),
        also=("CFG-004",),
        diagnosis="where the loss does not reach",
        cell=cell("glm_moe_dsa", "one"),
        wrap=_with_a_loss,
        says="indexer",
    ),
    Fault(
        id="rope-as-wide-as-head-dim",
        bug="transformers#46739, Automodel#3222: GLM-5.2's head_dim of 192 is taken for its qk_rope_head_dim of 64",
        rules=("CFG-001", "NAM-007", "PLN-001"),
        cell=_STATIC,
        given=lambda cell, world: (cell, read_as(world, _rope_by_head_dim)),
        says="qk_pos_emb_head_dim=10, not 8",
    ),
    Fault(
        id="sparse-attention-not-detected",
        bug="reported nowhere: a model_type that is not known is read as DeepSeek-V3, which attends to all keys",
        rules=("CFG-001",),
        cell=_STATIC,
        wrap=always(experimental_attention_variant=None),
        says="experimental_attention_variant=None, not 'dsa'",
    ),
    Fault(
        id="keys-of-the-class",
        bug="Megatron-Bridge#2469 in kind: the indexer's sizes go on under names that Megatron does not read",
        rules=("CFG-001",),
        cell=_STATIC,
        wrap=always(dsa_indexer_topk=2048),
        says="dsa_indexer_topk=2048, not 7",
    ),
    Fault(
        id="indexer-epsilon-of-the-model",
        bug="mlx-lm#1419 in kind: the norm of an indexer's keys has rms_norm_eps; everywhere else it is 1e-6",
        rules=("CFG-001",),
        cell=_STATIC,
        wrap=always(dsa_indexer_k_norm_epsilon=1e-5),
        says="dsa_indexer_k_norm_epsilon=1e-05, not 1e-06",
    ),
    Fault(
        id="indexer-turns-neighbours",
        bug="transformers#46842: whether an indexer's rope turns neighbours or halves is not read from the config",
        rules=("CFG-001", "FWD-001"),
        also=("CFG-004",),
        cell=cell("glm_moe_dsa", "one"),
        wrap=configured(dsa_indexer_rope_interleaved=True),
        says="dsa_indexer_rope_interleaved",
        one_rank=True,
    ),
    Fault(
        id="scores-below-zero-count",
        bug="Megatron-LM's DSAIndexer: its comments say that GLM-5 has no ReLU; transformers and engines have one",
        rules=("CFG-001", "FWD-001"),
        also=("CFG-004",),
        cell=cell("glm_moe_dsa", "one"),
        wrap=configured(dsa_indexer_scoring_relu=False),
        says="dsa_indexer_scoring_relu",
        one_rank=True,
    ),
    Fault(
        id="attends-to-all-keys",
        bug="mlx-lm#1419 in kind: up to index_topk tokens nobody sees that the indexer's choice is not taken",
        rules=("FWD-001",),
        cell=cell("glm_moe_dsa", "one"),
        wrap=each_chunk(_all_keys),
        one_rank=True,
    ),
    Fault(
        id="indexer-of-the-first-forward",
        bug="sglang#4961 in kind: what an indexer computes with is made of its weights once, and stays in updates",
        rules=("FWD-001",),
        cell=cell("glm_moe_dsa", "tp2"),
        wrap=with_first("forward", "logits", ".indexer.linear_wk.weight"),
        says="once weights have changed, differ from transformers",
    ),
    Fault(
        id="indexers-in-every-layer",
        bug="sglang-jax#1384: layers that share keys get indexers, which no file has weights of",
        rules=("CFG-001",),
        cell=cell("glm_moe_dsa", "tp1", layers=4, batch="pairs", backend="static"),
        wrap=always(dsa_indexer_topk_freq=1),
        says="dsa_indexer_topk_freq=1, not 2",
    ),
    Fault(
        id="keys-of-the-first-layer",
        bug="ATOM#1362 in kind: a layer takes the keys of another one than that which it shares them with",
        rules=("FWD-001",),
        also=("LGP-004", "RPL-001", "RPL-002"),
        cell=_SHARING,
        patch=_keys_of_the_first_layer,
        one_rank=True,
    ),
    Fault(
        id="keys-among-all-samples",
        bug="reported nowhere: an indexer ranks keys of packed samples together, and masks those of others afterwards",
        rules=("FWD-001",),
        also=("LGP-004", "RPL-001", "RPL-002"),
        cell=_SHARING,
        patch=_among_all_samples,
        one_rank=True,
    ),
    Fault(
        id="indexer-norms-without-bias",
        bug="reported nowhere: norms are exported by their weight alone, and an indexer's LayerNorm has a bias",
        rules=("EXP-001",),
        also=("EXP-004",),
        cell=cell("glm_moe_dsa", "tp2"),
        wrap=each(_without_norm_biases),
        says=".indexer.k_norm.bias was never sent",
        one_rank=True,
    ),
    Fault(
        id="indexers-decay",
        bug="prime-rl#2799: an indexer, which no gradient reaches, is in the optimizer, and weight decay moves it",
        rules=("OPT-006",),
        cell=cell("glm_moe_dsa", "one", optimizer_step=True),
        wrap=_trained,
        diagnosis="a weight decay of",
        says=".indexer.",
    ),
)
