"""A second design of INT4 in groups, correct and small, which faults and benign targets change by a method."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from moeref_conformance.contract.requests.int4 import PACKED, SCALE, SHAPE
from moeref_conformance.selftest.plain_fp8 import Named, Quantiser


class Packer(Quantiser):
    """Goes over the stream of `session` row by row. Ranks that are given no tensor yield nothing."""

    #: What the largest magnitude of a group is divided by.
    divisor = 7.0
    group = 1

    def stream(self, config: Path) -> Iterable[Named]:
        whole = json.loads((config / "config.json").read_text())
        asked = whole.get("text_config", whole)["quantization_config"]
        self.group = asked["config_groups"]["group_0"]["weights"]["group_size"]
        self.kept = frozenset(asked["ignore"])
        return self.ordered(self.all())

    def sent(self, name: str, tensor: torch.Tensor) -> Iterator[Named]:
        if not self.quantised(name):
            yield name, self.as_it_is(tensor)
            return
        words, scales = self.made(name, tensor)
        yield name + PACKED, words
        yield name + SCALE, scales
        yield name + SHAPE, self.shape(tensor, words)

    def quantised(self, name: str) -> bool:
        module = name.removesuffix(".weight")
        ignored = (re.match(of[3:], module) if of.startswith("re:") else of == module for of in self.kept)
        return self.linear(name) and not any(ignored)

    def made(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and scales of a matrix."""
        scales = torch.stack([self.scale(part.float(), tensor) for part in torch.split(tensor, self.group, 1)], 1)
        spread = scales.repeat_interleave(self.group, 1)[:, : tensor.shape[1]]
        return self.words(self.integers(tensor.float() / spread)), self.packed(scales)

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The scale of each row of a group's columns."""
        largest = part.abs().amax(1)
        return torch.where(largest > 0, largest / self.divisor, 1.0).bfloat16().float()

    def integers(self, quotients: torch.Tensor) -> torch.Tensor:
        """The numbers from -8 to 7 of weights that are divided by their scales."""
        return quotients.round().clamp(-8, 7).int()

    def words(self, numbers: torch.Tensor) -> torch.Tensor:
        """int32 of eight numbers of a row each."""
        bits = torch.nn.functional.pad(self.bits(numbers), (0, -numbers.shape[1] % 8))
        words = torch.zeros(len(bits), bits.shape[1] // 8, dtype=torch.int32)
        for at in range(8):
            words |= bits[:, at::8] << (4 * self.place(at))
        return words

    def bits(self, numbers: torch.Tensor) -> torch.Tensor:
        """The four bits of each number."""
        return numbers + 8

    def place(self, at: int) -> int:
        """Where number `at` of a word lies in it."""
        return at

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.bfloat16()

    def shape(self, tensor: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """What is sent as the shape."""
        return torch.tensor(tensor.shape, dtype=torch.int32)
