"""What a receiver of deltas holds, action by action. No delta is made here: a version is all of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moeref_conformance.contract.requests.delta import Script


@dataclass(frozen=True)
class Expected:
    """Of one action: the version that is held before it, the one that it goes to, and whether it has to be taken.

    A delta has to be taken by a receiver that holds its base, or its own version; by no other.
    """

    action: str
    before: int
    after: int
    taken: bool


def followed(script: Script, refused: Sequence[Any]) -> Iterator[Expected]:
    """What is expected of every action. `refused` says which were refused: a refused delta changes nothing."""
    held = acknowledged = script.start
    bases: dict[int, int] = {}
    for (action, version), no in zip(script.actions, refused, strict=True):
        if action == "apply":
            taken = held in (bases[version], version)
            yield Expected(f"apply version {version}, made of {bases[version]}", held, version, taken)
            held = held if no else version
            continue
        # A receipt of an earlier version than the last may be refused or ignored, and takes nothing back.
        yield Expected(f"{action} version {version}", held, held, taken=action == "make" or version >= acknowledged)
        if action == "make":
            bases[version] = acknowledged
        else:
            acknowledged = max(acknowledged, version)
