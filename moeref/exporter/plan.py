"""The export plan: which Hugging Face tensors come out, in which order, from which units. No collective, no torch.

Every rank makes the same plan from the table alone, so names and order cannot depend on the layout or on the rank.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from moeref.bridge.units import HFTensor, Table, Unit


@dataclass(frozen=True)
class Step:
    """Units that are sent together and the Hugging Face tensors made of them: one unit and its tensors (q, k, v of a
    linear_qkv), or all experts' units and the one fused tensor they fill."""

    units: tuple[Unit, ...]
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True)
class Plan:
    """What an export sends, in order."""

    table: Table
    writer: int = 0

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps in canonical order."""
        together: dict[tuple[str, ...], list[Unit]] = {}
        for unit in self.table.units:
            if unit.exports:
                together.setdefault(tuple(t.name for t in unit.hf), []).append(unit)
        return tuple(Step(tuple(units), units[0].hf) for units in together.values())

    @functools.cached_property
    def tensors(self) -> tuple[HFTensor, ...]:
        """Every tensor of the stream in order."""
        return tuple(t for step in self.steps for t in step.tensors)

    @functools.cached_property
    def digest(self) -> int:
        """63 bits over names, shapes, dtypes, order, layout, writer; equal on all ranks or nothing starts."""
        text = repr((self.table.layout.text, self.writer, [(t.name, t.shape, t.dtype) for t in self.tensors]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
