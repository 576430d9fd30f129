"""Where a hung rank waits, in one line made from the stack that faulthandler wrote at the deadline."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Files of an operation such as `recv`: its name is shown, these frames are not.
_BELOW = ("/torch/", "/threading.py", "/moeref_conformance/worlds/collectives.py")
#: Frames of the kit itself begin here.
_KIT = "/moeref_conformance/steps/"
MOST = 3


def waits(stderr: str) -> str:
    """`waits in recv, at stream.py:117 in _collect ← stream.py:54 in export`; empty if there is no stack.

    It names at most three frames, innermost first, up to the kit's own.
    """
    frames = _frames(stderr)
    operation = ""
    while frames and any(part in frames[0][0] for part in _BELOW):
        operation = frames.pop(0)[2]
    ours = next((i for i, frame in enumerate(frames) if _KIT in frame[0]), len(frames))
    told = [f"{file.rsplit('/', 1)[-1]}:{line} in {function}" for file, line, function in frames[: min(ours, MOST)]]
    what = [f"in {operation}"] if operation else []
    where = ["at " + " ← ".join(told)] if told else []
    return "waits " + ", ".join(what + where) if what or where else ""


def _frames(stderr: str) -> list[tuple[str, str, str]]:
    """(file, line, function), innermost first, of the last thread written: the one that got the signal."""
    frames: list[tuple[str, str, str]] = []
    for text in stderr.splitlines():
        if text.endswith("(most recent call first):"):
            frames = []
        elif match := _FRAME.match(text):
            frames.append((match["file"], match["line"], match["function"]))
    return frames
