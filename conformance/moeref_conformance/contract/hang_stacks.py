"""Where a rank hung or crashed, in one line made from the stack that faulthandler wrote."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Files of an operation such as `recv`: its name is shown, these frames are not.
_BELOW = ("/torch/", "/threading.py", "/moeref_conformance/worlds/collectives.py")
#: Frames of the kit itself begin here.
_KIT = "/moeref_conformance/steps/"
MOST = 3
#: What faulthandler writes before the stack of a native crash.
FATAL = "Fatal Python error: "


def waits(stderr: str) -> str:
    """Where a rank waits: `waits in recv, at stream.py:117 in _collect ← …`, as `place` says."""
    where = place(stderr)
    return f"waits {where}" if where else ""


def crashed(stderr: str) -> str:
    """What a rank wrote before its native crash, on one line, and the `place` of that; empty without a stack."""
    before, fatal, stack = stderr.rpartition(FATAL)
    where = place(stack) if fatal else ""
    return " | ".join([*last_lines(before), f"{stack.splitlines()[0]} {where}"]) if where else ""


def last_lines(text: str, most: int = 4) -> list[str]:
    """The last lines that are not empty."""
    return [line for line in re.split(r"\r?\n", text) if line.strip()][-most:]


def place(stderr: str) -> str:
    """`in recv, at stream.py:117 in _collect ← stream.py:54 in export`; empty if there is no stack.

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
    return ", ".join(what + where)


def _frames(stderr: str) -> list[tuple[str, str, str]]:
    """(file, line, function), innermost first, of the last thread written: the one that got the signal."""
    frames: list[tuple[str, str, str]] = []
    for text in stderr.splitlines():
        if text.endswith("(most recent call first):"):
            frames = []
        elif match := _FRAME.match(text):
            frames.append((match["file"], match["line"], match["function"]))
    return frames
