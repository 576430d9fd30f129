"""The preflight: verdicts, splits that work, pages and exit codes; and a run file that holds no value twice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref.check import CheckError, check, splits
from moeref.cli import main
from moeref.config import MoEConfig
from moeref.families import known, published
from moeref.layout import Layout

ROOT = Path(__file__).parents[2]
KIMI = "tp=8,pp=16,ep=64,etp=1,world=1024"
EXAMPLE = ROOT / "docs/examples/glm47_flash_grpo.yaml"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_trillion_parameters_on_1024_ranks() -> None:
    report = check(
        "kimi-k2",
        KIMI + ",first=3,last=2",
        dispatcher="flex:hybridep",
        precision="mxfp8",
        replay="R3",
        seq_length=32769,
    )
    assert report.works
    assert report.parameters == pytest.approx(1.03e12, rel=0.01)
    assert report.experts == (384, 6)
    assert {s.pp: len(s.layers) for s in report.stages} == {0: 3, 15: 2, **dict.fromkeys(range(1, 15), 4)}
    # 32 rows a rank after TP 8, in equal pieces of 64: lcm(8, 8·32, 8·64)
    assert report.padding is not None
    assert (report.padding.plan.multiple, report.padding.padded, report.padding.rows) == (512, 33280, 4160)
    assert report.record is not None
    assert report.record["moe_flex_dispatcher_backend"] == "hybridep"
    assert report.record["moe_enable_routing_replay"] is True
    assert report.route_bytes == 60 * 8 * 2
    assert any("expert: 79 distinct seeds of 1024" in note for note in report.notes)
    # Experts dominate: 384·3·2048·7168 in 60 layers over EP 64, in bf16.
    assert report.weights[1] == pytest.approx(4 * 6 * 3 * 2048 * 7168 * 2, rel=0.15)


def test_61_layers_on_16_even_stages_will_not_work_and_the_splits_offered_do() -> None:
    report = check("kimi-k2", KIMI)
    assert not report.works
    (problem,) = report.problems
    assert problem.about == "layout"
    assert "61 layers are not divisible by pp=16" in problem.text
    assert "first=3,last=2" in problem.fix
    for split in splits(Layout.parse(KIMI), 61):
        assert check("kimi-k2", f"{KIMI},{split.text}").works


@given(
    layers=st.integers(4, 97), pp=st.sampled_from([2, 4, 8, 16]), vpp=st.sampled_from([1, 2, 3]), mtp=st.integers(0, 1)
)
def test_every_split_offered_holds_every_layer_once(layers: int, pp: int, vpp: int, mtp: int) -> None:
    layout = Layout(pp=pp, vpp=vpp)
    found = splits(layout, layers, mtp=mtp)
    assert found or layers < pp * vpp
    for split in found:
        again = Layout.parse(split.layout.text).stages(layers, mtp=mtp or None)
        assert sorted(i for stage in again.layers.values() for i in stage) == list(range(layers))
        assert sum(split.per_rank) == layers
    assert list(found) == sorted(found, key=lambda s: (*s.cost, s.text))


@pytest.mark.parametrize("name", published())
def test_every_published_model_on_one_rank(name: str) -> None:
    report = check(name, "world=1")
    assert report.works, report.problems
    assert report.tensors > 100
    assert set(report.weights) == {0}


@pytest.mark.parametrize(
    ("layout", "more", "about"),
    [
        ("tp=2,world=3", {}, "layout"),
        ("ep=7", {}, "bridge"),
        ("tp=3,etp=1", {}, "bridge"),
        ("tp=2,ep=2,etp=1,world=2", {"dispatcher": "flex:deepep", "precision": "fp32"}, "dispatcher"),
        ("world=1", {"asked": MoEConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=None)}, "config"),
        (
            "world=1",
            {"replay": "R2", "asked": MoEConfig(transformer_config_kwargs={"moe_router_fusion": True})},
            "config",
        ),
        ("tp=11,ep=22,etp=1", {}, "seeds"),
    ],
)
def test_what_will_not_work_is_a_verdict(layout: str, more: dict[str, Any], about: str) -> None:
    if about == "seeds":
        config = known("qwen3-30b-a3b") | {"num_attention_heads": 44, "num_key_value_heads": 11, "num_experts": 22}
        report = check(config, layout, **more)
    else:
        report = check("qwen3-30b-a3b", layout, **more)
    assert not report.works
    assert about in {problem.about for problem in report.problems}


@pytest.mark.parametrize(
    ("model", "layout", "more", "says"),
    [
        ("qwen3-30b", "world=1", {}, "did you mean qwen3-30b-a3b"),
        ("no/such/folder", "world=1", {}, "no such file or folder"),
        ({"model_type": "qwen4"}, "world=1", {}, "qwen4"),
        ("qwen3-30b-a3b", "tq=2", {}, "unknown key 'tq'"),
        ("qwen3-30b-a3b", "world=1", {"precision": "fp8"}, "none of bf16"),
        ("qwen3-30b-a3b", "world=1", {"replay": "r3"}, "none of off, R2, R3"),
        ("qwen3-30b-a3b", "world=1", {"dispatcher": "deepep"}, "none of auto"),
        ("qwen3-30b-a3b", "world=1", {"seq_length": 0}, "at least 1"),
        ("qwen3-30b-a3b", "world=1", {"core": "0.12"}, "0.12"),
        ("qwen3-30b-a3b", "world=1", {"seed": 0}, "seed=0"),
    ],
)
def test_what_means_nothing_is_bad_input(model: Any, layout: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckError, match=says):
        check(model, layout, **more)


def test_a_folder_and_a_file_are_models_too(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(known("glm-4.5")))
    for model in (file, file.parent):
        report = check(model, "ep=8")
        assert report.works
        assert report.title == "mine"


def test_exit_codes_and_pages(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("qwen3-30b-a3b", "--layout", "tp=2,ep=8,etp=1", "--replay", "R2", capsys=capsys)
    assert code == 0
    assert "will work" in " ".join(out.split())
    code, out, _ = run("kimi-k2", "--layout", KIMI, capsys=capsys)
    assert code == 1
    assert "will not work" in " ".join(out.split())
    assert "first=3,last=2" in " ".join(out.split())
    code, out, err = run("kimi-k3", "--layout", KIMI, capsys=capsys)
    assert code == 2
    assert not out
    assert "did you mean kimi-k2" in err
    assert run("kimi-k2", capsys=capsys)[0] == 2
    assert run("kimi-k2", "--layout", KIMI, "--set", "moe_router_topk", capsys=capsys)[0] == 2


def test_json_is_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        "qwen3-30b-a3b", "--layout", "ep=8", "--json", "--set", "moe_router_topk_scaling_factor=2.5", capsys=capsys
    )
    found = json.loads(out)
    assert code == 0
    assert found["works"] is True
    assert found["tensors"] == 18867
    setting = found["megatron"]["settings"]["moe_router_topk_scaling_factor"]
    assert (setting["value"], setting["origin"]) == (2.5, "override")


def test_the_example_works_and_holds_no_value_twice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(str(EXAMPLE), "--json", capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["policy"] == found["reference"]
    keys = [line.split(":")[0].strip() for line in EXAMPLE.read_text().splitlines() if ":" in line and "#" not in line]
    assert len(keys) == len(set(keys))
    code, out, _ = run(str(EXAMPLE), capsys=capsys)
    assert "policy and reference" in out


def test_the_launcher_starts_what_was_checked() -> None:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import launch_glm47_flash as launcher
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    reports = launcher.preflight()
    assert reports["policy"].works
    assert reports["policy"].to_plain() == reports["reference"].to_plain()
    text = Path(launcher.__file__).read_text().split("from __future__")[1]
    values = [str(v) for v in (launcher.RUN.seed, launcher.RUN.seq_length, launcher.RUN.model, launcher.RUN.replay)]
    assert [value for value in values if value in text] == []


def test_a_reference_that_drifts_is_refused_unless_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("reference: ${policy}", "reference: {moe_grouped_gemm: false}")
    drifted = tmp_path / "drifted.yaml"
    drifted.write_text(text)
    code, _, err = run(str(drifted), capsys=capsys)
    assert code == 2
    assert "moe_grouped_gemm is True for the policy and False for the reference" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: glm-4.5\n", "layout is missing"),
        ("modle: glm-4.5\n", "did you mean model"),
        ("- 1\n", "a run file is a mapping"),
        ("model: [\n", "not YAML|cannot|while parsing"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: ${nowhere}\n", "nowhere"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {moe_grouped_gem: true}\n", "moe_grouped_gemm"),
    ],
)
def test_a_bad_run_file_is_bad_input(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    code, _, err = run(str(file), capsys=capsys)
    assert code == 2
    assert re.search(says, err), err


def test_a_run_file_needs_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": "glm-4.5", "layout": "ep=8", "policy": {"moe_grouped_gemm": True}}))
    assert run(str(file), capsys=capsys)[0] == 0


def test_checking_imports_neither_megatron_nor_vllm() -> None:
    code = (
        "import sys; from moeref.check import check; check('qwen3-30b-a3b', 'tp=2,ep=2,etp=1');"
        "assert not {'megatron', 'vllm', 'transformers'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
