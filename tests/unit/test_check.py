"""The preflight: verdicts, splits that work, pages and exit codes; and a run file that holds no value twice."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moeref.check import CheckError, check, model_of, splits
from moeref.check.page import show
from moeref.cli import main
from moeref.config import ConfigError, MoEConfig
from moeref.families import known, published
from moeref.layout import Layout
from moeref.record import Record

ROOT = Path(__file__).parents[2]
KIMI = "tp=8,pp=16,ep=64,etp=1,world=1024"
EXAMPLE = ROOT / "docs/examples/glm47_flash_grpo.yaml"


CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def through(**settings: Any) -> MoEConfig:
    return MoEConfig(transformer_config_kwargs=settings)


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
    assert report.settings is not None
    assert report.settings["moe_flex_dispatcher_backend"] == "hybridep"
    assert report.settings["moe_enable_routing_replay"] is True
    assert report.route_bytes == 60 * 8 * 2
    assert any("expert: 79 distinct seeds of 1024" in note for note in report.notes)
    # Experts dominate: 384·3·2048·7168 in 60 layers over EP 64, in bf16.
    assert report.weights[1] == pytest.approx(4 * 6 * 3 * 2048 * 7168 * 2, rel=0.15)


@pytest.mark.parametrize(("kernels", "needs"), [("torch", ("apex's fused_weight_gradient_mlp_cuda",)), ("te", ())])
def test_fused_accumulation_in_plain_modules_needs_apex(kernels: str, needs: tuple[str, ...]) -> None:
    fused = MoEConfig(transformer_config_kwargs={"gradient_accumulation_fusion": True})
    assert check("qwen3-30b-a3b", "ep=8,world=8", asked=fused, kernels=kernels).needs == needs
    assert check("qwen3-30b-a3b", "ep=8,world=8", kernels=kernels).needs == ()


def test_grouped_gemm_of_plain_modules_is_not_known_for_0_16() -> None:
    grouped = MoEConfig(transformer_config_kwargs={"moe_grouped_gemm": True})
    run = {"asked": grouped, "verify": False, "core": "0.16.1"}
    report = check("qwen3-30b-a3b", "ep=8,world=8", **run)
    assert report.verdict == "unknown"
    assert "weight1" in report.problems[0].text
    assert check("qwen3-30b-a3b", "ep=8,world=8", **run, kernels="te").works
    assert check("qwen3-30b-a3b", "ep=8,world=8", **run | {"core": "0.19.2"}).works


def test_a_list_of_cp_kinds_is_refused_for_0_16() -> None:
    kinds = MoEConfig(transformer_config_kwargs={"cp_comm_type": ["p2p"] * 48})
    run = {"asked": kinds, "verify": False, "kernels": "te"}
    (problem,) = check("qwen3-30b-a3b", "cp=2,ep=2,world=2", **run, core="0.16.1").problems
    assert "cp-kind-each-from-0.19" in problem.fix
    assert check("qwen3-30b-a3b", "cp=2,ep=2,world=2", **run, core="0.19.2").works


@pytest.mark.parametrize(("name", "value"), [("beta_fast", 0.0), ("beta_slow", 0.0), ("rotary_base", 1.0)])
def test_numbers_of_yarn_are_positive(name: str, value: float) -> None:
    asked = MoEConfig(transformer_config_kwargs={name: value})
    (problem,) = check("deepseek-v3", "world=1", asked=asked, verify=False, hbm=20_000).problems
    assert "yarn-takes-positive-numbers" in problem.fix


def test_what_no_gpu_holds_will_not_work_unless_one_is_named() -> None:
    (problem,) = check("kimi-k2", "ep=8").problems
    assert problem.about == "memory"
    assert "GiB, more than GPUs have; --hbm says otherwise" in problem.text
    assert check("kimi-k2", "ep=8", hbm=3000).works


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
        assert split.text.startswith("no ") or Layout.parse(f"{layout.text},{split.text}") == split.layout
    assert all(all(split.per_rank) for split in found)
    plain = [split.text.startswith("no ") for split in found]
    assert plain == sorted(plain, reverse=True)  # what needs no key comes first, then the best balanced
    others = [split for split in found if not split.text.startswith("no ")]
    assert others == sorted(others, key=lambda s: (*s.cost, s.text.count("="), s.text))


@pytest.mark.parametrize("name", published())
def test_every_published_model_on_one_rank(name: str) -> None:
    report = check(name, "world=1", hbm=20_000)
    assert report.works, report.problems
    assert report.tensors > 100
    assert set(report.weights) == {0}
    # One rank holds every parameter in two bytes; files repeat embedding and head for a multi-token prediction layer.
    repeated = 0.025 if known(name).get("num_nextn_predict_layers") else 0.002
    assert report.weights[0] == pytest.approx(2 * report.parameters, rel=repeated)


@pytest.mark.parametrize(
    ("layout", "more", "about"),
    [
        ("tp=2,world=3", {}, "layout"),
        ("ep=7", {}, "bridge"),
        ("tp=3,etp=1", {}, "bridge"),
        ("tp=2,ep=2,etp=1,world=2", {"dispatcher": "flex:deepep", "precision": "fp32"}, "dispatcher"),
        (
            "world=1",
            {"asked": MoEConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=None)},
            "dispatcher",
        ),
        (
            "world=1",
            {"replay": "R2", "asked": MoEConfig(transformer_config_kwargs={"moe_router_fusion": True})},
            "config",
        ),
        ("tp=11,ep=22,etp=1", {}, "seeds"),
        ("ep=8", {"dispatcher": "flex:deepep", "asked": through(**CAPACITY)}, "dispatcher"),
        ("ep=8", {"dispatcher": "allgather", "asked": through(variable_seq_lengths=True)}, "dispatcher"),
        ("ep=8", {"asked": through(moe_router_topk=129)}, "config"),
        ("ep=8", {"asked": through(num_moe_experts=None)}, "config"),
        ("ep=8", {"asked": through(hidden_size=64)}, "config"),
        ("ep=8", {"core": "0.16.1", "asked": through(moe_router_topk=1)}, "config"),
        ("ep=8", {"precision": "fp32", "asked": through(moe_router_padding_for_quantization=True)}, "dispatcher"),
        ("ep=8", {"precision": "mxfp8", "kernels": "torch"}, "config"),
        ("ep=8", {"experts": "sequential", "asked": MoEConfig(moe_grouped_gemm=True)}, "config"),
    ],
)
def test_what_will_not_work_is_a_verdict(layout: str, more: dict[str, Any], about: str) -> None:
    if about == "seeds":
        config = known("qwen3-30b-a3b") | {"num_attention_heads": 44, "num_key_value_heads": 11, "num_experts": 22}
        report = check(config, layout, **more)
    else:
        report = check("qwen3-30b-a3b", layout, **more)
    assert not report.works
    assert report.record is None
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
        ("qwen3-30b-a3b", "world=1", {"seed_formula": "unique"}, "megatron, distinct"),
        ("qwen3-30b-a3b", "ep=0", {}, "ep=0 must be at least 1"),
        ("qwen3-30b-a3b", "world=1", {"seq_length": "long"}, "seq_length='long'"),
        ("qwen3-30b-a3b", "world=1", {"dispatcher": 5}, "dispatcher='5' is none"),
        ("qwen3-30b-a3b", "world=1", {"kernels": "triton"}, "kernels='triton' is none of torch, te"),
        ("qwen3-30b-a3b", "world=1", {"norms": "apart"}, "norms='apart' is none of separate, fused"),
        ("qwen3-30b-a3b", "world=1", {"divisible_by": 0}, "divisible_by=0 must be an integer and at least 1"),
        ("qwen3-30b-a3b", "world=1", {"kernel": "te"}, "unknown option 'kernel'; did you mean kernels"),
        (known("glm-4.5") | {"num_hidden_layers": "many"}, "world=1", {}, "a wrong type or size"),
        ("qwen3-30b-a3b", "ep=8", {"asked": through(moe_router_topkk=2)}, "did you mean moe_router_topk"),
        ("qwen3-30b-a3b", "ep=8", {"asked": through(moe_token_dispatcher_type="pigeon")}, "none of 'allgather'"),
        ("qwen3-30b-a3b", "ep=8", {"asked": through(moe_router_topk="two")}, "no integer"),
        (
            "qwen3-30b-a3b",
            "ep=8",
            {"core": "0.16.1", "asked": through(moe_hybridep_pad_uneven_dispatch_inputs=True)},
            "0.16.1 has no moe_hybridep_pad_uneven_dispatch_inputs",
        ),
        (
            "qwen3-30b-a3b",
            "ep=8",
            {"dispatcher": "flex:deepep", "asked": MoEConfig(moe_token_dispatcher_type="alltoall")},
            "dispatcher flex-deepep says 'flex'; say one of them",
        ),
        (
            "qwen3-30b-a3b",
            "ep=8",
            {"replay": "R3", "asked": MoEConfig(moe_enable_routing_replay=False)},
            "replay R3 says True",
        ),
        ("qwen3-30b-a3b", "ep=8", {"precision": "mxfp8", "asked": through(fp8_recipe="delayed")}, "says 'mxfp8'"),
    ],
)
def test_what_means_nothing_is_bad_input(model: Any, layout: str, more: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckError, match=says):
        check(model, layout, **more)


@pytest.mark.parametrize(("model", "layout"), [("gpt-oss-20b", "tp=2,ep=2,etp=2"), ("qwen3-next-80b-a3b", "cp=3")])
def test_a_layout_that_the_model_cannot_have_is_a_verdict(model: str, layout: str) -> None:
    (problem,) = check(model, layout, hbm=10_000).problems
    assert problem.about == "layout"


def test_a_problem_is_told_once_and_with_what_to_do() -> None:
    asked = through(**CAPACITY, moe_enable_routing_replay=True, moe_router_fusion=True)
    found = check("glm-4.5", "ep=32", dispatcher="flex:deepep", asked=asked).problems
    assert [problem.about for problem in found] == ["dispatcher", "config"]
    assert all(problem.fix for problem in found)


def test_what_is_asked_for_decides_what_the_dispatcher_is_judged_by() -> None:
    """Sequences of one length are the default, and all-gather takes them; the report has its settings."""
    report = check("glm-4.5", "ep=32", dispatcher="allgather")
    assert report.works
    assert report.settings is not None
    assert report.settings["variable_seq_lengths"] is False
    assert report.padding is not None
    assert report.padding.plan.grouped
    asked = MoEConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    assert check("glm-4.5", "ep=32", asked=asked).dispatcher == "flex-hybridep"


@pytest.mark.parametrize(
    ("precision", "settings", "rows"),
    [
        ("bf16", {"bf16": True, "fp8": None, "fp4": None}, 1),
        ("fp32", {"bf16": False, "fp8": None}, 1),
        ("delayed", {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        ("mxfp8", {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ("blockwise", {"fp8": "e4m3", "fp8_recipe": "blockwise"}, 128),
        ("nvfp4", {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4"}, 32),
    ],
)
def test_a_precision_is_settings_and_rows(precision: str, settings: dict[str, Any], rows: int) -> None:
    report = check("glm-4.5", "ep=8", precision=precision)
    assert report.settings is not None
    assert {name: report.settings[name] for name in settings} == settings
    assert report.padding is not None
    assert report.padding.plan.multiple == rows
    # The same by settings alone.
    asked = {name: value for name, value in settings.items() if value is not None}
    again = check("glm-4.5", "ep=8", asked=through(**asked))
    assert again.padding is not None
    assert again.padding.plan.multiple == rows


@pytest.mark.parametrize(
    ("layout", "precision", "asked", "says"),
    [
        ("ep=8", "nvfp4", MoEConfig(), "no FP8 recipe of delayed, .*only those are built"),
        ("ep=8", "bf16", through(fp4="e2m1", fp4_recipe="nvfp4"), "only those are built"),
        ("ep=8", "bf16", through(fp8="e4m3", fp8_recipe="custom"), "only those are built"),
        ("tp=8,ep=2,etp=8", "mxfp8", MoEConfig(), r"mxfp8 GEMMs take widths in multiples of 32.*linear_fc2"),
    ],
)
def test_what_the_builder_refuses_is_a_problem(layout: str, precision: str, asked: MoEConfig, says: str) -> None:
    report = check("glm-4.5-air", layout, precision=precision, asked=asked)
    assert report.record is None
    assert any(p.about == "config" and re.search(says, p.text) and p.fix for p in report.problems), report.problems


def test_blocks_may_end_inside_of_a_weight() -> None:
    layout = "pp=4,ep=4,etp=1,first=7,last=6,world=32"  # NeMo-RL's recipe of Moonlight in FP8
    report = check("moonlight-16b-a3b", layout, precision="blockwise", verify=False)
    assert report.verdict == "works", report.problems


def test_settings_that_mean_nothing_are_told_one_by_one() -> None:
    asked = through(moe_router_topkk=2, moe_router_topk="two")
    with pytest.raises(ConfigError) as error:
        Record.of(model_of("qwen3-30b-a3b")[1], Layout(), asked)
    assert len(error.value.problems) == 2
    assert "did you mean moe_router_topk" in error.value.problems[0]
    assert "is no integer" in error.value.problems[1]


def test_every_value_has_an_origin_that_says_who_wanted_it() -> None:
    record = check("glm-4.5", "ep=16", replay="R3", asked=through(moe_z_loss_coeff=0.5)).settings
    assert record is not None
    origins = {
        "moe_token_dispatcher_type": "derived",  # auto
        "moe_enable_routing_replay": "field",
        "moe_z_loss_coeff": "override",
        "moe_router_topk": "hf",
        "sequence_parallel": "layout",
        "moe_router_load_balancing_type": "default",
        "moe_aux_loss_coeff": "provider default",
    }
    assert {name: record.origin(name) for name in origins} == origins
    assert "auto" in record.by_name["moe_token_dispatcher_type"].reason
    assert len(record.by_name) > 300


def test_what_replaces_the_model_s_own_setting_is_told() -> None:
    report = check("glm-4.5", "ep=32", asked=MoEConfig(moe_router_enable_expert_bias=False))
    assert report.works
    assert "moe_router_enable_expert_bias=False replaces True of the model's own config" in report.notes


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ({"window_size": [4095, 0]}, "window_size=[4095, 0] replaces None"),
        ({"hidden_dropout": 0.1}, "hidden_dropout=0.1 replaces 0.0"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True replaces False"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0 replaces None"),
        ({"moe_expert_rank_capacity_factor": 1.0}, "moe_expert_rank_capacity_factor=1.0 replaces None"),
    ],
)
def test_what_a_model_does_not_ask_for_is_told(overrides: dict[str, Any], note: str) -> None:
    """It changes no shape, and another model is trained than the engine samples from."""
    report = check("qwen3-30b-a3b", "ep=8", asked=through(**overrides), verify=False)
    assert f"{note} of the model's own config" in report.notes
    assert not [text for text in check("gpt-oss-20b", "ep=8").notes if "replaces" in text]


def test_the_seeds_are_part_of_the_plan() -> None:
    plain = check("glm-4.5", "pp=4,ep=8,etp=2,world=64").to_plain()["seeds"]
    expert = {"distinct": 22, "wanted": 64, "lowest": 1234 + 1024, "highest": 1234 + 1024 + 300 + 700 + 1}
    assert plain["kinds"]["expert"] == expert
    assert {"generator": "expert", "seed": 2358, "places": ("pp0 ep1 etp0", "pp1 ep0 etp0")} in plain["collisions"]
    other = check("glm-4.5", "pp=4,ep=8,etp=2,world=64", seed_formula="distinct")
    assert other.seeds is not None
    assert other.seeds.counts["expert"] == (64, 64)
    assert not other.notes


def test_a_folder_and_a_file_are_models_too(tmp_path: Path) -> None:
    file = tmp_path / "mine" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(known("glm-4.5")))
    for model in (file, file.parent):
        report = check(model, "ep=32")
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


@pytest.mark.parametrize(
    ("sizes", "said"), [({}, "30.5 B"), ({"num_hidden_layers": 1, "vocab_size": 128, "num_experts": 8}, "57.2 M")]
)
def test_parameters_are_counted_in_a_unit_that_shows_them(
    sizes: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**known("qwen3-30b-a3b"), **sizes}))
    _, out, _ = run(str(tmp_path), "--layout", "tp=2,ep=8,etp=1", capsys=capsys)
    assert f"{said} parameters" in " ".join(out.split())


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_page_is_cut(width: int) -> None:
    report = check("kimi-k2", KIMI + ",first=3,last=2", dispatcher="flex:hybridep", precision="mxfp8", replay="R3")
    console = Console(width=width, record=True, file=io.StringIO())
    show(report, console)
    text = console.export_text()
    assert "…" not in text.replace("1234…2734", "").replace("3952…5459", "").replace("2258…10058", "")
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0].rstrip() == "will work: kimi-k2 on 1024 ranks"
    for words in ("moe_shared_expert_intermediate_size", "moe_flex_dispatcher_backend", "2258…10058", "4 each"):
        assert words in text
    assert report.settings is not None
    console = Console(width=width, record=True, file=io.StringIO())
    show(report, console, every_setting=True)
    assert report.settings.by_name.keys() <= set(re.findall(r"\w+", console.export_text()))


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
    assert found["reference"]["training"].pop("trains") is False  # the reference only runs forward
    assert found["policy"]["training"].pop("trains") is True
    weights = [found[name].pop("memory_bytes")["pp0"]["weights"] for name in ("policy", "reference")]
    assert weights[0] == weights[1] > 0
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
    plain = {name: report.to_plain() for name, report in reports.items()}
    trains = {name: (of.pop("training")["trains"], bool(of.pop("memory_bytes"))) for name, of in plain.items()}
    assert trains == {"policy": (True, True), "reference": (False, True)}
    assert plain["policy"] == plain["reference"]
    text = Path(launcher.__file__).read_text().split("from __future__")[1]
    values = [launcher.RUN.model, *(str(value) for value in launcher.RUN.options.values())]
    assert [value for value in values if value in text] == []


def test_the_record_holds_all_that_was_asked_for() -> None:
    asked = {"replay": "R2", "precision": "mxfp8", "experts": "grouped", "divisible_by": 64, "core": "0.16.1"}
    seeded = {"seed": 7, "seed_formula": "distinct", "seed_per_dp": True}
    record = check("glm-4.5", "ep=16,world=32", dispatcher="flex:deepep", **asked, **seeded).record
    assert record is not None
    assert record.layout == Layout.parse("ep=16,world=32")
    assert (record.dispatcher, record.replay, record.precision) == ("flex-deepep", "R2", "mxfp8")
    assert (record.seeds.seed, record.seeds.formula, record.seeds.per_dp) == (7, "distinct", True)
    assert (record.kernels, record.names.norms, record.names.experts) == ("te", "fused", "grouped")
    assert (record.divisible_by, record.core, record.names.mtp) == (64, "0.16.1", "transformer_layer")
    with pytest.raises(TypeError):
        record.settings.trails["moe_router_topk"] = ()  # type: ignore[index]


def test_a_reference_that_drifts_is_refused_unless_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("reference: ${policy}", "reference: {moe_grouped_gemm: false}")
    drifted = tmp_path / "drifted.yaml"
    drifted.write_text(text)
    code, _, err = run(str(drifted), capsys=capsys)
    assert code == 2
    assert "moe_grouped_gemm is True for the policy and False for the reference" in err


def test_lengths_that_are_not_there_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "qwen3-30b-a3b", "--layout", "tp=2", "--lengths", "no"]) == 2
    assert capsys.readouterr().err == "moeref: no: No such file or directory\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: glm-4.5\n", "layout is missing"),
        ("modle: glm-4.5\n", "did you mean model"),
        ("- 1\n", "a run file is a mapping"),
        ("model: [\n", "not YAML|cannot|while parsing"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: ${nowhere}\n", "nowhere"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {moe_grouped_gem: true}\n", "moe_grouped_gemm"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: 3\n", "policy is a mapping"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {}\nreference: [x]\n", "reference is a mapping"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {}\ndeclared: moe_grouped_gemm\n", "declared is a list"),
        ("model: glm-4.5\nlayout: [tp]\npolicy: {}\n", "layout is a text"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {}\nseq_length: long\n", "seq_length='long'"),
        ("model: glm-4.5\nlayout: {tp: 1}\npolicy: {transformer_config_kwargs: 3}\n", "is a mapping of settings"),
    ],
)
def test_a_bad_run_file_is_bad_input(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    code, _, err = run(str(file), capsys=capsys)
    assert code == 2
    assert re.search(says, err), err


def test_a_missing_run_file_is_said_to_be_missing_without_omegaconf_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    assert "run.yaml: no such file" in run(str(tmp_path / "run.yaml"), capsys=capsys)[2]
    (tmp_path / "run.yaml").write_text("model: glm-4.5\n")
    assert "pip install 'moeref[yaml]'" in run(str(tmp_path / "run.yaml"), capsys=capsys)[2]


def test_a_run_file_needs_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": "glm-4.5", "layout": "ep=32", "policy": {"moe_grouped_gemm": True}}))
    assert run(str(file), capsys=capsys)[0] == 0
    file.write_text(json.dumps({"model": "glm-4.5", "layout": "ep=32", "policy": {}}))
    assert run(str(file), capsys=capsys)[0] == 0


def test_checking_imports_neither_torch_nor_megatron_nor_vllm() -> None:
    code = (
        "import sys; from moeref.check import check; check('qwen3-30b-a3b', 'tp=2,ep=2,etp=1');"
        "heavy = {'megatron', 'numpy', 'torch', 'vllm', 'transformers'};"
        "assert not heavy & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("layout", "settings", "more", "multiple", "sample"),
    [
        ("tp=4,cp=2,etp=1,ep=8", {"attention_backend": "flash"}, {}, 8, 4),
        ("tp=4,cp=2,etp=1,ep=8", {"attention_backend": "fused"}, {}, 128, 4),
        ("tp=2,cp=2,etp=1,ep=8", {}, {"dispatcher": "flex-hybridep"}, 256, 4),
        ("tp=2,cp=2,etp=1,ep=8", {"attention_backend": "fused"}, {"dispatcher": "flex-hybridep"}, 256, 4),
        ("tp=2,cp=2,etp=1,ep=8", {}, {"dispatcher": "flex-deepep"}, 4, 4),
        ("tp=2,cp=2,etp=1,ep=8", {}, {"precision": "blockwise"}, 512, 4),
    ],
)
def test_padding_follows_attention_dispatcher_and_precision(
    layout: str, settings: dict[str, Any], more: dict[str, Any], multiple: int, sample: int
) -> None:
    report = check("qwen3-30b-a3b", layout, asked=through(**settings), seq_length=1000, **more)
    assert report.padding is not None
    assert (report.padding.plan.multiple, report.padding.plan.sample) == (multiple, sample)
    assert report.padding.padded == -(-1000 // multiple) * multiple


def test_stages_that_exchange_one_shape_get_microbatches_of_one_length() -> None:
    lengths = {100: 3, 40: 1}
    fixed, free = (
        check("qwen3-30b-a3b", "tp=2,pp=2,ep=8,etp=1", asked=through(variable_seq_lengths=own), lengths=lengths)
        for own in (False, True)
    )
    assert fixed.padding is not None
    assert free.padding is not None
    assert fixed.waste is not None
    assert free.waste is not None
    assert "variable_seq_lengths" in fixed.padding.one_length
    console = Console(width=120, record=True, file=io.StringIO())
    show(fixed, console)
    assert "every packed sequence to one length" in console.export_text()
    assert (fixed.waste.packs, fixed.waste.tokens, fixed.waste.padded) == (4, 340, 400)
    assert (free.padding.one_length, free.waste.padded) == ("", 340)
    alone = check("qwen3-30b-a3b", "tp=2,ep=8,etp=1", asked=through(variable_seq_lengths=False))
    assert alone.padding is not None
    assert not alone.padding.one_length  # one stage exchanges nothing


def test_every_sequence_may_be_padded_to_one_length() -> None:
    lengths = {100: 3, 40: 1}
    report = check("qwen3-30b-a3b", "tp=4,ep=8,etp=1", precision="blockwise", pad_to=1000, lengths=lengths)
    assert report.padding is not None
    assert report.waste is not None
    assert (report.padding.one_length, report.padding.length, report.padding.padded) == ("asked for", 1000, 1024)
    assert (report.waste.packs, report.waste.padded) == (1, 1024)
    short = check("qwen3-30b-a3b", "tp=4,ep=8,etp=1", seq_length=300, pad_to=1000)
    assert short.padding is not None
    assert short.padding.padded == 1000
    long = check("qwen3-30b-a3b", "tp=4,ep=8,etp=1", seq_length=2000, pad_to=1000)
    assert [problem.about for problem in long.problems] == ["padding"]
    assert "length 2000 exceeds the fixed length 1000" in long.problems[0].text
    with pytest.raises(CheckError, match="pad_to=0 must be an integer and at least 1"):
        check("qwen3-30b-a3b", "world=1", pad_to=0)


def test_packs_have_room_for_the_padding_of_each_sample() -> None:
    report = check("qwen3-30b-a3b", "cp=2,ep=8,etp=1", pad_to=64, lengths={5: 20})
    assert report.padding is not None
    assert report.waste is not None
    assert report.padding.plan.sample == 4
    assert (report.waste.packs, report.waste.padded) == (3, 192)  # 8 samples of 8 rows, though 12 of 5 tokens are fewer
