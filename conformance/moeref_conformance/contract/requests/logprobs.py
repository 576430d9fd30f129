"""What the facet `logprobs` is asked for."""

from __future__ import annotations

import torch

from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.topology import coords

#: Logits are divided by it, as where samples were drawn with it, but for cells with pairs.
TEMPERATURE = 0.7
#: Of a later call, where samples were drawn with another one.
OTHER_TEMPERATURE = 1.3

#: By what the head is multiplied where weights have changed: probabilities from nearly 1 down to those that round to 0
#: beside it, as trained models have them. A power of two, which a division takes back.
WIDER = -64.0
#: What the name of tensors begins with that are computed once weights have changed in place.
CHANGED = "changed-"
#: The set of routes under which they are asked for in cells with replay R3.
ROUTES = "a"
#: Those that an engine computed where it ran a part of a sample again.
OTHER_ROUTES = "b"


def temperature(cell: Cell) -> float:
    """That of the first call, and under routes: 1 for pairs, which RL asks for most, and may go another way."""
    return 1.0 if cell.batch == "pairs" else TEMPERATURE


#: First and last tokens of a TP rank's part of the vocabulary, where that is padded to a multiple of 128 rows a rank,
#: Megatron-Core's default, and where two ranks have it without more padding.
BORDERS = (128, 127, 66, 65)


def ended(tokens_BS: torch.Tensor) -> torch.Tensor:
    """The same rows, each ending in a token at a border of the vocabulary's parts; -1 stays after its end.

    A last token has a log-probability, and no logits are asked for that depend on it.
    """
    ends_B1 = (tokens_BS >= 0).sum(1, keepdim=True) - 1
    last_B = torch.tensor(BORDERS).repeat(-(-len(tokens_BS) // len(BORDERS)))[: len(tokens_BS)]
    return tokens_BS.scatter(1, ends_B1, last_B[:, None].to(tokens_BS))


def rolled(rows_B: torch.Tensor, cell: Cell, rank: int) -> torch.Tensor:
    """Rows of tokens or results, rolled by 1 and the number of the rank's data-parallel replica.

    In this order a rank is asked under routes, and once weights have changed: in RL replicas have samples of their own.
    """
    return rows_B.roll(-1 - coords(cell.layout, rank)["dp"], 0)
