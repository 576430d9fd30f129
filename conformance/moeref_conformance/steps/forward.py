"""Facet `forward`: the logits of the kit's tokens, and before and after it those of their first ones alone."""

from __future__ import annotations

from safetensors.torch import load_file

from moeref_conformance.contract.api import Forward
from moeref_conformance.contract.requests.sequences import shorter
from moeref_conformance.steps.facet import Context, Facet, Stage, Step


def logits(forward: Forward, context: Context) -> dict[str, int]:
    """Whether this rank has logits, and how many tokens the shorter sequence has; the logits of both are saved.

    A target that keeps something of one forward, such as the cosines of its positions, may be wrong in a longer one or
    in a shorter one. Under replay the facet `replay` has a shorter one.
    """
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    length = shorter(tokens_BS.shape[1], context.cell) if context.cell.replay == "off" else 0
    first_BS = tokens_BS[:, :length].contiguous()
    if length:
        forward.logits(first_BS)
    found = {"logits": forward.logits(tokens_BS)}
    if length:
        found["shorter"] = forward.logits(first_BS)
    saved = {name: logits_BSV for name, logits_BSV in found.items() if logits_BSV is not None}
    if saved:
        context.save("forward", saved)
    return {"has": "logits" in saved, "shorter": length}


FACET = Facet(
    name="forward",
    protocol=Forward,
    needs=frozenset({"export"}),
    steps=(Step(name="forward", ask=logits, stage=Stage.LOADED),),
)
