"""Facet `delta`: weights go from version to version by deltas; some are lost, come twice, are damaged or do not fit.

What a receiver holds is recorded as a digest of every tensor. The trainer's weights are changed in place, as an
optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from moeref_conformance.contract.api import Delta, DeltaReceiver
from moeref_conformance.contract.requests.delta import (
    IN_OTHER_DTYPES,
    LARGEST,
    SCRIPTS,
    Script,
    Weights,
    digests,
    in_dtype,
    versions,
)
from moeref_conformance.steps.facet import Context, Facet, Static, Step, refusal

#: Bytes of a delta that are flipped, one at a time, spread over all of it.
FLIPPED = 12


def _copy(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def _reversed(weights: Weights) -> Weights:
    """A copy whose tensors come in another order, as those of an engine do."""
    return dict(reversed(_copy(weights).items()))


def _strided(weights: Weights) -> Weights:
    """A copy in which a matrix is the transpose of a contiguous one, as exports may hand it out."""
    return {name: t.t().contiguous().t() if t.dim() == 2 else t.clone() for name, t in weights.items()}


def walked(delta: Delta, context: Context) -> dict[str, Any]:
    """What each action of every script was refused for, what both ends hold after it, and the sizes of deltas."""
    weights = versions(context.cell)
    return {name: _walk(delta, weights, script) for name, script in SCRIPTS.items()}


def _walk(delta: Delta, weights: Sequence[Weights], script: Script) -> list[dict[str, Any]]:
    live = _strided(weights[script.start])
    sender = delta.sender(script.start, live)
    receiver = delta.receiver(script.start, _reversed(weights[script.start]))
    messages: dict[int, list[bytes]] = {}
    receipts: dict[int, Any] = {}

    def make(version: int) -> None:
        for name, tensor in live.items():
            tensor.copy_(weights[version][name])
        # No two exports need have one order.
        messages[version] = list(sender.delta(version, live if version % 2 else dict(reversed(live.items()))))

    def apply(version: int) -> None:
        receipts[version] = receiver.apply(messages[version])

    def acknowledge_unseen(version: int) -> None:
        """A receipt of another receiver."""
        other = delta.receiver(script.start, _copy(weights[script.start]))
        sender.acknowledge(other.apply(messages[version]))

    take: dict[str, Callable[[int], None]] = {
        "make": make,
        "apply": apply,
        "acknowledge": lambda version: sender.acknowledge(receipts[version]),
        "acknowledged unseen": acknowledge_unseen,
    }
    walk = []
    for action, version in script.actions:
        refused = refusal(take[action], version)
        size = sum(map(len, messages.get(version, [])))
        right, now = digests(weights[version]), digests(live)
        spoiled = [name for name in live if now[name] != right[name]] if action == "make" else []
        walk.append({"refused": refused, "held": digests(receiver.weights()), "bytes": size, "spoiled": spoiled})
    return walk


def damaged(delta: Delta, context: Context) -> dict[str, Any]:
    """Per damage: the refusal, what is held after it, and then after the undamaged delta; and of drifted weights."""
    weights = versions(context.cell)
    made = list(delta.sender(0, _copy(weights[0])).delta(1, weights[1]))
    other = list(delta.sender(0, _copy(weights[0])).delta(3, weights[3]))
    answers: dict[str, Any] = {}
    for damage, messages in _damages(made, other):
        receiver = delta.receiver(0, _copy(weights[0]))
        tried = _tried(receiver, messages)
        answers[damage] = {**tried, "then": _tried(receiver, made)}
    return {"damaged": answers, "drifted": _drifted(delta, weights, made)}


def _tried(receiver: DeltaReceiver, messages: Sequence[bytes]) -> dict[str, Any]:
    return {"refused": refusal(receiver.apply, messages), "held": digests(receiver.weights())}


def _damages(made: list[bytes], other: list[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """What can become of a delta's messages; `other` is another delta of the same base."""
    ends = list(accumulate(map(len, made)))
    for number in range(FLIPPED):
        at = (ends[-1] - 1) * number // (FLIPPED - 1)
        index = next(i for i, end in enumerate(ends) if at < end)
        inside = at - ends[index] + len(made[index])
        yield f"byte {at} flipped", _with(made, index, _flipped(made[index], inside))
    yield "its last byte cut off", _with(made, -1, made[-1][:-1])
    yield "the second half of its longest message cut off", _cut(made)
    for index in range(len(made) if len(made) > 1 else 0):
        yield f"message {index} left out", [*made[:index], *made[index + 1 :]]
        if index < len(other):
            yield f"message {index} of another delta", _with(made, index, other[index])
        yield f"message {index} twice", [*made[: index + 1], *made[index:]]
        if index:
            yield (
                f"message {index} before the one before it",
                _with(_with(made, index, made[index - 1]), index - 1, made[index]),
            )


def _with(messages: list[bytes], index: int, message: bytes) -> list[bytes]:
    changed = list(messages)
    changed[index] = message
    return changed


def _cut(made: list[bytes]) -> list[bytes]:
    longest = max(range(len(made)), key=lambda index: len(made[index]))
    return _with(made, longest, made[longest][: len(made[longest]) // 2])


def _flipped(message: bytes, at: int) -> bytes:
    changed = bytearray(message)
    changed[at] ^= 0x10
    return bytes(changed)


def _drifted(delta: Delta, weights: Sequence[Weights], made: list[bytes]) -> dict[str, Any]:
    """A delta is applied to weights of which an element that it does not change is no longer that of its base."""
    held = _copy(weights[0])
    receiver = delta.receiver(0, held)
    before, after = (weights[version][LARGEST].reshape(-1).view(torch.int16) for version in (0, 1))
    same = int((before == after).nonzero()[0])
    held[LARGEST].view(-1).view(torch.int16)[same] ^= 1
    return _tried(receiver, made)


def unlike(delta: Delta, context: Context) -> dict[str, Any]:
    """Per way in which new weights are unlike their base, and by dtype: the refusal, and what is held without one."""
    weights = versions(context.cell)
    pairs = {how: (weights[0], new) for how, new in unlike_weights(weights[1]).items()}
    for how, (version, dtype) in IN_OTHER_DTYPES.items():
        pairs[how] = (in_dtype(weights[version - 1], dtype), in_dtype(weights[version], dtype))
    answers = {}
    for how, (base, new) in pairs.items():
        receiver = delta.receiver(0, _copy(base))
        sender = delta.sender(0, _copy(base))
        refused = refusal(lambda new=new, sender=sender, receiver=receiver: receiver.apply(list(sender.delta(1, new))))
        answers[how] = {"refused": refused, "held": digests(receiver.weights()), "sent": digests(new)}
    return answers


def unlike_weights(weights: Weights) -> dict[str, Weights]:
    """Weights that are unlike `weights`, by how."""
    name = "model.norm.weight"
    expert = "model.layers.0.mlp.experts.11.down_proj.weight"
    added = {**weights, "model.layers.0.mlp.experts.12.down_proj.weight": weights[expert].clone()}
    return {
        "a tensor is gone": {key: tensor for key, tensor in weights.items() if key != name},
        "a tensor is new": added,
        "a tensor has another name": {key.replace("experts.11", "experts.3"): value for key, value in weights.items()},
        "a tensor is transposed": {**weights, expert: weights[expert].t().contiguous()},
        "a tensor has another dtype": {**weights, name: weights[name].view(torch.float16)},
    }


FACET = Facet(
    name="delta",
    protocol=Delta,
    asked_in=lambda cell: cell.layout.world == 1,
    steps=(
        Step(name="delta", ask=walked, static=Static.ONCE, in_ranks=False),
        Step(name="delta_damaged", ask=damaged, static=Static.ONCE, in_ranks=False),
        Step(name="delta_unlike", ask=unlike, static=Static.ONCE, in_ranks=False),
    ),
)
