"""How often each token counts in a loss, told from the gradient of the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeref_conformance.contract.requests.policy import Loss
from moeref_conformance.judges import Case
from moeref_conformance.judges.common import expected, once
from moeref_conformance.oracles import loss_terms
from moeref_conformance.oracles.placement import Placement

HEAD = "lm_head.weight"
#: A gradient is explained if no more of its length than this is left, and a token counts alike within this part.
EXPLAINED, ALIKE = 1e-3, 1e-2
#: A term that is a smaller part of the largest, as the entropy of a draw that is all but sure, is lost in rounding.
TELLING = 1e-3


@once
def _terms(case: Case, policy: Loss | None, routes: str) -> loss_terms.Terms:
    temperature = policy.temperature if policy else 1.0
    return loss_terms.terms(expected(case), temperature, routes, case.claims.missing_rows)


def counted(
    case: Case,
    rows: torch.Tensor,
    want: torch.Tensor,
    got: torch.Tensor,
    *,
    policy: Loss | None = None,
    routes: str = "",
) -> str:
    """How often tokens count in `got`, a gradient of the head's `rows`, where `want` is the right one.

    Of a `policy`'s loss or of cross entropy, under the set `routes` or the routers' own. Empty if the terms of the
    tokens do not explain both.
    """
    both_N2 = torch.stack([want.flatten(), got.flatten()], 1)
    if not bool(both_N2.isfinite().all()):
        return ""
    terms = _terms(case, policy, routes)
    kinds = [terms.logprob_TV, *([terms.entropy_TV] if policy and policy.entropy else [])]
    of_tokens_NK = torch.cat(
        [torch.einsum("tv,th->vht", term_TV[:, rows], terms.states_TH).flatten(0, 1) for term_TV in kinds], 1
    )
    length_K = of_tokens_NK.norm(dim=0)
    of_tokens_NK *= length_K > TELLING * length_K.max()
    found_K2 = torch.linalg.lstsq(of_tokens_NK, both_N2, driver="gelsd").solution  # terms may be alike
    left = (of_tokens_NK @ found_K2 - both_N2).norm(dim=0)
    if bool((left > EXPLAINED * both_N2.norm(dim=0)).any()):
        return ""
    of_logprobs_T2, of_entropies_T2 = found_K2.tensor_split([len(terms.places)])
    words = _words(terms.places, *of_logprobs_T2.T)
    if not of_entropies_T2[:, 0].any():
        return words
    times = float(of_entropies_T2[:, 1].sum() / of_entropies_T2[:, 0].sum())
    return f"{words}, entropies {_rounded(times)} times"


def rows_of(case: Case, rank: int, key: str, shape: Sequence[int]) -> torch.Tensor:
    """The tokens of the vocabulary that a rank's head, of this shape with its padding, has rows of."""
    chunk, _, local = key.partition(":")
    head_VH = expected(case).tensors[HEAD]
    numbered = {**expected(case).tensors, HEAD: torch.arange(len(head_VH)).double()[:, None].expand_as(head_VH)}
    held = Placement(case.cell, expected(case).config, numbered).shard(rank, int(chunk), local, shape)
    return held.tensor[: held.rows, 0].long()


def _words(places: list[tuple[int, int]], want_T: torch.Tensor, got_T: torch.Tensor) -> str:
    """Which tokens are left out, which should not count, or how often samples or tokens count."""
    small = ALIKE * float(want_T.abs().max())
    trained_T = want_T.abs() > small
    for wrong_T, what in (
        (trained_T & (got_T.abs() <= ALIKE * want_T.abs()), "{} of the tokens that are trained on do not count"),
        (~trained_T & (got_T.abs() > small), "{} tokens count that are not trained on"),
    ):
        if bool(wrong_T.any()):
            sample, position = places[int(wrong_T.nonzero()[0])]
            return f"{what.format(int(wrong_T.sum()))}, first that at {position} of sample {sample}"
    times: dict[int, list[float]] = {}
    for (sample, _), counts, want, got in zip(places, trained_T.tolist(), want_T.tolist(), got_T.tolist(), strict=True):
        if counts:
            times.setdefault(sample, []).append(got / want)
    if all(max(of_one) - min(of_one) <= ALIKE * abs(max(of_one)) for of_one in times.values()):
        each = ", ".join(_rounded(sum(of_one) / len(of_one)) for of_one in [*times.values()][:8])
        return f"tokens of the samples count {each}{' …' if len(times) > 8 else ''} times"
    each_T = [one for of_one in times.values() for one in of_one]
    return f"tokens count {_rounded(min(each_T))} to {_rounded(max(each_T))} times"


def _rounded(times: float) -> str:
    return f"{round(times, 3) + 0.0:g}"
