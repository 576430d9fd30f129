"""Text that comes from a target, made fit for a terminal, a UTF-8 file and an XML document."""

from __future__ import annotations

import re

#: Characters kept of a text that is shown, and how many of them are from its end.
MOST, END = 4000, 1000
#: Control characters but tab and newline, lone surrogates, and the two others that XML forbids.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def fit(text: str) -> str:
    """`text` as it can be shown: not too long, and with unfit characters escaped as in Python's `repr`."""
    return _UNFIT.sub(lambda match: match[0].encode("unicode_escape").decode(), cut(text))


def cut(text: str, most: int = MOST, end: int = END) -> str:
    """`text` without its middle if it is much longer than `most`, and how many characters are left out there."""
    if len(text) <= most + end:  # with the remark of an earlier cut too
        return text
    return f"{text[: most - end]} … {len(text) - most} characters left out … {text[-end:]}"
