"""A parser of arguments whose errors name what was meant, and `--completion`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from moeref.config.errors import nearest

#: What `--help` of the whole begins with, by what one wants.
EXAMPLES = """\
before a run:
  moeref check qwen3-30b-a3b --layout tp=2,ep=8,etp=1    whether it will work, and what follows from it
  moeref check --from verl grpo.yaml                     the same, of a framework's own files
weights:
  moeref convert MODEL SHARDS --layout tp=2,ep=4,etp=1   a checkpoint as the shards of a layout
  moeref convert SHARDS NEW                              and back
  moeref audit EXPECTED FOUND                            whether two models are equal, byte for byte
"""
EXIT_CODES = {
    "check": "0 it will work, 1 it will not, 2 bad input, 3 not known",
    "audit": "0 equal, 1 not equal, 2 bad input",
    "convert": "0 done, 2 bad input",
}


class Completion(argparse.Action):
    """`--completion SHELL`: print a completion script and end."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        try:
            import shtab  # takes longer than a check
        except ImportError:
            parser.error("completions need the package shtab: pip install shtab")

        print(shtab.complete(parser, shell=values))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """One that suggests the nearest command or option, and keeps the lines of what its help says."""

    def __init__(self, **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        """As argparse, with `did you mean` where one word was not known."""
        if unknown := re.match(r"unrecognized arguments: (-\S+)", message):
            message += nearest(unknown[1], self._options())
        elif unknown := re.match(r"argument command: invalid choice: '([^']*)'", message):
            message = f"unknown command {unknown[1]!r}{nearest(unknown[1], self._commands())}"
        super().error(message)

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        groups = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return {name: parser for group in groups for name, parser in group.items()}

    def _options(self) -> Iterator[str]:
        for parser in (self, *self._commands().values()):
            yield from parser._option_string_actions


__all__ = ["EXAMPLES", "EXIT_CODES", "Completion", "Parser"]
