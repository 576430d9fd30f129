"""Damaged files of frameworks given to `moeref check --from`: a verdict or one sentence, soon, and no traceback.

Published runs are changed at random. MOEREF_FUZZ files are drawn, 40 by default and 10,000 in `nox -s preflight`.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moeref import families
from moeref.check.readers import FORMATS
from moeref.check.report import EXIT
from moeref.cli import BAD_INPUT, LONGEST, main
from tests.unit.test_framework_trees import BASE
from tests.upstream.framework_runs import facts, script

#: What a shell, Hydra, YAML or a number's reader stumbles over.
NASTY = st.sampled_from(
    [
        *("'", '"', "\\", "$", "${", "${X:-", "$((", "$((1/0))", "$((9**9**9))", "`", "(", ")", "[", "]", "{", "}"),
        *("<<EOF", "|", ";", "&&", "#", "\n", "\t", "\0", "\x1b[31m", "\ud7ff", "é", "if true; then", "done", "fi"),
        *("=", "==", "~", "+", "++", ",", ":", "- ", "? ", "&a", "*a", "!!python/object:os.system", "<<: *a", "@"),
        *("-1", "0", "1e999", "nan", "10" * 40, "0x10", "True", "null", "[1]*999999999", "[[" * 200, "9" * 5000),
        *("--", "--tensor-model-parallel-size", "--num-layers", "--no-such-option", "source run.sh", "X=$X$X"),
        *("${oc.env:HOME}", "${policy}", "${a.b}", "defaults: [run]", "defaults: run.yaml"),
    ]
)
RUNS = [(name, run) for name in FORMATS for run in facts(name)]


def asked(arguments: list[str]) -> tuple[int, str]:
    """Exit code and what is said of an error; at most a second of CPU time, in one of two tries on a busy machine."""
    seconds = []
    for _ in range(2):
        said, began = io.StringIO(), time.process_time()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = main(["check", *arguments, "--no-verify"])
        seconds.append(time.process_time() - began)
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1
    return code, said.getvalue()


def fine(code: int, said: str) -> bool:
    """A verdict, or one sentence that a terminal can show."""
    one = said.startswith("moeref: ") and said.count("\n") == 1 and len(said) < LONGEST + 100
    return code in (*EXIT.values(), BAD_INPUT) and (not said or (one and said[:-1].isprintable()))


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """`text` with up to four pieces put in, cut out or put in place of another."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        gone = draw(st.sampled_from([0, 0, 1, 5, 40]))
        text = text[:at] + draw(st.sampled_from(["", " ", "\n"])) + draw(NASTY | st.just("")) + text[at + gone :]
    return text


def written(folder: str, name: str, text: str) -> str:
    path = Path(folder, name)
    path.write_bytes(text.encode(errors="surrogateescape"))
    return str(path)


FUZZ: dict[str, Any] = {
    "max_examples": int(os.environ.get("MOEREF_FUZZ", "40")),
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(**FUZZ)
@given(data=st.data())
def test_no_script_ends_in_a_traceback(data: st.DataObject) -> None:
    framework, run = data.draw(st.sampled_from([pair for pair in RUNS if pair[0] != "megatron-bridge"]))
    text = data.draw(damaged(script(framework, run)))
    with tempfile.TemporaryDirectory() as folder:
        assert fine(*asked(["--from", framework, written(folder, "run.sh", text), "--model", run["model"]]))


@settings(**FUZZ)
@given(data=st.data())
def test_no_yaml_ends_in_a_traceback(data: st.DataObject) -> None:
    framework = data.draw(st.sampled_from(["nemo-rl", "verl", "skyrl", "ms-swift", "areal"]))
    text = data.draw(damaged(BASE))
    with tempfile.TemporaryDirectory() as folder:
        assert fine(*asked(["--from", framework, written(folder, "run.yaml", text)]))


@settings(**FUZZ)
@given(data=st.data())
@example(data=None)
def test_no_recipe_and_override_ends_in_a_traceback(data: st.DataObject | None) -> None:
    if data is None:
        assert fine(*asked(["--from", "megatron-bridge", "no_such_recipe"]))
        return
    framework, run = data.draw(st.sampled_from([pair for pair in RUNS if pair[0] == "megatron-bridge"]))
    words = [data.draw(damaged(word)) if data.draw(st.booleans()) else word for word in run["arguments"].split()]
    words = [word for word in words if not word.startswith("-")] or ["x"]
    assert fine(*asked(["--from", framework, *words, "--model", run["model"]]))


NUMBER, TEXT = "9" * 400, "x" * 5000


@pytest.mark.parametrize(
    ("framework", "name", "text"),
    [
        ("nemo-rl", "run.yaml", "a scalar"),
        ("verl", "run.yaml", "- a list"),
        ("skyrl", "run.sh", "python -m skyrl.train.entrypoints.main_base trainer.placement.policy_num_nodes.x=8"),
        ("nemo-rl", "run.yaml", "policy: {model_name: x}\ncluster:"),
        ("verl", "run.sh", "python -m verl.trainer.main_ppo a.b='${2 policy' x=${a.b}"),
        ("slime", "run.sh", f"python train.py --moe-router-topk {NUMBER} --rotary-base {NUMBER}"),
        ("slime", "run.sh", f"source {TEXT}\npython train.py --tensor-model-parallel-size 2"),
        ("ms-swift", "run.sh", f"megatron rlhf --model {TEXT}"),
        (
            "nemo-rl",
            "run.sh",
            f"uv run examples/run_grpo.py policy.megatron_cfg.tensor_model_parallel_size={NUMBER * 25}'2",
        ),
    ],
)
def test_what_was_found_by_chance_stays_mended(framework: str, name: str, text: str, tmp_path: Path) -> None:
    assert fine(*asked(["--from", framework, written(str(tmp_path), name, text), "--model", "qwen3-30b-a3b"]))
    assert fine(*asked(["--from", framework, written(str(tmp_path), name, text), f"a.b={TEXT}"]))
    assert fine(*asked([f"{TEXT}.json", "--layout", "tp=2"]))


def test_a_model_may_be_named_with_more_than_a_path_takes() -> None:
    with pytest.raises(families.FamilyError, match="cannot read a Hugging Face config"):
        families.read("x" * 5000)


@pytest.mark.parametrize("framework", FORMATS)
def test_a_file_that_is_none_is_one_sentence(framework: str, tmp_path: Path) -> None:
    binary = tmp_path / "run.sh"
    binary.write_bytes(bytes(range(256)) * 40)
    deep = tmp_path / "deep.yaml"
    deep.write_text("[" * 100_000)
    for arguments in ([str(binary)], [str(deep)], [str(tmp_path)], [str(tmp_path / "gone.sh")], ["a=b"]):
        code, said = asked(["--from", framework, *arguments])
        assert code in (BAD_INPUT, EXIT["unknown"])
        assert fine(code, said)
        assert said
