"""The language of `pipeline_model_parallel_layout`: what a string such as `Et*3|(tt|)*29,m|L` means.

`|` separates stages, which are listed virtual stage by virtual stage, pipeline rank fastest. `E` is the embedding, `t`
a decoder layer, `m` a multi-token prediction layer, `L` the loss. `x*n` repeats one character, `(...)*n` a text that
may hold `|`; parentheses do not nest. Commas are ignored; any other character is an error, blanks included.

Repeats are replaced as text, as in megatron-core's `PipelineParallelLayerLayout`: first all `(...)*n`, then all `x*n`,
each once from left to right. So `(t)*2*3` is `tt*3`, which is four layers, not six.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moeref.layout.errors import LayoutError

_REPEATED_TEXT = re.compile(r"\((?P<unit>[^)]+)\)\*(?P<times>\d+)")
_REPEATED_CHARACTER = re.compile(r"(?P<unit>.)\*(?P<times>\d+)")
_LETTERS = "ELtm"
_MOST_REPEATS = 100_000


def _unroll(text: str, repeated: re.Pattern[str], written: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        # A typing error must not fill the memory; no model has this many layers.
        if len(match["times"]) > len(str(_MOST_REPEATS)) or int(match["times"]) > _MOST_REPEATS:
            raise LayoutError(f"layout {written!r}: {match.group()!r} repeats more than {_MOST_REPEATS} times")
        return match["unit"] * int(match["times"])

    return repeated.sub(replacement, text)


def stages_of(written: str) -> tuple[str, ...]:
    """The letters of every stage, in the order written: `Et|(t|)*2L` gives ("Et", "t", "t", "L").

    Raises LayoutError for any other character that is left once repeats are unrolled.
    """
    text = written.replace(",", "")
    for repeated in (_REPEATED_TEXT, _REPEATED_CHARACTER):
        text = _unroll(text, repeated, written)
    for letter in text:
        if letter not in _LETTERS + "|":
            raise LayoutError(
                f"layout {written!r}: {letter!r} is not a layer (after unrolling: {text!r}). Use E embedding, "
                f"t decoder, m multi-token prediction, L loss, | between stages, x*n and (...)*n without nesting, "
                f"and no blanks"
            )
    return tuple(text.split("|"))


def read_pattern(written: str, pp: int) -> tuple[tuple[str, ...], int]:
    """The stages of `written` in virtual-stage-major order, and the number of virtual stages per pipeline rank.

    Stage i is on pipeline rank i % pp in virtual stage i // pp. Raises LayoutError for strings that megatron-core's
    `PipelineParallelLayerLayout` and its `validate_layer_layout` refuse for every number of layers.
    """
    stages = stages_of(written)
    where = f"layout {written!r}"
    if len(stages) % pp:
        raise LayoutError(
            f"{where} has {len(stages)} stages, not divisible by pp={pp}; "
            f"write {pp} stages, or a multiple of it for virtual stages"
        )
    vpp = len(stages) // pp
    flat = "".join(stages)
    for letter, name, right_end in (("E", "embedding", flat[:1]), ("L", "loss", flat[-1:])):
        if flat.count(letter) != 1:
            raise LayoutError(f"{where} has {flat.count(letter)} {letter} ({name}); write it exactly once")
        if right_end != letter:
            raise LayoutError(f"{where}: {letter} ({name}) must come {'first' if letter == 'E' else 'last'}")
    _check_mtp(where, stages, pp, vpp)
    return stages, vpp


def _check_mtp(where: str, stages: Iterable[str], pp: int, vpp: int) -> None:
    flat = "".join(stages)
    if flat.rfind("t") > flat.find("m") >= 0:
        raise LayoutError(
            f"{where}: decoder layers (t) after a multi-token prediction layer (m); put every m after all t"
        )
    holders = [index for index, stage in enumerate(stages) if "m" in stage]
    if len(holders) > 1:
        places = ", ".join(f"(pp {i % pp}, vp {i // pp})" for i in holders)
        raise LayoutError(f"{where} spreads m over the stages {places}; put all of them into one stage")
    if holders and holders[0] // pp != vpp - 1:
        place = f"pp {holders[0] % pp}, vp {holders[0] // pp}"
        raise LayoutError(f"{where} puts m into ({place}); it must be in the last virtual stage, vp {vpp - 1}")
