"""Bugs of the backward pass: gradients that are not summed where they must be, or not over the right ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from moeref_conformance.selftest.faults.base import Edit, Fault, Rooms, cell


def built(change: Callable[[Any], None] = lambda chunk: None, **overrides: Any) -> Callable[[Rooms], Iterable[Edit]]:
    """Build with `overrides` of TransformerConfig, then pass every chunk through `change`."""

    def edits(rooms: Rooms) -> Iterable[Edit]:
        megatron = rooms["megatron"]
        good = megatron.build

        def build(*args: Any, **kwargs: Any) -> Any:
            made = good(*args, **{**kwargs, "overrides": {**(kwargs.get("overrides") or {}), **overrides}})
            for chunk in made.chunks:
                change(chunk)
            return made

        return [Edit(megatron, "build", build)]

    return edits


def marked(attribute: str, value: Any, part: str = "") -> Callable[[Any], None]:
    """Set `attribute` of the parameters that have it and whose name contains `part`."""

    def change(chunk: Any) -> None:
        for name, parameter in chunk.named_parameters():
            if part in name and hasattr(parameter, attribute):
                setattr(parameter, attribute, value)

    return change


def _untied(chunk: Any) -> None:
    chunk.share_embeddings_and_output_weights = False


def _batched(rooms: Rooms) -> Iterable[Edit]:
    """Past the rule by which moeref refuses it."""
    room = rooms["config.rules"]
    left = tuple(rule for rule in room.RULES if rule is not room._interleaved)
    return [Edit(room, "RULES", left), *built(batch_p2p_comm=True, overlap_p2p_comm=False)(rooms)]


FAULTS = (
    Fault(
        id="experts-reduced-as-dense",
        bug="P15 Megatron-LM#5916, in 0.16.1: experts with ETP other than TP at EP=1 are reduced over the dense grid",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2-etp1"),
        edits=built(marked("allreduce", True, ".experts.")),
        says="local_experts",
    ),
    Fault(
        id="norms-not-summed-over-tp",
        bug="parameters that see one run of the tokens, without the mark that sums their gradients over TP",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2"),
        edits=built(marked("sequence_parallel", False)),
        says="layernorm",
    ),
    Fault(
        id="tied-gradients-not-summed",
        bug="embedding and tied head on two stages, each with its own gradient alone",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2", tied=True),
        edits=built(_untied),
        says="embedding.word_embeddings.weight",
    ),
    Fault(
        id="batched-sends-cross",
        bug="megatron-core with PP=2, VPP and batch_p2p_comm: activations and gradients cross between two ranks",
        rules=("GRD-001",),
        also=("CFG-004",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4),
        edits=_batched,
    ),
)
