"""AReaL's YAML: the grammar of allocations, what reaches the model, and what does not."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from moeref.check import CheckError, Report
from moeref.check.readers import check_reading, read
from moeref.check.readers.allocation import component
from moeref.check.readers.areal import DEFAULTS, FP8, MOE, RECOMPUTE
from moeref.check.readers.areal_stages import cut
from moeref.config.core import known_fields

YAML = """experiment_name: grpo
seed: 1
rollout: {backend: "sglang:d8t4"}
actor:
  backend: "megatron:(attn:d4t2|ffn:e4)"
  path: Qwen/Qwen3-30B-A3B
  scheduling_spec:
    - {gpu: 1}
  gradient_checkpointing: true
  megatron:
    ddp: {overlap_grad_reduce: false}
    moe_token_dispatcher_type: alltoall
sglang: {model_path: "${actor.path}"}
"""
OTHER = ["actor.megatron.bridge_type=megatron-bridge"]


def areal(tmp_path: Path, *given: str, text: str = YAML) -> Report:
    (tmp_path / "run.yaml").write_text(text)
    return check_reading(read("areal", [str(tmp_path / "run.yaml"), *given], "0.19.2"), verify=False)


def told(report: Report) -> str:
    return "; ".join([*(problem.text for problem in report.problems), *report.notes])


@pytest.mark.parametrize(
    ("text", "backend", "sizes"),
    [
        ("megatron:d4t2p2", "megatron", "tp2 pp2 cp1 ep1 etp1 world16"),
        ("megatron:d4t2p2c2e4", "megatron", "tp2 pp2 cp2 ep4 etp1 world32"),
        ("fsdp:d8", "fsdp", "tp1 pp1 cp1 ep1 etp1 world8"),
        ("megatron:(attn:d1p1t4c2|ffn:d1p1t2e4)", "megatron", "tp4 pp1 cp2 ep4 etp2 world8"),
        ("megatron: (attn: d4p4t2 | ffn: d2p4e4)", "megatron", "tp2 pp4 cp1 ep4 etp1 world32"),
        ("megatron:attn:d4t2|ffn:e8", "megatron", "tp2 pp1 cp1 ep8 etp1 world8"),
        ("sglang:d4t2+megatron:d2t4", "megatron", "tp4 pp1 cp1 ep1 etp1 world8"),
        ("sglang[r]:d2+megatron[actor]:d4|fsdp[critic]:d4", "megatron", "tp1 pp1 cp1 ep1 etp1 world4"),
        ("sglang:d4+megatron:(attn:d4t2|ffn:e8)", "megatron", "tp2 pp1 cp1 ep8 etp1 world8"),
    ],
)
def test_an_allocation(text: str, backend: str, sizes: str) -> None:
    found = component(text)
    assert found[0] == backend
    assert " ".join(f"{axis}{size}" for axis, size in sorted(found[1].items(), key=_order)) == sizes


def _order(pair: tuple[str, int]) -> int:
    return ("tp", "pp", "cp", "ep", "etp", "world").index(pair[0])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("d4t2", "'d4t2' is no backend:sizes"),
        ("megatron:d0", "is no backend:sizes"),
        ("megatron:x4", "is no backend:sizes"),
        ("megatron.d4", "is no backend:sizes"),
        ("megatron:d4+", "'a missing component' is no backend:sizes"),
        ("deepspeed:d4", "deepspeed is none of fsdp, megatron, archon"),
        ("sglang:d4", "has 0 trainers"),
        ("megatron:d4+fsdp:d4", "has 2 trainers and not one of them is named actor"),
        ("megatron:(attn:d2p2|ffn:p4)", "2 stages of attn and 4 of ffn"),
        ("megatron:(attn:d2t2|ffn:e8)", "4 ranks of attn do not divide by e·t·p = 8 of ffn"),
        ("megatron:(attn:d8|ffn:d4e4)", "8 ranks of attn and 16 of ffn"),
    ],
)
def test_no_allocation(text: str, says: str) -> None:
    with pytest.raises(CheckError, match=r".") as error:
        component(text)
    assert says in str(error.value)


def test_end_to_end(tmp_path: Path) -> None:
    report = areal(tmp_path)
    assert report.verdict == "works", told(report)
    assert report.layout == "tp=2,pp=1,vpp=1,ep=4,etp=1,cp=1,world=8"
    sources = {name: value.source for name, value in report.read.items()}
    assert (sources["tp"], sources["recompute_granularity"]) == ("run.yaml:5", "default of AReaL")
    assert "seed" not in report.read
    assert report.settings is not None
    assert report.settings["sequence_parallel"] is True
    assert report.training.use_distributed_optimizer


@pytest.mark.parametrize(
    ("given", "verdict", "says"),
    [
        ([*OTHER, "actor.megatron.moe_token_dispatcher_type=flex"], "works", "flex (command line) does not reach the"),
        ([*OTHER, "actor.megatron.moe_router_dtype=fp32"], "works", "the model, which has moe_router_dtype=None"),
        ([*OTHER, "actor.megatron.moe_enable_deepep=true"], "works", "moe_enable_deepep True (command line) does not"),
        (["actor.megatron.moe_enable_deepep=true"], "refused", "moe_enable_deepep"),  # of alltoall
        (["actor.megatron.moe_z_loss_coeff=${oc.env:Z}"], "unknown", "moe_z_loss_coeff ${oc.env:Z} (command line)"),
        ([*OTHER, "actor.megatron.enable_mtp=true"], "refused", "says no MTP layers, and AReaL raises ValueError"),
        ([*OTHER, "actor.megatron.enable_mtp=${oc.env:MTP}"], "unknown", "enable_mtp ${oc.env:MTP} (command line)"),
        (["actor.megatron.moe_router_dtyp=fp32"], "unknown", "moe_router_dtyp fp32 (command line) is not known"),
        (["actors.path=x"], "unknown", "actors.path x (command line) is not known"),
        (["actor.backend=megatron:d2t4p2"], "works", ""),
        (
            ["actor.backend=megatron:(attn:d8t8p4|ffn:e64)", "actor.path=deepseek-ai/DeepSeek-V3"],
            "unknown",
            "without a place for the MTP layers of deepseek_v3",
        ),
        (
            ["actor.backend=megatron:p5", "actor.megatron.bridge_type=megatron-bridge"],
            "refused",
            "48 layers",
        ),
        (
            ["actor.backend=megatron:d8", "actor.megatron.virtual_pipeline_parallel_size=2"],
            "refused",
            "at one pipeline",
        ),
        (["actor.backend=megatron:d4e8"], "refused", "is not divisible by"),
        (["actor.use_lora=true"], "refused", "adapters, which AReaL refuses with actor.megatron.bridge_type=mbridge"),
        (["actor.use_lora=true", "actor.megatron.bridge_type=megatron-bridge"], "unknown", "adapters"),
        (["actor.enable_tree_training=true"], "unknown", "attention over trees of its own"),
        (["actor.megatron.bridge_type=megatron-bridge", "actor.enable_tree_training=true"], "refused", "AReaL refuses"),
        (["actor.optimizer.type=muon"], "refused", "AReaL asserts adam, sgd or adam_bf16"),
        (["actor.optimizer.type=sgd"], "works", "memory counts the states of Adam"),
        (["actor.megatron.fp8_config.recipe=blockwise"], "refused", "since the files of the model are not in FP8"),
        (["actor.is_critic=true"], "unknown", "a head of its own"),
        (["actor.megatron.use_deterministic_algorithms=true"], "works", ""),
    ],
)
def test_what_reaches_the_model(tmp_path: Path, given: list[str], verdict: str, says: str) -> None:
    report = areal(tmp_path, *given)
    assert report.verdict == verdict, told(report)
    assert says in told(report)


def test_stages_even_out_an_estimate(tmp_path: Path) -> None:
    """Qwen3-235B has 94 layers, which no even cut has in 12 stages."""
    report = areal(tmp_path, "actor.backend=megatron:(attn:t4p12|ffn:e4)", "actor.path=Qwen/Qwen3-235B-A22B")
    assert report.verdict == "works", told(report)
    lengths = [len(stage.layers) for stage in report.stages]
    assert (sum(lengths), len(lengths)) == (94, 12)
    assert max(lengths) == 8


def test_the_largest_stage_is_least() -> None:
    """Against all cuts, also with end stages that have no layers, and weights that differ."""
    rng = random.Random(0)
    for _ in range(60):
        weights = [rng.randint(1, 4) for _ in range(rng.randint(3, 7))]
        end, stages = rng.randint(1, 6), rng.randint(2, 4)

        def largest(lengths: list[int], weights: list[int] = weights, end: int = end, stages: int = stages) -> int:
            ends = [sum(lengths[: stage + 1]) for stage in range(stages)]
            parts = [sum(weights[at - n : at]) for at, n in zip(ends, lengths, strict=True)]
            return max(part + end * (stage in (0, stages - 1)) for stage, part in enumerate(parts))

        every = [
            list(lengths)
            for lengths in itertools.product(range(len(weights) + 1), repeat=stages)
            if sum(lengths) == len(weights) and all(lengths[1:-1])
        ]
        found = cut(weights, end, stages)
        assert found in every
        assert largest(found) == min(map(largest, every))


def test_an_older_file_has_one_text_for_all(tmp_path: Path) -> None:
    text = (
        YAML.replace('  backend: "megatron:(attn:d4t2|ffn:e4)"\n', "") + "allocation_mode: sglang:d2+megatron:d4t2e8\n"
    )
    report = areal(tmp_path, text=text)
    assert report.verdict == "unknown"
    assert report.layout == "tp=2,pp=1,vpp=1,ep=8,etp=1,cp=1,world=8"
    assert "allocation_mode (run.yaml:13) is read by AReaL's older launchers only" in told(report)


def test_recomputation_depends_on_the_bridge(tmp_path: Path) -> None:
    for bridge, checkpointing, granularity in (
        ("mbridge", "true", "full"),
        ("mbridge", "false", None),
        ("megatron-bridge", "false", "full"),
    ):
        report = areal(
            tmp_path, f"actor.megatron.bridge_type={bridge}", f"actor.gradient_checkpointing={checkpointing}"
        )
        assert report.verdict == "works", told(report)
        assert report.read["recompute_granularity"].value == granularity


def test_adam_in_bf16(tmp_path: Path) -> None:
    found = areal(tmp_path, "actor.optimizer.type=adam_bf16").training
    assert (found.use_precision_aware_optimizer, found.exp_avg_dtype, found.main_params_dtype) == (True, "bf16", "fp32")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["actor.backend=fsdp:d8"], "actor.backend fsdp:d8: moeref knows Megatron only"),
        (["~actor.backend"], "actor.backend is not given"),
        (["actor.dtype=float16"], "moeref knows bfloat16 only"),
        (["actor.megatron.bridge_type=none"], "is none of mbridge, megatron-bridge"),
    ],
)
def test_bad_input(tmp_path: Path, given: list[str], says: str) -> None:
    with pytest.raises(CheckError) as error:
        areal(tmp_path, *given)
    assert says in str(error.value)


def test_mbridge_gets_the_settings_of_experts_and_their_defaults(tmp_path: Path) -> None:
    given = ["moe_token_dispatcher_type=flex", "moe_permute_fusion=true", "moe_router_dtype=fp64"]
    report = areal(tmp_path, *(f"actor.megatron.{each}" for each in given))
    assert report.verdict == "works", told(report)
    assert report.settings is not None
    names = ("moe_token_dispatcher_type", "moe_permute_fusion", "moe_router_dtype", "moe_router_bias_update_rate")
    assert [report.settings[name] for name in names] == ["flex", True, "fp64", 0.0]
    assert report.read["moe_router_bias_update_rate"].source == "default of AReaL"


def test_a_script_with_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "run.sh").write_text(
        "python3 examples/math/gsm8k_rl.py --config run.yaml actor.backend=megatron:d4t4e8\n"
    )
    files = [str(tmp_path / name) for name in ("run.yaml", "run.sh")]
    report = check_reading(read("areal", files, "0.19.2"), verify=False)
    assert report.layout == "tp=4,pp=1,vpp=1,ep=8,etp=1,cp=1,world=16"


def test_the_tables_name_fields_of_megatron() -> None:
    fields = known_fields("0.19.2").keys()
    assert not {*RECOMPUTE, *(field for field, _ in FP8.values())} - fields
    assert not {*MOE} - fields - {"moe_enable_deepep"}
    assert all(path.startswith("actor.") for path in DEFAULTS)


@pytest.mark.parametrize("name", ["behave_imp_weight_cap", "behave_imp_weight_mode"])
def test_what_areal_has_removed_is_refused(tmp_path: Path, name: str) -> None:
    report = areal(tmp_path, f"actor.{name}=5.0")
    assert report.verdict == "refused"
    assert f"actor.{name} (command line) is removed: AReaL raises ValueError" in told(report)
