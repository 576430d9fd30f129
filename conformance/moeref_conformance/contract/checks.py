"""The error for bad input, and the checks that matrices, known failures and target names share."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any


class BadInput(ValueError):
    """What the user gave cannot be used. Raised before any work is done; the command line exits with 2."""


class NothingRecorded(BadInput):
    """A dump that has no record at all; the command line exits with 3, incomplete."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known name, else `; known: a, b, c` when there are few, else nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def similar(name: str, known: Collection[str]) -> str:
    """Of many known names, for an error: `; did you mean …?` with at most 12 that hold `name`, else `nearest`."""
    holding = sorted(one for one in known if name and name in one)
    if holding:
        return f"; did you mean one of {', '.join(holding[:12])}{', …' if len(holding) > 12 else ''}?"
    return nearest(name, known)


def check_known(where: str, what: str, names: Iterable[Any], known: Iterable[str]) -> None:
    """Raise `BadInput` for the first of `names` that is not known; `what` says what they name."""
    known = list(known)
    for name in names:
        if name not in known:
            raise BadInput(f"{where}: unknown {what} {name!r}{nearest(name, known)}")


def check_keys(where: str, table: Mapping[str, Any], known: Iterable[str], required: Iterable[str] = ()) -> None:
    """Raise `BadInput` for a key of `table` that is not known or a required one that is absent."""
    check_known(where, "key", table, known)
    for key in required:
        if key not in table:
            raise BadInput(f"{where}: {key!r} is missing")


def check_name(where: str, name: Any) -> str:
    """`name` if it can name a report and a file: printable text without a path. Anything else raises `BadInput`."""
    if isinstance(name, str) and name.strip(" .") and name.isprintable() and not {"/", "\\"} & set(name):
        return name
    raise BadInput(f"{where}: {name!r} is not a name: use printable text without slashes")


def text_list(where: str, value: Any) -> list[str]:
    """`value` as a list of strings: a lone string is a list of one. Anything else raises `BadInput`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(v, str) for v in value) and value:
        return list(value)
    raise BadInput(f"{where}: expected a string or a non-empty list of strings, got {value!r}")


def texts(where: str, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """`text_list` of what a table has under `key`; empty if it has nothing."""
    return tuple(text_list(f"{where}: {key}", table[key])) if key in table else ()


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file, or `BadInput` saying what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from error


def read_json_lines(path: Path) -> list[Any]:
    """The value of every line. A last line that was cut off while it was written is left out.

    Raises `BadInput` for a file that cannot be read and for any other line that is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:  # also an integer of 5000 digits, or 1000 nested lists
            if number < len(lines):
                raise BadInput(f"{path}:{number}: not JSON: {error}") from error
    return rows
