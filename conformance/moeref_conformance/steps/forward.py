"""Facet `forward`: the logits of the kit's tokens, and before and after it those of their first ones alone."""

from __future__ import annotations

from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Forward
from moeref_conformance.steps.facet import Context, Facet, Stage, Step


def shorter(length: int, cell: Cell) -> int:
    """The number of tokens of a shorter sequence: the most under `length` that its CP and TP ranks divide; 0 if none.

    Not asked of packed samples, which have unequal lengths, nor under an FP8 recipe, whose blocks take many rows; and
    on few ranks alone, since others repeat what these show.
    """
    if cell.batch == "packed" or cell.precision or cell.replay != "off" or cell.layout.world > 4:
        return 0
    unit = cell.layout.tp * (2 * cell.layout.cp if cell.layout.cp > 1 else 1)
    return (length - 1) // unit * unit


def logits(forward: Forward, context: Context) -> dict[str, int]:
    """Whether this rank has logits, and how many tokens the shorter sequence has; the logits of both are saved.

    What is kept of a forward, such as cos and sin of its positions, has to do for a longer one and a shorter one.
    """
    tokens_BS = load_file(context.input("tokens"))["tokens"]
    length = shorter(tokens_BS.shape[1], context.cell)
    if length:
        forward.logits(tokens_BS[:, :length].contiguous())
    found = {"logits": forward.logits(tokens_BS)}
    if length:
        found["shorter"] = forward.logits(tokens_BS[:, :length].contiguous())
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
