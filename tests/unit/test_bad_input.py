"""Bad input to `moeref check`: one sentence, exit code 2, soon, and no traceback.

The fuzz test draws MOEREF_FUZZ inputs, 40 by default and 10,000 in `nox -s preflight`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeref.check import CheckError, check, model_of
from moeref.check.report import EXIT
from moeref.cli import BAD_INPUT, LONGEST, main, printable
from moeref.families import FamilyError, known, read
from tests.unit.models import CONFIGS

DEEP = "[" * 100_000
NASTY: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([-1, 0, 1, 7, 10**9, 10**30, 0.5, float("nan"), float("inf"), "8", "", None, True, [], {}, [[]]]),
    st.text(max_size=8),
    st.lists(st.sampled_from([0, "dense", None, -1]), max_size=5),
    st.dictionaries(
        st.sampled_from(["rope_type", "rope_theta", "factor", "x"]), st.sampled_from([0, "yarn", None, []])
    ),
)


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and message; at most a second of CPU time."""
    began = time.process_time()
    code = main(["check", *arguments, "--no-verify"])
    assert time.process_time() - began < 1
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"hidden_size": float("nan")},
        {"hidden_size": "8"},
        {"vocab_size": 0},
        {"rms_norm_eps": "small"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": True},
        {"num_experts": 10**8},
        {"rope_theta": float("inf")},
        {"rope_parameters": 3},
        {"tie_word_embeddings": "yes"},
        {"mlp_only_layers": 3},
        {"quantization_config": "fp8"},
    ],
    ids=str,
)
def test_a_value_that_no_model_has_is_named(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(known("qwen3-30b-a3b") | changes))
    code, said = run(str(file), "--layout", "ep=8", capsys=capsys)
    assert code == BAD_INPUT
    assert said.startswith("moeref: qwen3_moe: ")
    assert next(iter(changes)) in said
    assert said.count("\n") == 1
    with pytest.raises(FamilyError):
        read(known("qwen3-30b-a3b") | changes)


@pytest.mark.parametrize("name", ["config.json", "run.yaml", "run.json"])
def test_what_is_nested_too_deeply_is_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    file.write_text(DEEP)
    assert run(str(file), "--layout", "ep=8", capsys=capsys)[0] == BAD_INPUT


def test_aliases_that_repeat_aliases_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    code, said = run(str(tmp_path / "run.yaml"), capsys=capsys)
    assert (code, "more than 20000 values" in said) == (BAD_INPUT, True)


def test_a_missing_file_is_said_before_a_missing_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(str(tmp_path / "run.json"), capsys=capsys)
    assert (code, said) == (BAD_INPUT, f"moeref: {tmp_path / 'run.json'}: no such file or folder\n")


def test_a_pipe_and_a_large_file_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    assert "not a regular file" in run(str(tmp_path / "run.yaml"), capsys=capsys)[1]
    (tmp_path / "large.yaml").write_text("#" * 1_000_001)
    assert "at most 1000000 bytes" in run(str(tmp_path / "large.yaml"), capsys=capsys)[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ("qwen3-30b-a3b", "--layout", "world=999999999"),
        ("qwen3-30b-a3b", "--layout", "pp=999999999"),
        ("qwen3-30b-a3b", "--layout", "tp=999999999,ep=999999998"),
        ("x" * 5000, "--layout", "ep=8"),
        ("a\0b", "--layout", "ep=8"),
        ("qwen3-30b-a3b", "--layout", "ep=8", "--set", "x" * 5000 + "=1"),
        ("qwen3-30b-a3b", "--layout", "\x1b[31mep"),
    ],
    ids=lambda arguments: str(arguments)[:60],
)
def test_what_means_nothing_takes_no_time(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(*arguments, capsys=capsys)
    assert code == BAD_INPUT
    assert len(said) < LONGEST + 100
    assert all(character.isprintable() for character in said.rstrip("\n"))


def test_a_message_can_be_printed() -> None:
    assert printable("a\x1b[31m\nb") == "a\\x1b[31m\nb"
    assert printable("x" * 3000).endswith("… (1000 more characters)")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("GLM-4.5", "glm-4.5"),
        ("moonshotai/Kimi-K2-Base", "kimi-k2"),
    ],
)
def test_a_repository_s_name_is_a_model_s(name: str, same: str) -> None:
    assert model_of(name)[1] == model_of(same)[1]


@settings(max_examples=int(os.environ.get("MOEREF_FUZZ", "40")), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_config_ends_in_another_error(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from(list(CONFIGS.values()))))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3, unique=True)):
        config[key] = data.draw(NASTY)
    layout = data.draw(
        st.sampled_from(["ep=2", "tp=2,pp=2,ep=4,etp=1", ""]) | st.text("tpecw=,0123456789", max_size=12)
    )
    began = time.process_time()
    with contextlib.suppress(CheckError):
        assert check(config, layout, verify=False).verdict in EXIT
    assert time.process_time() - began < 1
