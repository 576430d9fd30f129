"""Mismatch between trainer and engine: fixed definitions, and the keys under which frameworks log them.

With d = log p_trainer - log p_engine of the sampled tokens, over tokens with mask 1:

| key | definition |
|---|---|
| k1 | mean of -d: unbiased estimate of KL(engine ‖ trainer), as the engine sampled the tokens |
| k3 | mean of exp(d) - 1 - d: estimates the same, is never negative, and has lower variance |
| mean_abs, max_abs | of abs(d) |
| f(τ) | share of tokens whose ratio max(p/q, q/p) exceeds τ |
| mult_prob_error | mean of exp(abs(d)) |

Routes are compared as sets: engine and trainer may list the experts of a token in different orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moeref.replay.routes import GIVEN, RouteError, Routes

TAUS = (2.0,)
#: Framework -> its log key -> the field of `Mismatch` with the same definition, from the frameworks' sources. slime and
#: miles average over samples, verl and ms-swift over all tokens; these agree if all samples have the same length.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "verl": {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"},
    "ms-swift": {"rollout_correction/kl": "k1", "rollout_correction/k3_kl": "k3"},
    "NeMo-RL": {"train/gen_kl_error": "k3", "train/token_mult_prob_error": "mult_prob_error"},
    "SkyRL": {
        "policy/rollout_train_logprobs_abs_diff_mean": "mean_abs",
        "policy/rollout_train_logprobs_abs_diff_max": "max_abs",
    },
    "slime": {"train/train_rollout_logprob_abs_diff": "mean_abs"},
    "miles": {"train/train_rollout_logprob_abs_diff": "mean_abs", "train/train_rollout_kl": "k3"},
}


@dataclass(frozen=True)
class Mismatch:
    """Differences of log-probabilities, as defined at the top of the module."""

    tokens: int
    k1: float
    k3: float
    mean_abs: float
    max_abs: float
    mult_prob_error: float
    f: Mapping[float, float]

    def named_as(self, framework: str) -> dict[str, float]:
        """The values under the log keys of a framework. Raises RouteError if it is not in ALIASES."""
        if framework not in ALIASES:
            raise RouteError(f"no names of {framework!r}; there are those of {', '.join(ALIASES)}")
        return {key: getattr(self, field) for key, field in ALIASES[framework].items()}


def mismatch(trainer_T: Any, engine_T: Any, mask_T: Any = None, *, taus: Sequence[float] = TAUS) -> Mismatch:
    """Compare log-probabilities of the same tokens in float64; arrays of several axes are taken as one list of tokens.

    mask_T: which tokens count; None takes all. Raises RouteError for unequal shapes, a mask without a token, and values
    that are not finite.
    """
    trainer, engine = np.asarray(trainer_T, np.float64), np.asarray(engine_T, np.float64)
    mask = np.ones(trainer.shape, bool) if mask_T is None else np.asarray(mask_T).astype(bool)
    if not trainer.shape == engine.shape == mask.shape:
        shapes = f"shapes {list(trainer.shape)} (trainer), {list(engine.shape)} (engine), {list(mask.shape)} (mask)"
        raise RouteError(f"log-probabilities of the same tokens have one shape, not {shapes}")
    if not mask.any():
        raise RouteError("no token is left by the mask; a mean over none is not 0")
    trainer, engine = trainer[mask], engine[mask]
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        side = "engine" if np.isfinite(trainer).all() else "trainer"
        raise RouteError(f"the {side} has log-probabilities that are not finite")
    d = trainer - engine
    ratio = np.exp(np.abs(d))
    return Mismatch(
        tokens=d.size,
        k1=float(-d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        mean_abs=float(np.abs(d).mean()),
        max_abs=float(np.abs(d).max()),
        mult_prob_error=float(ratio.mean()),
        f={tau: float((ratio > tau).mean()) for tau in taus},
    )


@dataclass(frozen=True)
class Agreement:
    """Share of rows with the same set of experts, by layer and overall; first (token, layer) that differs."""

    rows: int
    by_layer: Mapping[int, float]
    overall: float
    first: tuple[int, int] | None


def agreement(a: Routes, b: Routes) -> Agreement:
    """Compare two routes of the same tokens and layers, where both have a route.

    Raises RouteError if layers or shapes differ, or if no row is GIVEN in both.
    """
    if (a.layers, a.experts, a.idx_TLK.shape) != (b.layers, b.experts, b.idx_TLK.shape):
        raise RouteError(
            f"routes {list(a.idx_TLK.shape)} of layers {list(a.layers)} and {list(b.idx_TLK.shape)} of {list(b.layers)}"
        )
    both_T = (a.kind_T == GIVEN) & (b.kind_T == GIVEN) & ~(a.missing_TL | b.missing_TL).all(axis=1)
    if not both_T.any():
        raise RouteError("no row is given on both sides")
    tokens: npt.NDArray[np.intp] = np.flatnonzero(both_T)
    same_TL = (np.sort(a.idx_TLK[tokens], axis=2) == np.sort(b.idx_TLK[tokens], axis=2)).all(axis=2)
    given_TL = ~(a.missing_TL[tokens] | b.missing_TL[tokens])
    wrong = np.argwhere(given_TL & ~same_TL)
    first = (int(tokens[wrong[0][0]]) + a.start, a.layers[int(wrong[0][1])]) if len(wrong) else None
    shares = {
        layer: float(same_TL[given_TL[:, i], i].mean()) for i, layer in enumerate(a.layers) if given_TL[:, i].any()
    }
    return Agreement(len(tokens), shares, float(same_TL[given_TL].mean()), first)
