"""Facet `logprobs`: log-probabilities of the kit's tokens, and entropies."""

from __future__ import annotations

from safetensors.torch import load_file

from moeref_conformance.contract.api import Cell, Logprobs, TokenLogprobs
from moeref_conformance.contract.requests.logprobs import TEMPERATURE
from moeref_conformance.steps.facet import Context, Facet, Stage, Step


def asked(cell: Cell) -> bool:
    """Whether a cell asks: where routers choose themselves, and products are in the dtype of the model."""
    return cell.replay == "off" and not cell.precision


def logprobs(facet: Logprobs, context: Context) -> dict[str, bool]:
    """Whether this rank has logprobs; they and entropies are saved. Raises TypeError for an answer of another type."""
    found = facet.logprobs(load_file(context.input("tokens"))["tokens"], TEMPERATURE)
    if found is None:
        return {"has": False}
    if not isinstance(found, TokenLogprobs):
        raise TypeError(f"expected api.TokenLogprobs or None, the target gave a {type(found).__name__}: {found!r:.80}")
    saved = {name.removesuffix("_BS"): of_BS for name, of_BS in vars(found).items() if of_BS is not None}
    context.save("logprobs", saved)
    return {"has": True}


FACET = Facet(
    name="logprobs",
    protocol=Logprobs,
    needs=frozenset({"export"}),
    asked_in=asked,
    steps=(Step(name="logprobs", ask=logprobs, stage=Stage.LOADED),),
)
