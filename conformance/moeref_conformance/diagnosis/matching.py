"""Where the rows and columns of a tensor come from: a search of a checkpoint by bytes, and its results in words.

A line is a row or a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from moeref_conformance.diagnosis.compare import raw

Where = tuple[str, int]
#: Stands for the name of a line's tensor where the line is all zero.
_ZERO = "zero"


@dataclass
class Candidates:
    """All tensors that might have been mistaken for one another, by name, and how many layers are dense.

    For the shards of one rank, `behind` has those of the whole checkpoint, searched for lines that no shard of the
    rank has, and `parts` names the tensors there that each shard is made of. `left_over` are tensors of a file beside
    the checkpoint that its index does not name.
    """

    tensors: Mapping[str, torch.Tensor]
    dense_prefix: int = 0
    behind: Candidates | None = None
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_over: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def rows(self) -> dict[bytes, Where]:
        """Bytes of every row of every matrix -> (name, row)."""
        return _lines(self.tensors, columns=False)

    @cached_property
    def columns(self) -> dict[bytes, Where]:
        """Bytes of every column of every matrix -> (name, column)."""
        return _lines(self.tensors, columns=True)

    @cached_property
    def whole(self) -> dict[bytes, str]:
        """Bytes of every tensor -> name."""
        return {octets(tensor): name for name, tensor in self.tensors.items()}

    def line(self, line: bytes, columns: bool) -> Where | None:
        """Where a row or column is, here or behind."""
        here = (self.columns if columns else self.rows).get(line)
        return self.behind.line(line, columns) if here is None and self.behind is not None else here

    def named(self, got: torch.Tensor) -> str:
        """The name of the tensor that has the shape and bytes of `got`, here or behind; empty if none has."""
        name = self.whole.get(octets(got))
        if name is not None and self.tensors[name].shape == got.shape:
            return name
        return self.behind.named(got) if self.behind is not None else ""

    def sources(self, name: str) -> list[torch.Tensor]:
        """The full tensors that the shard `name` is made of; none if `name` is not a shard."""
        return [self.behind.tensors[part] for part in self.parts.get(name, ())] if self.behind is not None else []


def octets(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    return raw(tensor).numpy().tobytes()


def _lines(tensors: Mapping[str, torch.Tensor], columns: bool) -> dict[bytes, Where]:
    places: dict[bytes, Where] = {}
    for name, tensor in tensors.items():
        if tensor.dim() >= 2:
            for i, line in enumerate(lines_of(tensor, columns)):
                places.setdefault(line, (name, i))
    return places


def lines_of(tensor: torch.Tensor, columns: bool) -> list[bytes]:
    """The rows (or columns) of a matrix as bytes. A stack of matrices counts as one tall matrix."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    # A copy: a transposed [1, n] counts as contiguous, and its bytes cannot be viewed.
    flat = (flat.T if columns else flat).clone(memory_format=torch.contiguous_format)
    return [row.tobytes() for row in flat.view(torch.uint8).numpy()] if flat.numel() else []


def zeros_of(tensor: torch.Tensor, columns: bool) -> list[bool]:
    """Which of the lines of `lines_of` are zero, of either sign."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1])
    return [not used for used in (flat != 0).any(0 if columns else 1).tolist()] if flat.numel() else []


def span(start: int, count: int) -> str:
    """`3–7` for five lines from the third, `3` for one."""
    return f"{start}–{start + count - 1}" if count > 1 else str(start)


_NUMBERS = re.compile(r"(?P<layers>(?:^|\.)layers\.)(?P<layer>\d+)|(?P<experts>experts\.)(?P<expert>\d+)")


def _template(name: str) -> tuple[str, int | None, int | None]:
    """A name with layer and expert number blanked, and the two numbers."""
    layer = expert = None
    for match in _NUMBERS.finditer(name):
        if match["layer"]:
            layer = int(match["layer"])
        else:
            expert = int(match["expert"])
    return _NUMBERS.sub(lambda m: f"{m['layers'] or m['experts']}*", name), layer, expert


def relation(name: str, other: str, dense_prefix: int = 0) -> str:
    """What `other` is, seen from `name`: "expert 37", "layer +3 = dense prefix", "up_proj of the same layer" …"""
    (kind, layer, expert), (other_kind, other_layer, other_expert) = _template(name), _template(other)
    parts = []
    if expert != other_expert and other_expert is not None:
        parts.append(f"expert {other_expert}")
    if layer is not None and other_layer is not None and layer != other_layer:
        shift = other_layer - layer
        parts.append(f"layer {shift:+d}" + (" = dense prefix" if dense_prefix and abs(shift) == dense_prefix else ""))
    if kind != other_kind:
        return other if parts else f"{short(other)} of the same {'expert' if expert is not None else 'layer'}"
    return " of ".join(parts) if parts else "itself"


def mistaken(name: str, other: str, dense_prefix: int = 0) -> str:
    """What a tensor with the values of `other` is: "is layer +1", or "holds expert 0, expected expert 8"."""
    said, own = relation(name, other, dense_prefix), _template(name)[2]
    return f"holds {said}, expected expert {own}" if said.startswith("expert ") else f"is {said}"


def short(name: str) -> str:
    """`up_proj` of a full name."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1] + (".bias" if name.endswith(".bias") else "")


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """(start, count) of every run of true flags."""
    spans: list[tuple[int, int]] = []
    for i, flag in enumerate(flags):
        if flag and spans and sum(spans[-1]) == i:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        elif flag:
            spans.append((i, 1))
    return spans


def shifted(expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """`holds expert 8, …` if every row (or column) of `got` is the expected one, but of tensors with that relation.

    It explains a shard made of several tensors when all are of another expert, layer or kind.
    """
    if expected.dim() != 2 or expected.shape != got.shape:
        return ""
    for columns in (False, True):
        relations = set()
        for right, wrong in zip(lines_of(expected, columns), lines_of(got, columns), strict=True):
            mine, other = (_at_the_source(candidates, line, columns) for line in (right, wrong))
            if mine is None or other is None or mine[1] != other[1]:
                break
            relations.add(mistaken(mine[0], other[0], candidates.dense_prefix))
        else:
            if len(relations) == 1 and relations != {"is itself"}:
                return relations.pop()
    return ""


def _at_the_source(candidates: Candidates, line: bytes, columns: bool) -> Where | None:
    return (candidates.behind or candidates).line(line, columns)


def moved(name: str, got: torch.Tensor, candidates: Candidates, own: Candidates) -> str:
    """Where the rows, else the columns, of `got` come from, as runs; empty unless at least half of them are known.

    They are looked for in `own` first.
    """
    if got.dim() < 2:
        return ""
    return first_of(*(partial(_moved, name, got, candidates, own, columns) for columns in (False, True)))


def _moved(name: str, got: torch.Tensor, candidates: Candidates, own: Candidates, columns: bool) -> str:
    places = [
        (_ZERO, 0) if zero else own.line(line, columns) or candidates.line(line, columns)
        for line, zero in zip(lines_of(got, columns), zeros_of(got, columns), strict=True)
    ]
    if sum(p is not None for p in places) * 2 < len(places) or all(p is None or p[0] == _ZERO for p in places):
        return ""
    word = "columns" if columns else "rows"
    if all(p is not None and p[0] == name for p in places):
        order = [p[1] for p in places if p is not None]
        if sorted(order) == list(range(len(order))):
            told = "; ".join(_tell(name, s, word) for s in _segments(places)[:2])
            return f"{word} permuted within the tensor ({told})"
    strange = [s for s in _segments(places) if (s[2], s[3]) != (name, s[0])]
    if not strange:
        return ""
    text = "; ".join(_tell(name, segment, word) for segment in strange[:2])
    return text + (f"; and {len(strange) - 2} more runs" if len(strange) > 2 else "")


def _segments(places: list[Where | None]) -> list[tuple[int, int, str, int]]:
    """Runs (start, count, source, source start) of lines that are consecutive in their source; "" if it is unknown."""
    out: list[tuple[int, int, str, int]] = []
    for i, where in enumerate(places):
        source, line = where if where is not None else ("", 0)
        if out:
            start, count, last, at = out[-1]
            if last == source and (source in ("", _ZERO) or at + count == line):
                out[-1] = (start, count + 1, last, at)
                continue
        out.append((i, 1, source, line))
    return out


def _tell(name: str, segment: tuple[int, int, str, int], word: str) -> str:
    start, count, source, at = segment
    here = f"{word} {span(start, count)}"
    if not source:
        return f"{here} are nowhere in the checkpoint"
    if source == _ZERO:
        return f"{here} are zero"
    return f"{here} are {word} {span(at, count)} of {'itself' if source == name else source}"


def first_of(*trials: Callable[[], str]) -> str:
    """The answer of the first trial that has one."""
    return next((said for trial in trials if (said := trial())), "")
