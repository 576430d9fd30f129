"""Files from outside, read with limits: their text, and how much YAML may nest and repeat."""

from __future__ import annotations

import importlib
from pathlib import Path

from moeref.check.report import CheckError

#: Bytes of the largest file, and the most nesting and values of one in YAML, aliases counted as what they repeat.
LARGEST, DEEPEST, MOST_NODES = 1_000_000, 50, 20_000


def text_of(path: Path) -> str:
    """The text of a regular file of at most LARGEST bytes. Raises CheckError."""
    _check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckError(f"{path}: {error}") from error


def _check_file(path: Path) -> None:
    """Raise CheckError for what is no regular file, and for one larger than LARGEST."""
    try:
        if path.exists() and not path.is_file():
            raise CheckError(f"{path}: not a regular file")
        if path.is_file() and path.stat().st_size > LARGEST:
            raise CheckError(f"{path}: a configuration file has at most {LARGEST} bytes")
    except CheckError:
        raise
    except (OSError, ValueError) as error:
        raise CheckError(f"{path}: {error}") from error


def check_yaml(text: str) -> None:
    """Raise CheckError for YAML beyond DEEPEST or MOST_NODES: its readers recurse and copy."""
    yaml = importlib.import_module("yaml")
    sizes: dict[str | None, int] = {}
    parents: list[tuple[str | None, int]] = []
    nodes = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.events.CollectionStartEvent):
            parents.append((event.anchor, nodes))
        elif isinstance(event, yaml.events.CollectionEndEvent):
            anchor, before = parents.pop()
            sizes[anchor] = nodes - before
        nodes += sizes.get(event.anchor, 1) if isinstance(event, yaml.events.AliasEvent) else 1
        if len(parents) > DEEPEST or nodes > MOST_NODES:
            raise CheckError(f"it is nested more than {DEEPEST} times or has more than {MOST_NODES} values")


def in_a_line(error: Exception) -> str:
    """What PyYAML or OmegaConf says of a file over several lines, as one."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if isinstance(problem, str) and mark:
        return f"line {mark.line + 1}: {problem}"
    return " ".join(str(error).split())
