"""The text form of a layout: `tp=2,pp=2,vpp=2,ep=2,etp=1,cp=1,world=8,first=3,last=2`, `pipeline_layout=` last."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from moeref.layout.errors import LayoutError

if TYPE_CHECKING:
    from moeref.layout.layout import Layout

_SIZES = ("tp", "pp", "vpp", "ep", "etp", "cp", "world")
_ENDS = ("first", "last")
_SWITCHES = ("embedding", "loss")
_KEYS = (*_SIZES, *_ENDS, *_SWITCHES, "order", "pipeline_layout")
#: megatron-core's default order of axes, fastest first.
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


def read(text: str) -> dict[str, Any]:
    """The arguments for `Layout` in `text`. Raises LayoutError, which names the wrong part."""
    found: dict[str, Any] = {}
    tail = re.search(r"(?:^|,)\s*pipeline_layout\s*=(.*)$", text.strip(), flags=re.DOTALL)
    head = text.strip()[: tail.start()] if tail else text.strip()
    for part in head.split(",") if head else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_KEYS)}"
            raise LayoutError(f"layout text {text!r}: unknown key {key!r}; {hint}")
        if not equals or not value:
            raise LayoutError(f"layout text {text!r}: {key!r} has no value; write {key}=…")
        if key in found:
            raise LayoutError(f"layout text {text!r}: {key!r} is given twice")
        found[key] = _value(text, key, value)
    if tail:
        found["pipeline_layout"] = tail[1]
    return found


def _value(text: str, key: str, value: str) -> int | bool | str:
    if key == "order":
        return value
    if key in _SWITCHES:
        if value not in ("0", "1"):
            raise LayoutError(f"layout text {text!r}: {key}={value} must be 0 or 1")
        return value == "1"
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise LayoutError(f"layout text {text!r}: {key}={value} must be a whole number of at most nine digits")
    return int(value)


def write(layout: Layout) -> str:
    """The text of `layout`: sizes and world, then the other fields that differ from their defaults."""
    parts = [f"{key}={getattr(layout, key)}" for key in _SIZES]
    parts += [f"{key}={value}" for key in _ENDS if (value := getattr(layout, key)) is not None]
    parts += [f"{key}=1" for key in _SWITCHES if getattr(layout, key)]
    if layout.order != DEFAULT_ORDER:
        parts.append(f"order={layout.order}")
    if layout.pipeline_layout is not None:
        parts.append(f"pipeline_layout={layout.pipeline_layout}")
    return ",".join(parts)
