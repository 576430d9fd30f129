"""The routes of one rollout as it grows over turns, aborts and resumptions, until it is trained on.

trace = Trace(Spec.of(model))
answer = engine(prompt, routed_experts_prompt_start=trace.prompt_start)
trace.add(answer.routed_experts, tokens=len(prompt) + len(answer.tokens))
...
routes, coverage = trace.finish(tokens, loss_mask)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moeref.replay.align import join_turns
from moeref.replay.engine_formats import Spec, from_engine, says_start
from moeref.replay.routes import MISSING, RouteError, Routes, concat, missing_rows, routes


@dataclass(frozen=True)
class Coverage:
    """How many routes (a token in a layer) a finished trace has and lacks.

    `trained` counts the routes of rows that predict a token of the loss, `trained_missing` the holes among them;
    `context` and `context_missing` those of other rows, which act through attention only, without the last token's.
    """

    trained: int
    trained_missing: int
    context: int
    context_missing: int


class Trace:
    """The routes of one rollout.

    Rows that routed sampled tokens are kept when a later turn sends them again. What the engine left out is a hole:
    rows that never came, rows or single layers of -1 or of zeros. `finish` says how many there are.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        empty_TLK = np.zeros((0, len(spec.layers), spec.top_k), np.int64)
        none = routes(empty_TLK, layers=spec.layers, experts=spec.experts)
        self._routes = replace(none, depth=len(spec.moe_layers))

    @property
    def rows(self) -> int:
        """The number of tokens up to the last that has a row, holes between them included."""
        return self._routes.tokens

    @property
    def prompt_start(self) -> int:
        """The first token whose row the next request has to return.

        It is vLLM's `routed_experts_prompt_start` and SGLang's `routed_experts_start_len`.
        """
        held = np.flatnonzero(self._routes.kind_T != MISSING)
        return int(held[-1]) + 1 if held.size else 0

    def add(self, data: Any, tokens: int, *, start: int | None = None, version: int = 0) -> None:
        """Add what the engine sent for a request after which the rollout has `tokens` tokens, in any engine's format.

        A request that was aborted before its first token sends nothing: leave it out. The next one returns its rows.
        start: position of the first row; by default that in the data, else `prompt_start`, as it was asked for.

        Raises RouteError, and keeps the trace as it was, unless the rows end at the last or the last but one token, for
        rows up to the last token whose start nobody says (an engine runs no last token: they may begin one early), for
        rows that end before those held (`truncate` first if the rollout was taken back), and as `from_engine` does.
        """
        asked = self.prompt_start
        sent = from_engine(data, self.spec, version=version, start=start, asked=asked, zeros=True)
        if sent.start + sent.tokens not in (tokens, tokens - 1):
            raise RouteError(
                f"rows of tokens {sent.start} to {sent.start + sent.tokens} for a rollout of {tokens} tokens, whose "
                f"rows end at {tokens - 1}. Was prompt_start={asked} asked for? If not, say start="
            )
        if asked and start is None and sent.start + sent.tokens == tokens and not says_start(data):
            raise RouteError(
                f"{sent.tokens} rows for tokens {asked} to {tokens - 1}: one too many. They begin at "
                f"token {asked - 1}, or the last token has one: say start={asked - 1} or start={asked}"
            )
        gap = sent.start - self.rows
        held = concat([self._routes, missing_rows(gap, self._routes)]) if gap > 0 else self._routes
        self._routes = join_turns(held, sent)

    def truncate(self, tokens: int) -> None:
        """Take the rollout back to its first `tokens` tokens."""
        if tokens < 0:
            raise RouteError(f"tokens={tokens} must be at least 0: say how many stay, not how many go")
        self._routes = self._routes.take(slice(0, tokens))

    def finish(
        self, tokens: int, loss_mask: Sequence[bool | int | float], *, holes: float = 0.0
    ) -> tuple[Routes, Coverage]:
        """The routes of a rollout of `tokens` tokens, one row for each, and what they lack. The trace can still grow.

        loss_mask: for each token, whether its own log-probability is in the loss. That of token t is predicted by row
        t - 1, so the row of the last token is never needed. Tokens without a row, such as observations of a tool or an
        EOS that was appended, become MISSING.
        holes: how many of the routes that are trained on may be missing, as a share from 0 to 1.

        Raises RouteError for a mask of another length, for more rows than tokens, for `holes` that is no share, and for
        more holes where it is trained on, with the first of them.
        """
        if not 0 <= holes <= 1:
            raise RouteError(f"holes={holes} is a share of the routes that are trained on, from 0 to 1")
        mask_T = np.asarray(loss_mask, np.float64) != 0
        if mask_T.shape != (tokens,):
            raise RouteError(f"loss_mask of shape {list(mask_T.shape)} for {tokens} tokens")
        if self.rows > tokens:
            raise RouteError(f"{self.rows} rows of routes for {tokens} tokens; truncate the trace with its tokens")
        lacks = missing_rows(tokens - self.rows, self._routes)
        whole = concat([self._routes, lacks])
        trained_T = np.append(mask_T[1:], False)[:tokens]
        coverage = _coverage(whole, trained_T)
        if coverage.trained_missing > holes * coverage.trained:
            row, layer = np.argwhere(whole.missing_TL & trained_T[:, None])[0]
            raise RouteError(
                f"token {row}, layer {whole.layers[layer]}: no route, but it predicts token {row + 1}, which is "
                f"trained on; {coverage.trained_missing} of {coverage.trained} such routes are missing, "
                f"holes={holes} allows {int(holes * coverage.trained)}"
            )
        return whole, coverage


def _coverage(whole: Routes, trained_T: np.ndarray[Any, Any]) -> Coverage:
    """Count routes and holes, where trained on and elsewhere; the last row is neither: no token comes after it."""
    context_T = ~trained_T
    context_T[-1:] = False
    depth = len(whole.layers)
    lacks_T = whole.missing_TL.sum(axis=1)
    return Coverage(
        trained=int(trained_T.sum()) * depth,
        trained_missing=int(lacks_T[trained_T].sum()),
        context=int(context_T.sum()) * depth,
        context_missing=int(lacks_T[context_T].sum()),
    )
