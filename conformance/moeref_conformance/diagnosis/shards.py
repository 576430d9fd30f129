"""Trials on fused and sharded tensors: gate with up, q with k and v, and what one rank holds of them.

The name tells what an exported tensor is. For a shard of a rank, `Candidates.sources` gives the full tensors in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from moeref_conformance.diagnosis.axes import SIZES
from moeref_conformance.diagnosis.compare import bits, same
from moeref_conformance.diagnosis.matching import Candidates, short, span


def counterpart(name: str) -> str:
    """up_proj for gate_proj and the other way round; empty for any other name."""
    for a, b in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
        if f".{a}." in name:
            return name.replace(f".{a}.", f".{b}.")
    return ""


def not_rechunked(name: str, expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """TP shards of fc1, each [gate chunk | up chunk], concatenated and cut in the middle."""
    other = candidates.tensors.get(counterpart(name))
    if other is not None:
        gate, up = (expected, other) if ".gate_proj." in name else (other, expected)
        which = slice(0, len(gate)) if ".gate_proj." in name else slice(len(gate), None)
    elif name.endswith("gate_up_proj") and expected.dim() == 2 and len(expected) % 2 == 0:
        (gate, up), which = expected.chunk(2), slice(None)
    else:
        return ""
    for size in SIZES:
        if gate.shape[0] % size == 0:
            shards = [x for pair in zip(gate.chunk(size), up.chunk(size), strict=True) for x in pair]
            if same(torch.cat(shards)[which], got):
                return f"TP shards concatenated without re-chunking gate and up (TP={size})"
    return ""


def groups_lost(name: str, expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """The fused [q heads | k | v] per KV group read as all q, then all k, then all v."""
    match = re.search(r"\.([qkv])_proj\.", name)
    if match is None:
        return ""
    names = [name.replace(match[0], f".{x}_proj.") for x in "qkv"]
    if any(n not in candidates.tensors for n in names):
        return ""
    sources = [candidates.tensors[n] for n in names]
    for groups, fused in _interleaved(sources):
        if same(torch.split(fused, [len(source) for source in sources])["qkv".index(match[1])], got):
            return f"QKV read as [Q;K;V]: the interleave of {groups} KV groups is lost"
    return ""


def _interleaved(sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """q, k and v per KV group, one below the other, for each possible number of groups."""
    for groups in range(2, len(sources[1]) + 1):
        if all(len(source) % groups == 0 for source in sources):
            parts = [source.chunk(groups) for source in sources]
            yield groups, torch.cat([part[g] for g in range(groups) for part in parts])


def _words(names: Sequence[str]) -> str:
    listed = [short(name).removesuffix("_proj") for name in names]
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def wrong_expert(name: str, expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """The right shard of the wrong expert, out of a tensor that holds all experts."""
    sources = candidates.sources(name)
    if len(sources) != 1 or sources[0].dim() < 2 or expected.shape != got.shape:
        return ""
    if said := _whole_expert(sources[0], expected, got):
        return said
    experts, want, have = bits(sources[0]).reshape(len(sources[0]), -1), bits(expected), bits(got)
    for number, own in enumerate(experts):
        ordered, order = own.sort()
        place = torch.searchsorted(ordered, want).clamp(max=len(own) - 1)
        if torch.equal(ordered[place], want):
            others = (experts[:, order[place]] == have).all(1).nonzero()
            return f"holds expert {int(others[0])}, expected expert {number}" if len(others) else ""
    return ""


def _whole_expert(experts: torch.Tensor, expected: torch.Tensor, got: torch.Tensor) -> str:
    """As `wrong_expert`, of a whole one that is held as it is, turned, or turned with pairs of rows parted: also where
    many elements are equal."""
    turned = experts.mT if experts.dim() == 3 else experts[:, None]
    for held in (experts, turned, torch.cat([turned[:, 0::2], turned[:, 1::2]], 1)):
        here, there = ([n for n, own in enumerate(held) if same(own, of)] for of in (expected, got))
        if here and there:
            return f"holds expert {there[0]}, expected expert {here[0]}"
    return ""


def wrong_share(name: str, expected: torch.Tensor, got: torch.Tensor, candidates: Candidates) -> str:
    """A shard cut wrongly from its tensors: stacked, cut from their concatenation, or another rank's."""
    sources, names = candidates.sources(name), candidates.parts.get(name, ())
    if not sources or any(s.shape[1:] != sources[0].shape[1:] for s in sources):
        return ""
    if len(sources) > 1:
        whole, rows = torch.cat(sources), len(got)
        size = len(whole) // rows if rows else 0
        if size and len(whole) % rows == 0:
            for rank in range(size):
                if len(sources) == 3 and all(len(s) % size == 0 for s in sources):
                    stacked = torch.cat([s.chunk(size)[rank] for s in sources])
                    if same(stacked, got) and got.shape == expected.shape:
                        return f"{_words(names)} stacked: the interleave of KV groups is lost"
                if size > 1 and same(whole[rank * rows : (rank + 1) * rows].contiguous(), got):
                    told = f"rows {span(rank * rows, rows)} of {len(whole)}"
                    return f"TP shard is a contiguous part of cat({_words(names)}): {told}"
    return _another_share(expected, got, sources, names)


def _another_share(
    expected: torch.Tensor, got: torch.Tensor, sources: Sequence[torch.Tensor], names: Sequence[str]
) -> str:
    """The shard of another rank, or for another number of ranks. The three sources of QKV interleave."""
    if len(sources) == 3:
        told = (_another_share(expected, got, [fused], names) for _, fused in _interleaved(sources))
        return next(filter(None, told), "")
    if len(sources) > 3 or got.dim() == 0:
        return ""
    for dim in range(got.dim() if len(sources) == 1 else 1):
        full = sum(s.shape[dim] for s in sources)
        size = full // max(1, got.shape[dim])
        if size < 2 or any(s.shape[dim] % size for s in sources):
            continue
        shares = [torch.cat([s.chunk(size, dim)[rank] for s in sources], 0).contiguous() for rank in range(size)]
        for rank in range(size):
            if same(shares[rank], got):
                right = full // max(1, expected.shape[dim])
                if right == size and not any(same(share, expected) for share in shares):
                    return f"is shard {rank} of {size} of {_words(names)} as they lie in the file, no heads taken apart"
                whose = "another rank's" if right == size else f"a cut over {size} ranks instead of {right}"
                return f"is shard {rank} of {size} of dim {dim}: {whose}"
    return ""
