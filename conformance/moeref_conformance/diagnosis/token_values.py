"""Trials on log-probabilities and entropies of tokens: known mistakes in the softmax, and in which token is meant.

Rows [B, S - 1] have the values of tokens from the second on. Where `want_BS` is NaN there is no token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from moeref_conformance.diagnosis.matching import first_of, runs, span

LOGPROBS = "logprobs"
#: So many tokens have to agree; with fewer it may be chance.
ENOUGH = 3
#: Of tokens: a number that lies half-way between two of bf16 is rounded either way.
NEARLY_ALL = 0.95


@dataclass(frozen=True)
class Trial:
    """Values of `which` kind that are wrong, the right ones, and what these are made of.

    `limit` is how near values have to be that are explained. `shards` is over how many ranks the vocabulary is cut.
    """

    which: str
    want_BS: torch.Tensor
    got_BS: torch.Tensor
    logits_BSV: torch.Tensor
    tokens_BS: torch.Tensor
    temperature: float
    limit: float
    shards: int = 1

    @property
    def there_BS(self) -> torch.Tensor:
        """Where a token is."""
        return ~self.want_BS.isnan()

    @property
    def scaled_BSV(self) -> torch.Tensor:
        """Logits at the temperature, of the places that predict."""
        return self.logits_BSV[:, :-1].double() / self.temperature

    def near(self, other_BS: torch.Tensor, most: float = 1.0) -> bool:
        """Whether the values are these, but for a few where not all have to be."""
        near_N = (other_BS.double() - self.got_BS.double()).abs()[self.there_BS & ~other_BS.isnan()] <= self.limit
        return len(near_N) >= ENOUGH and float(near_N.double().mean()) >= most

    def of(self, scaled_BSV: torch.Tensor) -> torch.Tensor:
        """The values that are made of these logits."""
        logprobs_BSV = scaled_BSV.double().log_softmax(-1)
        if self.which != LOGPROBS:
            return -torch.xlogy(logprobs_BSV.exp(), logprobs_BSV.exp()).sum(-1)
        return _at(logprobs_BSV, self.tokens_BS[:, 1:])


def _at(of_BSV: torch.Tensor, tokens_BS: torch.Tensor) -> torch.Tensor:
    return of_BSV.gather(-1, tokens_BS[..., None].clamp_min(0))[..., 0]


def told(trial: Trial) -> str:
    """What the values are, and else which of them differ."""
    tried = (_softmax, _clamped, _part_of_the_vocabulary, _added_up, _elsewhere, _in_bf16, _too_much)
    finite = bool(trial.got_BS[trial.there_BS].isfinite().all())
    return (first_of(*(partial(one, trial) for one in tried)) if finite else "") or _which(trial)


def _softmax(of: Trial) -> str:
    """Other logits than the right ones go into the softmax, or it has another token's log-probability."""
    for said, other_BS in of_others(of):
        if of.near(other_BS, NEARLY_ALL if "bf16" in said else 1.0):
            return said
    return ""


def of_others(of: Trial) -> Iterator[tuple[str, torch.Tensor]]:
    """Values [B, S - 1] of other logits than the right ones, or of other tokens, and words for them."""
    for said, scaled_BSV in _logits(of):
        yield said, of.of(scaled_BSV).where(of.there_BS, torch.nan)
    if of.which != LOGPROBS:
        return
    logprobs_BSV = (of.logits_BSV.double() / of.temperature).log_softmax(-1)
    for by, others_BS in (
        ("the token's own place: labels are not shifted", _at(logprobs_BSV, of.tokens_BS)[:, 1:]),
        ("two places before: labels are shifted twice", _at(logprobs_BSV[:, :-2], of.tokens_BS[:, 2:])),
    ):
        missing = of.want_BS.shape[1] - others_BS.shape[1]
        padded_BS = torch.nn.functional.pad(others_BS, (missing, 0), value=torch.nan)
        yield f"those by the logits at {by}", padded_BS.where(of.there_BS, torch.nan)


def _logits(of: Trial) -> Iterator[tuple[str, torch.Tensor]]:
    right_BSV, logits_BSV = of.scaled_BSV, of.logits_BSV[:, :-1].double()
    yield f"those of logits that are divided by the temperature {of.temperature} twice", right_BSV / of.temperature
    yield f"those of logits that are multiplied by the temperature {of.temperature}", logits_BSV * of.temperature
    for rounded_BSV in (right_BSV.bfloat16(), logits_BSV.bfloat16().double() / of.temperature):
        yield "those of logits that are rounded to bf16", rounded_BSV
    yield "those of a softmax that is taken twice", right_BSV.softmax(-1)
    size = right_BSV.shape[-1]
    for more in sorted({-size % (64 * number) for number in (1, 2, 4, 8, 16)} - {0}):
        padded_BSV = torch.nn.functional.pad(right_BSV, (0, more))
        yield f"those of a softmax over {more} logits of 0 more: what pads the vocabulary counts", padded_BSV


def _clamped(of: Trial) -> str:
    """No value is below, or above, one that all wrong ones have."""
    off_BS = _off(of)
    wrong = of.got_BS[off_BS].double()
    bound = float(wrong[0])
    for limited, word in ((of.want_BS.clamp_min(bound), "least"), (of.want_BS.clamp_max(bound), "most")):
        if bool((wrong == bound).all()) and of.near(limited) and not bool(off_BS[of.there_BS].all()):
            return f"clamped: all that differ are {bound:g}, the {word} of all"
    return ""


def _part_of_the_vocabulary(of: Trial) -> str:
    """The sum of the softmax is over the part that a rank holds."""
    if of.which != LOGPROBS:
        return ""
    size, chosen_BS = of.scaled_BSV.shape[-1], _at(of.scaled_BSV, of.tokens_BS[:, 1:])
    for parts in sorted({of.shards, 2, 4, 8} - {1}):
        for rows in (-(-size // parts), *(-(-size // (unit * parts)) * unit for unit in (64, 128))):
            for start in range(0, size, rows):
                part_BSV = of.scaled_BSV[..., start : start + rows]
                if part_BSV.shape[-1] < size and of.near(chosen_BS - part_BSV.logsumexp(-1)):
                    last = start + part_BSV.shape[-1] - 1
                    return f"the sum of the softmax is over tokens {start} to {last} of the vocabulary alone"
    return ""


def _added_up(of: Trial) -> str:
    """Entropies of softmaxes over parts of the vocabulary, added up."""
    if of.which == LOGPROBS:
        return ""
    size = of.scaled_BSV.shape[-1]
    for rows in sorted({-(-size // parts) for parts in (2, 4, 8)} | {16, 32, 64, 128}):
        parts = [of.of(part_BSV) for part_BSV in torch.split(of.scaled_BSV, rows, -1)]
        if len(parts) > 1 and of.near(torch.stack(parts).sum(0)):
            return f"the sum of those of parts of the vocabulary, {rows} tokens each"
    return ""


def _elsewhere(of: Trial) -> str:
    """Right values at other tokens of the row, or in another row."""
    rows = _other_rows(of)
    if rows:
        row, other = rows[0]
        more = f", and {len(rows) - 1} more rows" if len(rows) > 1 else ""
        return f"row {row} has those of row {other}{more}: rows are in another order"
    moves = [one for row in range(len(of.got_BS)) for one in _moves(of, row)]
    if len(moves) < max(ENOUGH, int(_off(of).sum())):
        return ""
    position, row, other = moves[0]
    return f"token {position + 1} of row {row} has that of token {other + 1}: tokens of a row are in another order"


def _other_rows(of: Trial) -> list[tuple[int, int]]:
    """Each row that differs, and the one whose values it has; none unless all have another's."""
    found = []
    for row in _off(of).any(1).nonzero()[:, 0].tolist():
        others = (other for other in range(len(of.want_BS)) if other != row and _alike(of, row, other))
        if (other := next(others, None)) is None:
            return []
        found.append((row, other))
    return found


def _alike(of: Trial, row: int, other: int) -> bool:
    both_S = of.there_BS[row] & of.there_BS[other]
    apart_S = (of.got_BS[row].double() - of.want_BS[other].double()).abs()[both_S]
    return len(apart_S) >= ENOUGH and bool((apart_S <= of.limit).all())


def _moves(of: Trial, row: int) -> Iterator[tuple[int, int, int]]:
    """The position of each token of a row that differs and has the value of another one, the row, and that one's."""
    want_S = of.want_BS[row].double().nan_to_num(torch.inf)
    for position in _off(of)[row].nonzero()[:, 0].tolist():
        apart_S = (want_S - of.got_BS[row, position].double()).abs()
        if float(apart_S.min()) <= of.limit:
            yield position, row, int(apart_S.argmin())


def _in_bf16(of: Trial) -> str:
    """Not one has a digit that bf16 has not; of numbers in fp32 one in 65,536 has none by chance."""
    got_N, want_N = of.got_BS[of.there_BS], of.want_BS[of.there_BS]
    numbers = len(got_N) >= ENOUGH and bool(got_N.all()) and torch.equal(got_N, got_N.bfloat16().float())
    near = float((got_N - want_N).abs().max()) <= 2.0**-5 * float(want_N.abs().max())
    return "numbers of bf16: the softmax is computed in it" if numbers and near else ""


def _too_much(of: Trial) -> str:
    """All are off to one side, as where a sum has too much or too little in it."""
    if of.which != LOGPROBS:
        return ""
    off_N = (of.got_BS.double() - of.want_BS.double())[of.there_BS]
    for sign, word, sums in ((-1, "low", "more"), (1, "high", "less")):
        by_N = sign * off_N
        if float(by_N.min()) > of.limit:
            by = f"by {float(by_N.min()):.2g} to {float(by_N.max()):.2g}"
            return f"too {word} at every token, {by}: as of a softmax whose sum has {sums} in it than the vocabulary"
    return ""


def _off(of: Trial) -> torch.Tensor:
    return of.there_BS & ~((of.got_BS.double() - of.want_BS.double()).abs() <= of.limit)


def _which(of: Trial) -> str:
    """Which tokens differ, where not all do."""
    off_BS = _off(of)
    wrong, there = int(off_BS.sum()), int(of.there_BS.sum())
    values = of.got_BS[off_BS]
    alike = f", and are {float(values[0]):g}" if wrong >= ENOUGH and bool((values == values[0]).all()) else ""
    if wrong == there:
        return f"all {there} differ{alike}"
    tokens = [
        (row, ", ".join(span(start + 1, count) for start, count in runs(flags)[:3])) for row, flags in _rows(off_BS)
    ]
    if len(tokens) == len(off_BS) > 1 and len({which for _, which in tokens}) == 1:
        return f"{wrong} of {there} differ: tokens {tokens[0][1]} of every row{alike}"
    said = [f"tokens {which} of row {row}" for row, which in tokens[:2]]
    more = [f"and of {len(tokens) - 2} more rows"] if len(tokens) > 2 else []
    return f"{wrong} of {there} differ: {'; '.join(said + more)}{alike}"


def _rows(off_BS: torch.Tensor) -> list[tuple[int, list[bool]]]:
    return [(row, flags) for row, flags in enumerate(off_BS.tolist()) if any(flags)]
