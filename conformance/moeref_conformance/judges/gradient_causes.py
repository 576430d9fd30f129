"""What a gradient is that is not transformers': known mistakes, tried on what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from moeref_conformance.contract.findings import Finding
from moeref_conformance.diagnosis.matching import first_of
from moeref_conformance.oracles.placement import hf_numbers

#: From the input of a layer to its output; what is not listed is in its MLP.
_IN_A_LAYER = ("input_layernorm", "attn.", "post_attention_layernorm")
#: What no sum of squares is divided by.
TINY = 1e-30


@dataclass(frozen=True)
class Wrong:
    """The gradient of a parameter that a rank has `got`, where `want` is right; in fp64, without padded rows.

    `earlier` is that of the step before, None of a first step. The right one `without_router_loss`, and with the
    `routers_choice` of experts where routes were given, are None where a step has no such loss and no routes.
    `of_groups` has each axis along which all ranks of the group have such a gradient, and these.
    """

    want: torch.Tensor
    got: torch.Tensor
    earlier: torch.Tensor | None
    router_loss: str
    without_router_loss: Callable[[], torch.Tensor] | None
    routers_choice: Callable[[], torch.Tensor] | None
    of_groups: Iterator[tuple[str, list[torch.Tensor]]]


def cause(wrong: Wrong) -> str:
    """What makes a wrong gradient, by the first known mistake that fits; empty if none does."""
    return first_of(
        lambda: _by_router_loss(wrong),
        lambda: _with_the_step_before(wrong),
        lambda: _by_its_numbers(wrong.want, wrong.got),
        lambda: _unreduced(wrong),
        lambda: _by_routers_choice(wrong),
        lambda: _of_no_loss(wrong),
    )


def _by_router_loss(wrong: Wrong) -> str:
    """How often the cell's loss of the routers counts, if the rest of a gradient is right."""
    if wrong.without_router_loss is None:
        return ""
    plain = wrong.without_router_loss()
    added, have = wrong.want - plain, wrong.got - plain
    factor = _times(have, added)
    near = float((have - factor * added).norm()) <= 1e-2 * float(added.norm())
    if not near or not bool(added.any()):
        return ""
    return f"{wrong.router_loss} {f'counts {factor:.3g} times' if abs(factor) > 1e-3 else 'is left out'}"


def _with_the_step_before(wrong: Wrong) -> str:
    """Whether the gradient of the first of two steps is in that of the second."""
    want, got, earlier = wrong.want, wrong.got, wrong.earlier
    if earlier is None or earlier.shape[1:] != want.shape[1:] or not (earlier.any() and got.isfinite().all()):
        return ""
    return "with those of the step before" if _near(got, want + earlier[: len(want)].double()) else ""


def _by_its_numbers(want: torch.Tensor, got: torch.Tensor) -> str:
    if got.isnan().any():
        return f"{int(got.isnan().sum())} of {got.numel()} are NaN"
    if not got.any():
        return "all zero"
    factor = _times(got, want)
    return f"{factor:.3g} times the right one" if _near(got, factor * want) else ""


def _unreduced(wrong: Wrong) -> str:
    """The axis over which the ranks' gradients make the right one together, if there is one."""
    for axis, parts in wrong.of_groups:
        if _near(sum(parts[1:], parts[0]), wrong.want):
            return f"the part of one rank: not summed over {axis}"
        if _near(sum(parts[1:], parts[0]) / len(parts), wrong.want):
            return f"the part of one rank: not averaged over {axis}"
    return ""


def _by_routers_choice(wrong: Wrong) -> str:
    """Whether it is that under the routers' own choice, where routes were given."""
    if wrong.routers_choice is None:
        return ""
    return "that of the routers' own choice" if _near(wrong.got, wrong.routers_choice()) else ""


def _of_no_loss(wrong: Wrong) -> str:
    """Whether there should be none, as of an indexer: another loss reaches it."""
    return "" if wrong.want.any() else "where the loss does not reach"


def _times(got: torch.Tensor, want: torch.Tensor) -> float:
    """How many times as large, by least squares."""
    return float((got * want).sum() / want.square().sum().clamp_min(TINY))


def _near(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-3, atol=1e-4 * float(got.abs().max()))


def nearest_the_loss(findings: list[Finding]) -> list[Finding]:
    """Say of gradients without a diagnosis which one a backward pass comes to first."""
    named = [finding for finding in findings if finding.hf_name]
    if not named:
        return findings
    first = max(named, key=lambda finding: _depth(finding.hf_name))
    diagnosis = ": ".join(filter(None, (f"the one nearest the loss is of {first.hf_name}", first.diagnosis)))
    return [one if one.diagnosis or not one.hf_name else replace(one, diagnosis=diagnosis) for one in findings]


def _depth(name: str) -> tuple[int, int, int]:
    """How far towards the loss a tensor is: where of the model, the number of its layer, and where in it."""
    layer, _ = hf_numbers(name)
    if layer is None:
        return next((n for n, part in enumerate(("norm", "lm_head"), 2) if part in name), 0), 0, 0
    return 1, layer, next((n for n, part in enumerate(_IN_A_LAYER) if part in name), len(_IN_A_LAYER))
