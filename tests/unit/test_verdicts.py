"""The three verdicts of the preflight: it works, Megatron or a rule refuses it, or nothing here can tell."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moeref.check import Report, UnmappedError, ask_megatron, check
from moeref.cli import main
from moeref.config import MoEConfig
from moeref.families import known

QWEN = "qwen3-30b-a3b"


def judged(settings: dict[str, Any], layout: str = "tp=2,ep=8,etp=1", **more: Any) -> Report:
    return check(QWEN, layout, asked=MoEConfig(transformer_config_kwargs=settings), **{"verify": False, **more})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"recompute_granularity": "full"}, "full-recompute-needs-method"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "selective-recompute-has-no-layers"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mpl"]}, "recompute-modules-are-known"),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "moe-act-needs-grouped"),
        ({"moe_router_group_topk": 2}, "router-groups-divide"),
        ({"moe_router_group_topk": 2, "moe_router_num_groups": 7}, "router-groups-divide"),
        ({"fp8_param": True}, "fp8-param-needs-fp8"),
        ({"overlap_moe_expert_parallel_comm": True, "moe_shared_expert_overlap": True}, "ep-overlap-is-one"),
        ({"delay_wgrad_compute": True}, "delayed-wgrad-needs-ep-overlap"),
        ({"fine_grained_activation_offloading": True}, "offloading-needs-modules"),
        ({"moe_router_load_balancing_type": "aux_los"}, "balancing-is-known"),
        ({"moe_layer_recompute": True, "recompute_modules": ["mpl"]}, "recompute-modules-are-known"),
        (
            {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": False},
            "layer-scaling-has-fp32-softmax",
        ),
    ],
)
def test_what_megatron_refuses_is_refused_by_a_rule(settings: dict[str, Any], rule: str) -> None:
    report = judged(settings)
    assert report.verdict == "refused"
    assert any(f"[{rule}]" in problem.text + problem.fix for problem in report.problems), report.problems
    assert all(problem.fix for problem in report.problems)


@pytest.mark.parametrize("module", ["gdn_norm_out", "mla_up_proj", "moe_act"])
def test_megatron_looks_at_modules_only_where_selective_recomputation_is_asked_for(module: str) -> None:
    assert judged({"moe_layer_recompute": True, "recompute_modules": [module]}).verdict == "works"
    assert judged({"recompute_granularity": "selective", "recompute_modules": [module]}).verdict == "refused"


@pytest.mark.parametrize(
    ("model", "settings", "layout", "rule"),
    [
        (QWEN, {"overlap_moe_expert_parallel_comm": True}, "pp=2,ep=8,etp=1", "ep-overlap-needs-vpp"),
        ("glm-4.7-flash", {"apply_rope_fusion": True}, "ep=8", "rope-fusion-of-mla-needs-yarn"),
    ],
)
def test_a_rule_may_depend_on_layout_and_model(model: str, settings: dict[str, Any], layout: str, rule: str) -> None:
    asked = MoEConfig(transformer_config_kwargs=settings)
    report = check(model, layout, asked=asked, verify=False)
    assert any(f"[{rule}]" in problem.fix for problem in report.problems), report.problems


def test_more_ranks_than_kv_groups_work_where_megatron_computes_them() -> None:
    """Qwen3-30B has 4 groups, Qwen3-Next 2; megatron-core 0.16 cuts the heads of gated attention, not their gates."""
    assert check(QWEN, "tp=8,etp=1,ep=8", verify=False).verdict == "works"
    assert check(QWEN, "tp=32,etp=1,ep=32", verify=False).verdict == "works"
    gated = "qwen3-next-80b-a3b", "tp=4,etp=1,ep=4"
    assert check(*gated, verify=False).verdict == "works"
    refused = check(*gated, core="0.16", verify=False)
    assert "[gated-attention-cuts-groups-from-0.19]" in refused.problems[0].text + refused.problems[0].fix


def test_gated_delta_nets_under_cp_work_where_megatron_computes_them() -> None:
    """Qwen3-Next has 16 key heads; megatron-core 0.16 exchanges nothing between CP ranks."""
    net = "qwen3-next-80b-a3b"
    assert check(net, "cp=2,ep=8", verify=False).verdict == "works"
    for layout, core, rule in (
        ("cp=2,ep=2", "0.16", "gated-delta-under-cp-from-0.19"),
        ("cp=32,ep=32", "0.19", "gated-delta-heads-divide-over-cp"),
    ):
        refused = check(net, layout, core=core, verify=False)
        assert refused.verdict == "refused"
        assert any(f"[{rule}]" in problem.text + problem.fix for problem in refused.problems)


def test_sparse_attention_works_where_megatron_computes_it() -> None:
    """Of GLM-5.2's 78 layers, counted from 0, the first three have an indexer, and then each fourth: 6, 10, …"""
    uneven = "tp=8,pp=4,ep=32,etp=1,first=18,world=512"
    for model in ("glm-5", "glm-5.2"):
        assert check(model, uneven, verify=False).verdict == "works"
    assert check("glm-5", "tp=8,pp=6,ep=32,etp=1,world=768", verify=False).verdict == "works"
    for model, layout, core, asked, rule in (
        ("glm-5.2", "tp=8,pp=6,ep=32,etp=1,world=768", "0.19", {}, "stages-begin-with-an-indexer"),
        ("glm-5", "cp=2,ep=64", "0.19", {"cp_comm_type": "p2p"}, "dsa-under-cp-by-all-gather"),
        ("deepseek-v3.2", "ep=64", "0.19", {"apply_rope_fusion": True}, "dsa-without-rope-fusion"),
    ):
        refused = check(model, layout, core=core, asked=MoEConfig(transformer_config_kwargs=asked), verify=False)
        assert refused.verdict == "refused"
        assert any(f"[{rule}]" in problem.text + problem.fix for problem in refused.problems), refused.problems
    for kind in ({}, {"cp_comm_type": "allgather"}):
        asked = MoEConfig(transformer_config_kwargs=kind)
        assert check("glm-5", "cp=2,ep=64", asked=asked, verify=False).verdict == "works"
    older = check("glm-5", uneven, core="0.16", verify=False)
    assert older.verdict == "refused"
    assert "has no dsa_indexer_k_norm_epsilon, which glm_moe_dsa needs" in str(older.problems)


@pytest.mark.parametrize(
    ("layout", "asked", "rule"),
    [
        ("tp=2,cp=2,ep=4,etp=1", {"cp_comm_type": "a2a"}, ""),
        ("tp=2,cp=2,ep=4,etp=1", {}, "te-sinks-under-cp-by-a2a"),
        ("tp=2,cp=2,ep=4,etp=1", {"cp_comm_type": "all_gather"}, "te-sinks-under-cp-by-a2a"),
        ("tp=2,cp=2,ep=4,etp=1", {"cp_comm_type": "p2p"}, "te-windows-under-cp-by-a2a-or-all-gather"),
        ("tp=4,cp=4,ep=16,etp=1", {"cp_comm_type": "a2a"}, "a2a-deals-heads-over-cp"),
    ],
)
def test_sinks_and_windows_under_cp_work_as_transformer_engine_takes_them(
    layout: str, asked: dict[str, str], rule: str
) -> None:
    """gpt-oss has 8 KV groups: at TP 4 a rank has 2, which all-to-all cannot deal out over 4 CP ranks."""
    report = check("gpt-oss-20b", layout, kernels="te", asked=MoEConfig(transformer_config_kwargs=asked), verify=False)
    assert report.verdict == ("refused" if rule else "works")
    assert any(f"[{rule}]" in problem.text + problem.fix for problem in report.problems) == bool(rule)
    assert check("gpt-oss-20b", layout, kernels="torch", verify=False).verdict == "works"


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"cp_comm_type": "foo"}, "te-cp-kind-is-known"),
        ({"cp_comm_type": "a2a+p2p"}, "hierarchical-cp-has-its-sizes"),
        ({"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}, "hierarchical-cp-has-its-sizes"),
        ({"hierarchical_context_parallel_sizes": [4]}, "hierarchical-cp-has-its-sizes"),
        ({"hierarchical_context_parallel_sizes": "2"}, "hierarchical-cp-has-its-sizes"),
    ],
)
def test_kinds_of_exchange_under_cp_are_transformer_engine_s(asked: dict[str, Any], rule: str) -> None:
    layout = "tp=2,cp=2,ep=4,etp=1"
    report = judged(asked, layout, kernels="te")
    assert report.verdict == "refused"
    assert any(f"[{rule}]" in problem.text + problem.fix for problem in report.problems), report.problems
    right = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [1, 2]}
    assert judged(right, layout, kernels="te").verdict == "unknown"  # no rule covers the sizes
    assert judged({"cp_comm_type": "foo"}, layout).verdict == "works"  # plain modules do not read it


def test_settings_that_rules_cover_work_and_the_report_says_by_what_it_knows() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    report = judged({**full, "moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-3})
    assert (report.verdict, report.verified) == ("works", "the rules of megatron-core 0.19")


def test_what_no_rule_covers_is_not_known_and_named() -> None:
    report = judged({"use_mup": True, "cuda_graph_impl": "local", "moe_router_dtype": "fp32"})
    assert report.verdict == "unknown"
    assert report.record is None
    (problem,) = report.problems
    assert "no rule covers cuda_graph_impl, use_mup" in problem.text or "use_mup, cuda_graph_impl" in problem.text
    assert "moe_router_dtype" not in problem.text
    assert "megatron-core 0.19" in problem.fix


@pytest.mark.parametrize(
    ("answer", "verdict", "says"),
    [
        ({"core": "0.19.2", "refusal": "ValueError: no"}, "refused", "megatron-core 0.19.2 refuses it: ValueError: no"),
        ({"core": "0.19.2", "stand_ins": ("Transformer Engine",)}, "works", "0.19.2's own TransformerConfig, with"),
        ({"unavailable": "megatron-core is not installed"}, "unknown", "megatron-core is not installed"),
    ],
)
def test_megatron_is_asked_about_what_no_rule_covers(
    answer: dict[str, Any], verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(model: Any, settings: Any, core: str) -> ask_megatron.Answer:
        asked.append(core)
        return ask_megatron.Answer(**answer)

    monkeypatch.setattr(sys.modules["moeref.check.verified"], "ask", ask)
    report = judged({"use_mup": True}, verify=None)
    assert (report.verdict, len(asked)) == (verdict, 1)
    assert says in " ".join([report.verified, *(problem.text for problem in report.problems)])
    assert judged({}, verify=None).verdict == "works"
    assert len(asked) == 1  # the rules cover it


def test_a_run_that_is_refused_is_not_to_be_checked_elsewhere() -> None:
    """The refusal is enough: that no rule covers another setting is a note, unless megatron-core is asked for."""
    refused = {"fp8_param": True, "use_mup": True}
    report = judged(refused, verify=None)
    assert [problem.refused for problem in report.problems] == [True]
    note = "no rule covers use_mup; megatron-core is not asked, as the run is refused already"
    assert note in report.notes
    assert [problem.refused for problem in judged(refused, verify=False).problems] == [True, False]


def test_the_installed_megatron_is_asked_on_request() -> None:
    core = importlib.metadata.version("megatron-core")
    assert f"megatron-core {core}'s own TransformerConfig" in judged({}, core=core, verify=True).verified
    refused = judged({"cpu_offloading": True, "cpu_offloading_num_layers": 99}, core=core, verify=True)
    assert [problem.text.partition(": ")[0] for problem in refused.problems] == [f"megatron-core {core} refuses it"]


def test_a_model_that_is_not_mapped_is_not_refused() -> None:
    assert check("gpt-oss-20b", "tp=2,ep=2,etp=2", verify=False).verdict == "refused"
    with pytest.raises(UnmappedError, match="rope type"):
        check(known(QWEN) | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "ep=8")
    with pytest.raises(UnmappedError, match="unknown model_type"):
        check({"model_type": "qwen9"}, "ep=8")


def test_more_mtp_layers_than_files_hold_are_not_refused() -> None:
    asked, two = (MoEConfig(transformer_config_kwargs={"mtp_num_layers": number}) for number in (1, 2))
    report = check("qwen3-next-80b-a3b", "ep=4", asked=two, verify=False)
    assert (report.verdict, report.record) == ("unknown", None)
    assert "qwen3_next's files hold one such layer (mtp.*), and moeref does not map more" in report.problems[0].text
    assert check(QWEN, "ep=4", asked=asked, verify=False).verdict == "refused"  # Qwen3-MoE has none


def test_a_run_of_qwen3_next_has_the_mtp_layer_of_its_files_if_it_says_so() -> None:
    asked = MoEConfig(transformer_config_kwargs={"mtp_num_layers": 1})
    report = check("qwen3-next-80b-a3b", "ep=4", asked=asked, verify=False)
    assert (report.verdict, report.model.mtp_layers, report.model.ignored) == ("works", 1, ())
    assert not [note for note in report.notes if "MTP" in note]
    without = check("qwen3-next-80b-a3b", "ep=4", verify=False)
    assert (without.verdict, without.model.mtp_layers) == ("works", 0)
    assert "1 MTP layers are left out: stages lack them, and loading skips their tensors" in without.notes


def test_each_verdict_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["check", *arguments])
        out, err = capsys.readouterr()
        return code, " ".join((out + err).split())

    assert run(QWEN, "--layout", "ep=8")[0] == 0
    code, said = run(QWEN, "--layout", "ep=8", "--set", "fp8_param=true")
    assert (code, "will not work" in said) == (1, True)
    code, said = run(QWEN, "--layout", "ep=8", "--no-verify", "--set", "use_mup=true", "--json")
    assert (code, json.loads(said)["verdict"]) == (3, "unknown")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen9"}))
    code, said = run(str(config), "--layout", "ep=8")
    assert (code, said.startswith("moeref: not known: unknown model_type")) == (3, True)


@pytest.mark.parametrize("name", ["heterogeneous_block_specs", "use_grouped_gemm_for_shared_expert"])
def test_what_a_config_takes_and_layers_may_refuse_is_not_known(name: str) -> None:
    assert check("glm-4.5", "ep=32", asked=MoEConfig(transformer_config_kwargs={name: True}), verify=False).verdict == (
        "unknown"
    )
