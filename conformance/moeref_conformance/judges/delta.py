"""DLT: weights that go from version to version by deltas, and deltas that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.delta import (
    DENSITIES,
    OTHER_BASE,
    SCRIPTS,
    SKIPPED,
    TWICE,
    Script,
    digests,
    versions,
)
from moeref_conformance.judges import Case, judges
from moeref_conformance.judges.common import finding, names_text, once, unanswered, values
from moeref_conformance.oracles.delta import followed

#: Bytes of a delta beside its values: of names, shapes and checksums of all tensors.
OVERHEAD = 8192
#: A delta of one element in a hundred has at most this share of the model's bytes.
SPARSE = 0.2


@once
def _held(case: Case) -> list[dict[str, str]]:
    """Dtype, shape and hash of every tensor of every version, as steps record them."""
    return [digests(weights) for weights in versions(case.cell)]


def _other(case: Case, expected: int, held: Mapping[str, str]) -> str:
    """Which tensors are not those of version `expected`, and of which version they are; empty if there are none."""
    wanted = _held(case)[expected]
    wrong = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    alike = [i for i, version in enumerate(_held(case)) if all(held.get(name) == version.get(name) for name in wrong)]
    stale = f", those of version {alike[0]}" if alike else ""
    return (wrong and f"{names_text(wrong)} not those of version {expected}{stale}") or ""


def _walked(case: Case, scripts: Mapping[str, Script]) -> Iterator[Finding]:
    """Deltas that had to be taken and were not, or had not and were, and what is held after each action."""
    yield from unanswered(case, "delta")
    for rank, value in values(case, "delta"):
        for name, script in scripts.items():
            walk = value[name]
            for expected, got in zip(followed(script, [a["refused"] for a in walk]), walk, strict=True):
                where = f"{name}: {expected.action}"
                if got["refused"] and expected.taken:
                    yield finding(case, rank, "delta", f"{where}: refused: {got['refused'][:300]}")
                    break  # what follows is of another version than the script's
                held = expected.before if got["refused"] else expected.after
                # After a refusal tensors may be half written (DLT-007), until the same delta comes again.
                if not got["refused"] and (other := _other(case, held, got["held"])):
                    what = "taken, and holds" if expected.taken else "not refused, and holds"
                    yield finding(case, rank, "delta", f"{where}: {what} {other}")
                    break


@judges("DLT-001", exact=True)
def every_change_arrives(case: Case) -> Iterator[Finding]:
    """From each version to the next, by digests of what both ends hold."""
    yield from _walked(case, DENSITIES)
    for rank, value in values(case, "delta"):
        for name in DENSITIES:
            if spoiled := value[name][0]["spoiled"]:
                message = f"{name}: making the delta changed {names_text(spoiled)} of the trainer's weights"
                yield finding(case, rank, "delta", message)


@judges("DLT-002")
def another_base_is_refused(case: Case) -> Iterator[Finding]:
    """A delta that is taken all the same has to give its version, as one with every tensor whole does."""
    return _walked(case, OTHER_BASE)


@judges("DLT-003", exact=True)
def twice_is_once(case: Case) -> Iterator[Finding]:
    """The second time it is taken, and changes nothing."""
    return _walked(case, TWICE)


@judges("DLT-004", exact=True)
def made_of_the_acknowledged_version(case: Case) -> Iterator[Finding]:
    """What comes after a lost delta or a late receipt is taken."""
    return _walked(case, SKIPPED)


@judges("DLT-005")
def damage_is_refused(case: Case) -> Iterator[Finding]:
    """A damaged delta that is taken has to give its version all the same."""
    yield from unanswered(case, "delta_damaged")
    for rank, damage, tried in _damages(case):
        if not tried["refused"] and (other := _other(case, 1, tried["held"])):
            yield finding(case, rank, "delta_damaged", f"{damage}: taken, and holds {other}")


@judges("DLT-006")
def refused_and_sent_again(case: Case) -> Iterator[Finding]:
    """The undamaged delta, after the damaged one."""
    yield from unanswered(case, "delta_damaged")
    for rank, damage, tried in _damages(case):
        then = tried["then"]
        if then["refused"]:
            yield finding(case, rank, "delta_damaged", f"{damage}, then whole: refused: {then['refused'][:300]}")
        elif other := _other(case, 1, then["held"]):
            yield finding(case, rank, "delta_damaged", f"{damage}, then whole: taken, and holds {other}")


@judges("DLT-007")
def a_refusal_writes_nothing(case: Case) -> Iterator[Finding]:
    """After every refusal of a damaged delta, or of one with another base."""
    yield from (*unanswered(case, "delta"), *unanswered(case, "delta_damaged"))
    for rank, damage, tried in _damages(case):
        if tried["refused"] and (other := _other(case, 0, tried["held"])):
            yield finding(case, rank, "delta_damaged", f"{damage}: refused, and holds {other}")
    for rank, value in values(case, "delta"):
        for name, script in SCRIPTS.items():
            for expected, got in zip(followed(script, [a["refused"] for a in value[name]]), value[name], strict=True):
                if got["refused"] and (other := _other(case, expected.before, got["held"])):
                    yield finding(case, rank, "delta", f"{name}: {expected.action}: refused, and holds {other}")


def _damages(case: Case) -> Iterator[tuple[int, str, Any]]:
    """Rank, damage, and what came of it."""
    for rank, value in values(case, "delta_damaged"):
        for damage, tried in value["damaged"].items():
            yield rank, damage, tried


@judges("DLT-008")
def drift_is_noticed(case: Case) -> Iterator[Finding]:
    """An error, or the new version, where the drifted tensor is sent whole."""
    yield from unanswered(case, "delta_damaged")
    for rank, value in values(case, "delta_damaged"):
        tried = value["drifted"]
        if not tried["refused"] and (other := _other(case, 1, tried["held"])):
            message = f"weights were changed after version 0: taken, and holds {other}"
            yield finding(case, rank, "delta_damaged", message)


@judges("DLT-009")
def unlike_weights_are_refused(case: Case) -> Iterator[Finding]:
    """An error, or exactly the new weights."""
    yield from unanswered(case, "delta_unlike")
    for rank, value in values(case, "delta_unlike"):
        for how, tried in value.items():
            if not tried["refused"] and tried["held"] != tried["sent"]:
                names = sorted(dict(tried["held"].items() ^ tried["sent"].items()))
                message = f"{how}: taken, and {names_text(names)} held otherwise than sent"
                yield finding(case, rank, "delta_unlike", message)


@judges("DLT-010")
def a_delta_is_small(case: Case) -> Iterator[Finding]:
    """Against the bytes of the model: at any density, and where one element in a hundred changed."""
    yield from unanswered(case, "delta")
    model = sum(tensor.nbytes for tensor in versions(case.cell)[0].values())
    for rank, value in values(case, "delta"):
        for name in DENSITIES:
            most = OVERHEAD + int(model * (SPARSE if name.startswith("1 %") else 1.02))
            if (size := value[name][0]["bytes"]) > most:
                message = f"{name}: a delta of {size} bytes, of a model of {model}"
                yield finding(case, rank, "delta", message, expected=f"at most {most}", got=size)
