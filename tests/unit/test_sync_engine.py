"""What an engine checks of a weight update: what may begin, each bucket, and the commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeref.sync import Bucket, Intake, Receipt, Refused, SyncError, Update, checksum

A, B = torch.arange(6.0).view(2, 3), torch.tensor([True])
#: -1 is the version of an engine whose weights sleep has dropped: no delta changes them.
DISCARDED = {"kind": "delta", "base": -1}
BUCKETS = [Bucket.of(0, [("a", A)], False), Bucket.of(1, [("b", B), ("c", A.bfloat16())], True)]


def begun(**settings: Any) -> Intake:
    intake = Intake(1)
    intake.begin(Update(2, **settings))
    return intake


def test_a_complete_update_is_committed_once() -> None:
    intake = begun()
    sent = Receipt(2)
    for bucket in BUCKETS:
        sent = sent.plus(bucket)
        assert intake.accept(bucket) == sent
    assert intake.commit(2) == sent == intake.receipt
    assert (intake.version, sent.buckets, sent.tensors, sent.nbytes) == (2, 2, 3, 24 + 1 + 12)
    with pytest.raises(SyncError, match="not the update that is begun"):
        intake.commit(2)


@pytest.mark.parametrize(
    "came",
    [
        [BUCKETS[1]],
        [BUCKETS[0], BUCKETS[0]],
        [*BUCKETS, BUCKETS[1]],
        [*BUCKETS, replace(BUCKETS[1], index=2)],
        [replace(BUCKETS[0], tensors=())],
        [replace(BUCKETS[1], index=0, tensors=BUCKETS[1].tensors[:1])],
        [replace(BUCKETS[0], tensors=(("a", A.t()),))],
        [replace(BUCKETS[0], tensors=(("b", A),))],
        [replace(BUCKETS[0], tensors=(("a", A + 1),))],
    ],
    ids=["lost", "repeated", "repeated last", "one more", "empty", "truncated", "transposed", "renamed", "changed"],
)
def test_a_wrong_bucket_is_found_when_it_comes(came: list[Bucket]) -> None:
    intake = begun()
    for bucket in came[:-1]:
        intake.accept(bucket)
    before = intake.received
    with pytest.raises(SyncError, match=r"bucket \d"):
        intake.accept(came[-1])
    assert intake.received == before


@pytest.mark.parametrize("count", [0, 1])
def test_an_incomplete_update_is_not_committed(count: int) -> None:
    intake = begun()
    for bucket in BUCKETS[:count]:
        intake.accept(bucket)
    with pytest.raises(SyncError, match="last bucket did not come"):
        intake.commit(2)
    assert intake.version == 1
    assert intake.receipt is None


def test_a_repeated_begin_starts_again_and_another_update_is_refused() -> None:
    intake = Intake(1)
    update = Update(2)
    intake.begin(update)
    intake.accept(BUCKETS[0])
    with pytest.raises(Refused, match="not finished"):
        intake.begin(Update(2))
    intake.begin(update)
    with pytest.raises(SyncError, match="0 was expected"):
        intake.accept(BUCKETS[1])
    intake.forget()
    intake.begin(Update(2))


@pytest.mark.parametrize(
    ("update", "drafts", "reason"),
    [
        (Update(1), False, "not after 1"),
        (Update(0), False, "not after 1"),
        (Update(3, "delta", base=2), False, "delta to version 2"),
        (Update(3, "delta", base=0), False, "delta to version 0"),
        (Update(2), True, "has drafts"),
        (Update(2, drafts="sent"), False, "no drafts"),
        (Update(2, drafts="kept"), False, "no drafts"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(update: Update, drafts: bool, reason: str) -> None:
    intake = Intake(1, drafts=drafts)
    with pytest.raises(Refused, match=reason):
        intake.begin(update)
    assert intake.update is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"version": -1}, {"version": True}, {"version": 2.0}, {"kind": "delta", "base": 1.0}),
        *({"kind": "delta"}, {"base": 1}, {"kind": "delta", "base": 2}, DISCARDED),
    ],
)
def test_an_update_that_is_none_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="update"):
        Update(**{"version": 2} | wrong)


def test_the_checksum_is_of_names_dtypes_shapes_and_bytes() -> None:
    same = [("a", A), ("a", A.clone()), ("a", A.t().contiguous().t())]
    assert len({checksum([one]) for one in same}) == 1
    others = [
        [("a", A)],
        [("a", A.view(3, 2))],
        [("a", A.view(torch.int32))],
        [("a", -A)],
        [],
        [("a", A), ("a", A[:0])],
    ]
    others += [[("s", torch.tensor(1.0))], [("s", torch.ones(1))]]
    assert len({checksum(one) for one in others}) == len(others)
