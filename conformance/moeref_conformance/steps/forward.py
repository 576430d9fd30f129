"""Facet `forward`: the logits of the kit's tokens."""

from __future__ import annotations

from safetensors.torch import load_file

from moeref_conformance.contract.api import Forward
from moeref_conformance.steps.facet import Context, Facet, Stage, Step


def logits(forward: Forward, context: Context) -> dict[str, bool]:
    """Whether this rank has logits; these are saved."""
    logits_BSV = forward.logits(load_file(context.input("tokens"))["tokens"])
    if logits_BSV is not None:
        context.save("forward", {"logits": logits_BSV})
    return {"has": logits_BSV is not None}


FACET = Facet(
    name="forward",
    protocol=Forward,
    needs=frozenset({"export"}),
    steps=(Step(name="forward", ask=logits, stage=Stage.LOADED),),
)
