"""Argument lists: the entry of a script, and its words as named values by a table of arguments."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref.check.readers.literal import LiteralError, literal
from moeref.check.readers.reading import Reading
from moeref.check.readers.shell import Script, Word
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value

_NUMBER = re.compile(r"-[0-9.]")
#: All of a variable, or of an array: `$NAME`, `${NAME}`, `${NAME[@]}`.
_VARIABLE = re.compile(r"\$\{?\w+(\[[@*]\])?\}?")
#: Kinds of arguments without a value.
SWITCHES = frozenset({"true", "false", "either"})
#: What Megatron-LM takes as a list of layers: no spaces.
_PATTERN = re.compile(r"[,\d\[\]()+*]+")


@functools.cache
def megatron_arguments() -> dict[str, tuple[str, str, Any]]:
    """flag -> (destination, kind, default) of every argument of Megatron-LM's parser, as in megatron-core 0.19.2.

    Kinds: `true` and `false` are switches, `either` has a `--no-` form; `int`, `float`, `str`, `literal`, and these
    with ` list`. A test compares the file with the parser.
    """
    text = files("moeref.check.readers").joinpath("megatron_arguments.json").read_text(encoding="utf-8")
    entries = json.loads(text).items()
    return {flag: (*(named or [destination(flag)]), kind, default) for flag, (kind, default, *named) in entries}


def destination(flag: str) -> str:
    """The name that argparse gives the value of a flag by itself."""
    return flag.lstrip("-").replace("-", "_")


def read_script(paths: Sequence[Path], given: Mapping[str, str]) -> Script:
    """The script that the files make, one after another. Raises CheckError for a sourced file that is not there."""
    script = Script(dict(given))
    for path in paths:
        script.read(path)
    names = {path.name for path in paths}
    for missing in script.missing:
        if Path(missing.text).name not in names and missing.text.endswith(".sh"):
            raise CheckError(
                f"{missing.where}: sources {missing.text}, which is not there; give that file before the script"
            )
    return script


def entry(script: Script, program: str, reading: Reading) -> tuple[list[Word], list[Word]]:
    """(words before, words after) the program in the last command that calls one.

    program: a pattern of the whole word that names it. A file without such a command is a list of arguments: its own
    words, or else its arrays. A command after it that begins with an argument is a problem in `reading`.
    """
    for at in reversed(range(len(script.commands))):
        command = script.commands[at]
        for number, word in enumerate(command):
            if re.fullmatch(program, word.text):
                reading.problems += [_stray(later[0]) for later in script.commands[at + 1 :] if _begins(later)]
                return command[:number], command[number + 1 :]
    bare = [word for command in script.commands if command[0].text.startswith("-") for word in command]
    return [], bare or [word for name in script.arrays for word in script.variables[name]]


def program_of(script: Script, program: str) -> str:
    """The word that names the program in the last command that calls one; "" if none does."""
    words = (word.text for command in reversed(script.commands) for word in command)
    return next((text for text in words if re.fullmatch(program, text)), "")


def _begins(command: list[Word]) -> bool:
    """Whether a command begins with an argument, as the rest of one does whose line has no backslash."""
    return bool(command) and command[0].text.startswith("--")


def _stray(first: Word) -> Problem:
    text = f"a command begins with {first.text} ({first.where}), so the program does not get it and what follows"
    return Problem("script", text, "end the line before it with a backslash")


def flags(words: Iterable[Word]) -> list[tuple[str, list[Word], Word]]:
    """(flag, its values, the word of the flag) in order.

    Two kinds of words count as a flag without values though they begin with no dash: a word before the first flag, and
    a variable that may hold arguments and comes after a value.
    """
    found: list[tuple[str, list[Word], Word]] = []
    for word in words:
        if word.text.startswith("-") and not _NUMBER.match(word.text) and len(word.text) > 1:
            flag, equals, value = word.text.partition("=")
            found.append((flag, [Word(value, word.where, word.known)] if equals else [], word))
        elif not found or (found[-1][1] and may_hold_arguments(word)):
            found.append((word.text, [], word))
        else:
            found[-1][1].append(word)
    return found


def may_hold_arguments(word: Word, *, first: bool = False) -> bool:
    """Whether a word is all of a variable that is not known. If it is the `first` after a flag, only an array may."""
    variable = None if word.known else _VARIABLE.fullmatch(word.text)
    return variable is not None and bool(variable[1] or not first)


def converted(flag: str, kind: str, words: Sequence[Word], source: str) -> Value:
    """The value of one argument. Raises CheckError for text that its kind does not take."""
    if kind in SWITCHES:
        value = kind != "false" and not (kind == "either" and flag.startswith("--no-"))
        return Value(flag, value, source)
    if not words:
        raise CheckError(f"{source}: {flag} has no value")
    source = words[0].where
    if not all(word.known for word in words):
        return Value(flag, " ".join(word.text for word in words), source, known=False)
    base, _, many = kind.partition(" ")
    try:
        values = [_one(base, word.text) for word in words]
    except (LiteralError, ValueError) as error:
        raise CheckError(f"{source}: {flag} {words[0].text!r} is no {base}") from error
    return Value(flag, values if many else values[0], source)


def _one(kind: str, text: str) -> Any:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "literal":
        if not _PATTERN.fullmatch(text):
            raise ValueError(text)
        return literal(text)
    return text
