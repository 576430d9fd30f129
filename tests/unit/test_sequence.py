"""Parts of a sequence: every position once, zigzag chunks that cost the same under a causal mask, and the way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.layout import LayoutError
from moeref.layout.sequence import contiguous, held, restored, zigzag

pytestmark = pytest.mark.cpu


def test_zigzag_by_hand() -> None:
    assert [zigzag(8, 2, r) for r in range(2)] == [(0, 1, 6, 7), (2, 3, 4, 5)]
    assert [zigzag(8, 4, r) for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert zigzag(5, 1, 0) == (0, 1, 2, 3, 4)
    assert held(8, cp=2, cp_rank=0) == (0, 1, 6, 7)
    assert [held(16, cp=2, cp_rank=1, tp=2, tp_rank=t) for t in range(2)] == [(4, 5, 6, 7), (8, 9, 10, 11)]


@given(cp=st.integers(1, 9), tp=st.integers(1, 5), chunk=st.integers(1, 4))
def test_parts_hold_every_position_once_and_come_back(cp: int, tp: int, chunk: int) -> None:
    length = 2 * cp * tp * chunk
    parts = [held(length, cp=cp, cp_rank=c, tp=tp, tp_rank=t) for c in range(cp) for t in range(tp)]
    joined = [position for part in parts for position in part]
    assert len({len(part) for part in parts}) == 1
    assert [joined[i] for i in restored(parts)] == list(range(length))


@given(cp=st.integers(2, 9), chunk=st.integers(1, 4))
def test_zigzag_balances_a_causal_mask(cp: int, chunk: int) -> None:
    assert len({sum(zigzag(2 * cp * chunk, cp, r)) for r in range(cp)}) == 1
    assert len({sum(contiguous(2 * cp * chunk, cp, r)) for r in range(cp)}) == cp


def test_bad_lengths_and_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"10 tokens is not divisible by 2·cp = 2·2; pad it to a multiple of 4"):
        zigzag(10, 2, 0)
    with pytest.raises(LayoutError, match=r"4 tokens is not divisible by 3; .*multiple of 3"):
        held(8, cp=2, cp_rank=0, tp=3)
    with pytest.raises(LayoutError, match=r"rank 2 is outside 2 parts of a sequence \(0 to 1\)"):
        zigzag(8, 2, 2)
    with pytest.raises(LayoutError, match="each of 4 positions once"):
        restored([(0, 1), (1, 2)])
