"""The stack of a hung rank, as faulthandler writes it, becomes one line without paths."""

from __future__ import annotations

import pytest
from moeref_conformance.contract.hang_stacks import waits

pytestmark = pytest.mark.cpu
KIT = "/any/where/moeref_conformance"


def stack(*frames: str, before: str = "") -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in (f.split() for f in frames)]
    return "\n".join([before, "Current thread 0x00007f563eb6eb80 (most recent call first):", *lines, ""])


def test_operation_and_callers() -> None:
    text = stack(
        f"{KIT}/worlds/collectives.py 119 _agree",
        f"{KIT}/worlds/collectives.py 78 all_gather",
        "/a/b/stream.py 70 _agree",
        "/a/b/stream.py 41 export",
        f"{KIT}/targets/moeref.py 69 stream",
        f"{KIT}/steps/export.py 191 _stream",
    )
    said = "waits in all_gather, at stream.py:70 in _agree ← stream.py:41 in export ← moeref.py:69 in stream"
    assert waits(text) == said


def test_three_frames_at_most_and_none_of_the_probe() -> None:
    frames = ["/lib/megatron/core/p2p.py 4 _communicate", "/lib/a.py 3 b", "/lib/a.py 2 c", "/lib/a.py 1 d"]
    assert waits(stack(*frames)) == "waits at p2p.py:4 in _communicate ← a.py:3 in b ← a.py:2 in c"
    assert waits(stack("/lib/a.py 1 d", f"{KIT}/steps/run.py 5 step")) == "waits at a.py:1 in d"


def test_the_last_thread_is_the_one_that_was_asked() -> None:
    other = 'Thread 0x1 (most recent call first):\n  File "/lib/pin.py", line 9 in loop\n'
    assert waits(stack("/lib/torch/distributed/c10d.py 7 recv", "/lib/a.py 1 d", before=other)) == (
        "waits in recv, at a.py:1 in d"
    )


@pytest.mark.parametrize("text", ["", "Killed\n", "Current thread 0x1 (most recent call first):\n"])
def test_no_stack(text: str) -> None:
    assert waits(text) == ""
