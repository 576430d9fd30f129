"""The command line of moeref: help tells how each command ends, and a word that is not known brings the nearest."""

from __future__ import annotations

import shlex

import pytest

from moeref import arguments, cli


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == code
    return "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chek", "unknown command 'chek'; did you mean check?"),
        ("check kimi-k2 --layot tp=1", "unrecognized arguments: --layot tp=1; did you mean --layout?"),
        ("audit a b --jsno", "unrecognized arguments: --jsno; did you mean --json?"),
        ("check kimi-k2 --zzz", "unrecognized arguments: --zzz\n"),
        ("--completion bsh", "argument --completion: invalid choice: 'bsh'"),
    ],
)
def test_a_word_that_is_not_known_brings_the_nearest(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(words.split(), capsys, 2)


@pytest.mark.parametrize("command", arguments.EXIT_CODES)
def test_help_tells_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"exit codes: {arguments.EXIT_CODES[command]}\n" in said([command, "--help"], capsys, 0)
    assert f"exit codes of {command}: {arguments.EXIT_CODES[command]}\n" in said(["--help"], capsys, 0)


def test_help_begins_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments.EXAMPLES in said(["--help"], capsys, 0)
    lines = [line.strip().split("   ")[0] for line in arguments.EXAMPLES.splitlines()]
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("moeref ")]
    assert len(examples) == 5
    for example in examples:
        assert callable(cli._parser().parse_args(example).run)
