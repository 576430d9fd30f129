"""A second design of FP8 in blocks, correct and small, which faults and benign targets change by a method."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.selftest.border import Change, Swapped

Named = tuple[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
LARGEST = 448.0


class Quantiser:
    """Goes over the stream of `session` block by block. Ranks that are given no tensor yield nothing."""

    def __init__(self, session: Any, cell: Cell) -> None:
        self.session, self.cell = session, cell
        self.block, self.kept, self.powers = (1, 1), frozenset[str](), False

    def stream(self, config: Path) -> Iterable[Named]:
        asked = json.loads((config / "config.json").read_text())["quantization_config"]
        self.block, self.kept = tuple(asked["weight_block_size"]), frozenset(asked.get("modules_to_not_convert", ()))
        self.powers = asked.get("scale_fmt") == "ue8m0"
        return self.ordered(self.all())

    def all(self) -> Iterator[Named]:
        """Every tensor that is sent, as it comes."""
        for meta, tensor in self.session.export.stream():
            if tensor is not None:
                yield from self.sent(meta.name, tensor)
            del tensor

    def ordered(self, stream: Iterable[Named]) -> Iterable[Named]:
        """What is sent, in order."""
        return stream

    def sent(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        """What becomes of one tensor."""
        if not self.quantised(name):
            yield name, self.as_it_is(tensor)
            return
        weight, scales = self.made(name, tensor)
        yield name, weight
        yield name.removesuffix("weight") + "weight_scale_inv", scales

    def quantised(self, name: str) -> bool:
        """Whether a tensor is quantised."""
        return self.linear(name) and name.removesuffix(".weight") not in self.kept

    def linear(self, name: str) -> bool:
        """Whether a tensor is that of a linear of attention, of a gated delta net, of an MLP or of an expert."""
        at = r"layers\.\d+\.(self_attn|linear_attn|mlp)\."
        return re.search(at + r".*_proj(_[a-z_]+)?\.weight$", name) is not None

    def as_it_is(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is not quantised."""
        return tensor

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and scales of a matrix."""
        high, wide = self.block
        rows, columns = (self.number(size, of) for size, of in zip(tensor.shape, self.block, strict=True))
        weight, scales = torch.zeros_like(tensor, dtype=FP8), torch.zeros(rows, columns)
        for row in range(rows):
            for column in range(columns):
                at = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
                part = tensor[at].float()
                scale = self.scale(part, tensor)
                scale = next_power(scale) if self.powers else scale
                weight[at] = self.rounded(part, scale)
                scales[row, column] = self.told(scale)
        return weight, self.packed(scales)

    def number(self, size: int, of: int) -> int:
        """Blocks along a side of a matrix."""
        return math.ceil(size / of)

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The scale of a block."""
        largest = part.abs().max()
        return largest / LARGEST if largest > 0 else torch.tensor(1.0)

    def rounded(self, part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """A block in FP8."""
        return (part / scale).to(FP8)

    def told(self, scale: torch.Tensor) -> torch.Tensor:
        """A scale as it is sent."""
        return scale

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        """The scales of a matrix as they are sent."""
        return scales


def next_power(scale: torch.Tensor) -> torch.Tensor:
    """The power of two that is no smaller."""
    return torch.exp2(torch.ceil(torch.log2(scale)))


def design(quantiser: type[Quantiser] = Quantiser) -> Change:
    """A target's `wrap` with this design in place of its own."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        return Swapped(session, quantised=quantiser(session, cell))

    return wrap
