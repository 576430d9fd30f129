"""A parser of arguments whose errors name what was meant, and what the help of every command ends with."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from moeref_conformance.contract.checks import nearest
from moeref_conformance.contract.statuses import EXIT_WORDS

#: What `--help` of the whole begins with, by what one wants.
EXAMPLES = """\
first:
  moeref-conformance init adapter.py                     an adapter to start from
  moeref-conformance smoke --target adapter:target       a few cells, in a minute or two
judge:
  moeref-conformance run --target adapter:target         the CPU matrix, into conformance-report/
  moeref-conformance run --target dump:DIR --cell ID     a run recorded elsewhere
look closer:
  moeref-conformance run --target adapter:target --cell 'qwen3_moe/*' --rule EXP
  moeref-conformance list --target adapter:target        what it claims
  moeref-conformance diff old/results.jsonl new/results.jsonl
"""
#: What a verdict ends with, and what a command without one does; `WORSE` says what 1 is of those that compare.
EXIT_CODES = "exit codes: " + ", ".join(f"{code} {word}" for code, word in enumerate(EXIT_WORDS))
EXIT_CODES += " (2 also for bad input)"
DONE = "exit codes: 0 done, 2 bad input or an error of the kit"
WORSE = {
    "diff": "exit codes: 0 nothing is worse, 1 something is, 2 bad input or an error of the kit",
    "shards": "exit codes: 0 the same shards, known failures excepted, 1 not, 2 bad input or an error of the kit",
}


class Completion(argparse.Action):
    """`--completion SHELL`: print a completion script and end."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        try:
            import shtab  # takes longer than most commands
        except ImportError:
            parser.error("completions need the package shtab: pip install shtab")

        print(shtab.complete(parser, shell=values))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """One that suggests the nearest command or option, and tells exit codes at the end of its help."""

    def __init__(self, **more: Any) -> None:
        more.setdefault("epilog", EXIT_CODES)
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse; what was given is kept for errors."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """As argparse, with `did you mean` where one word was not known."""
        if unknown := re.match(r"unrecognized arguments: (-\S+)", message):
            message += nearest(unknown[1], self._options())
        elif message.startswith("the following arguments are required"):
            names = [word.partition("=")[0] for word in self._given if word.startswith("--")]
            wrong = [name for name in names if not any(known.startswith(name) for known in self._options())]
            message += "".join(f"; unknown option {name!r}{nearest(name, self._options())}" for name in wrong)
        elif unknown := re.match(r"argument command: invalid choice: '([^']*)'", message):
            message = f"unknown command {unknown[1]!r}{nearest(unknown[1], self._commands())}"
        super().error(message)

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        groups = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return {name: parser for group in groups for name, parser in group.items()}

    def _options(self) -> Iterator[str]:
        for parser in (self, *self._commands().values()):
            yield from parser._option_string_actions


__all__ = ["DONE", "EXAMPLES", "EXIT_CODES", "WORSE", "Completion", "Parser"]
