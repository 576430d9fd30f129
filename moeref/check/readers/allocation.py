"""AReaL's text of an allocation, such as `megatron:(attn:d4p4t2|ffn:d2p4e4)`: a backend and the sizes of its axes.

Several components are joined by `+`, or by `|` on the same ranks; one may have a name, as in `megatron[actor]:d4t2`.
Sizes of `ffn` that are left out are 1, those of its data parallelism and stages those of the ranks and of `attn`.
"""

from __future__ import annotations

import math
import re

from moeref.check.report import CheckError

BACKENDS = ("fsdp", "megatron", "archon")
ENGINES = ("sglang", "vllm")
_NUMBER = r"[1-9]\d{0,6}"
_DIMS = rf"(?:[dtpce]{_NUMBER})+"
_PARTS = rf"\(?attn:((?:[dtpc]{_NUMBER})+)\|ffn:((?:[detp]{_NUMBER})+)\)?"
_COMPONENT = re.compile(rf"(\w+?)(?:\[([A-Za-z_]\w*)\])?:(?:{_PARTS}|({_DIMS}))")
_DIM = re.compile(rf"([a-z])({_NUMBER})")
_AXES = {"t": "tp", "p": "pp", "c": "cp", "e": "ep"}


def component(text: str, role: str = "actor") -> tuple[str, dict[str, int]]:
    """(backend, axes of the layout and `world`) of the trainer in a text. Raises CheckError for text without meaning.

    Of several trainers it is the one whose name is `role`.
    """
    bare = re.sub(r"\s+", "", text)
    found = [match.groups() for part in bare.split("+") for match in _components(part, text)]
    trainers = [each for each in found if each[0] not in ENGINES]
    named = [each for each in trainers if each[1] == role]
    if len(trainers) != 1 and len(named) != 1:
        raise CheckError(f"allocation {text!r} has {len(trainers)} trainers and not one of them is named {role}")
    backend, _, attn, ffn, dims = (named or trainers)[0]
    if backend not in BACKENDS:
        raise CheckError(f"allocation {text!r}: {backend} is none of {', '.join((*BACKENDS, *ENGINES))}")
    return backend, _whole(dims) if dims else _apart(attn, ffn, text)


def _components(part: str, text: str) -> list[re.Match[str]]:
    """The components of a part, one after another with `|` between."""
    found, at = [], 0
    while match := _COMPONENT.match(part, at):
        found.append(match)
        at = match.end()
        if at == len(part):
            return found
        if part[at] != "|":
            break
        at += 1
    raise CheckError(
        f"allocation {text!r}: {part[at:] or 'a missing component'!r} is no backend:sizes, as megatron:d4t2"
    )


def _sizes(dims: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in _DIM.findall(dims)}


def _ranks(sizes: dict[str, int], axes: str) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def _whole(dims: str) -> dict[str, int]:
    sizes = _sizes(dims)
    axes = {axis: sizes.get(letter, 1) for letter, axis in _AXES.items()}
    return {**axes, "etp": 1, "world": _ranks(sizes, "dtpc")}


def _apart(attn: str, ffn: str, text: str) -> dict[str, int]:
    """The axes of attention and of experts, which have the same stages and ranks."""
    dense, experts = _sizes(attn), _sizes(ffn)
    stages, world = dense.get("p", 1), _ranks(dense, "dtpc")
    if experts.get("p", stages) != stages:
        raise CheckError(f"allocation {text!r}: {stages} stages of attn and {experts['p']} of ffn")
    each = _ranks({**experts, "p": stages}, "etp")
    if world % each:
        raise CheckError(f"allocation {text!r}: {world} ranks of attn do not divide by e·t·p = {each} of ffn")
    if experts.get("d", world // each) != world // each:
        raise CheckError(f"allocation {text!r}: {world} ranks of attn and {each * experts['d']} of ffn")
    dense_axes = {axis: dense.get(letter, 1) for letter, axis in _AXES.items() if letter != "e"}
    return {**dense_axes, "ep": experts.get("e", 1), "etp": experts.get("t", 1), "world": world}
