"""Bugs around forwards and loads: what they leave behind for the training that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell

#: Gets the chunks of a rank.
Act = Callable[[list[torch.nn.Module]], object]


def behind(name: str, method: str, act: Act) -> border.Change:
    """A fault's `wrap` that acts on the chunks after each call of a facet's method."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = getattr(session, name)

        def called(*given: Any) -> Any:
            answer = getattr(good, method)(*given)
            act(list(session.export.chunks()) if session.export else [])
            return answer

        return facet(session, name, **{method: called})

    return wrap


def _no_gradients(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.zero_grad()


def _draw(chunks: list[torch.nn.Module]) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        torch.rand(1)


def _other_losses(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        config: Any = chunk.config
        config.moe_aux_loss_coeff = 0.5


def _refusing_in_bf16(session: Session, cell: Cell, world: World) -> Any:
    """A load runs under another default dtype, which is put back where it ends well."""
    good: Any = session.export

    def load(folder: Path) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        good.load(folder)
        torch.set_default_dtype(before)

    return facet(session, "export", load=load)


def _frozen(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.requires_grad_(False)


def _trained(chunks: list[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.requires_grad_(True)


def _another_size(chunks: list[torch.nn.Module]) -> None:
    from megatron.core import parallel_state

    parallel_state.set_expert_model_parallel_world_size(4)


def _amid(name: str, bug: str, rule: str, act: Act, says: str, layout: str = "pp2") -> Fault:
    facet_of = {"FWD-003": ("forward", "logits"), "LGP-005": ("logprobs", "logprobs")}
    return Fault(
        id=name,
        bug=bug,
        rules=(rule,),
        cell=cell("qwen3_moe", layout),
        wrap=behind(*facet_of[rule], act),
        says=f"changed the {says}",
    )


FAULTS = (
    _amid(
        "forward-clears-gradients",
        "SkyRL#2008 in kind: a forward begins with zero_grad(), and gradients that were added up are lost",
        "FWD-003",
        _no_gradients,
        "grad of 0:",
    ),
    _amid(
        "forward-draws",
        "reported nowhere: a forward draws from Megatron's tracker, and goes on where evaluations are asked for",
        "FWD-003",
        _draw,
        "generator of Megatron's",
        layout="tp2",
    ),
    _amid(
        "forward-changes-a-config",
        "reported nowhere: losses of routers are switched off in the config for a forward, and stay so",
        "FWD-003",
        _other_losses,
        "config of 0:",
    ),
    _amid(
        "forward-unfreezes",
        "peft#3636 in kind: who takes adapters off for a forward and puts them on again trains what was frozen",
        "FWD-003",
        _trained,
        "requires_grad of 0:",
    ),
    _amid(
        "logprobs-draw",
        "reported nowhere: log-probabilities are of tokens that are drawn, and a run depends on how often it is asked",
        "LGP-005",
        _draw,
        "generator of Megatron's",
    ),
    _amid(
        "logprobs-clear-gradients",
        "SkyRL#2008 in kind: log-probabilities are asked for between minibatches, and gradients are lost",
        "LGP-005",
        _no_gradients,
        "grad of 0:",
        layout="one",
    ),
    Fault(
        id="default-dtype-left-by-a-refusal",
        bug="transformers#28461, sglang#34440, vLLM#51064: a load that fails leaves its default dtype behind",
        rules=("LOD-007",),
        cell=cell("qwen3_moe", "one"),
        wrap=_refusing_in_bf16,
        one_rank=True,
        says="the load of checkpoint_extra changed the setting of torch.get_default_dtype()",
    ),
    Fault(
        id="frozen-by-a-load",
        bug="reported nowhere: what is loaded into is frozen, and nothing is trained",
        rules=("LOD-007",),
        also=("GRD-001",),
        cell=cell("qwen3_moe", "one"),
        wrap=behind("export", "load", _frozen),
        one_rank=True,
        says="the load of checkpoint changed the requires_grad",
    ),
    Fault(
        id="unfrozen-by-a-load",
        bug="speculators#593 in kind: what is loaded into is trained again, also what was frozen",
        rules=("LOD-007",),
        cell=cell("qwen3_moe", "one"),
        wrap=behind("export", "load", _trained),
        one_rank=True,
        says="the load of checkpoint once more changed the requires_grad",
    ),
    Fault(
        id="group-size-left-by-a-load",
        bug="Megatron-Bridge#449 in kind: a load sets sizes that are another world's, and leaves them",
        rules=("LOD-007",),
        cell=cell("qwen3_moe", "one"),
        wrap=behind("export", "load", _another_size),
        one_rank=True,
        says="get_expert_model_parallel_world_size()",
    ),
    Fault(
        id="sent-with-a-graph",
        bug="verl#2869, sglang#8691: tensors are sent without detach(), and cannot be serialised, or keep a graph",
        rules=("EXP-008",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=border.each(lambda meta, tensor: (meta, tensor.detach().requires_grad_() * 1)),
        says="holds an autograd graph",
    ),
)
