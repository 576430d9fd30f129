"""What EXP-005 counts: tensors of a stream that somebody still holds when the next one comes."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
from moeref_conformance.steps.export import Earlier

pytestmark = pytest.mark.cpu


def test_a_thread_that_drops_a_tensor_a_moment_later_holds_none() -> None:
    held, earlier = [torch.ones(2)], Earlier()
    earlier.refs.append(weakref.ref(held[0]))
    threading.Timer(0.05, held.clear).start()
    assert earlier.alive() == 0


def test_a_tensor_that_is_kept_is_counted_and_waited_for_once() -> None:
    kept, earlier = torch.ones(2), Earlier(patience=0.1)
    earlier.refs.append(weakref.ref(kept))
    assert earlier.alive() == 1
    began = time.monotonic()
    assert [earlier.alive() for _ in range(100)] == [1] * 100
    assert time.monotonic() - began < 0.1
