"""What a run costs: arithmetic by hand, and how it turns the verdict. tests/upstream compares with megatron-core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeref import families
from moeref.bridge import ShardMap
from moeref.check import CheckError, Report, check
from moeref.cli import main
from moeref.config import MoEConfig
from moeref.costs import GIB, CostError, Shape, Training, dispatch_bytes, states, waste
from moeref.dispatcher import padding
from moeref.layout import Layout

QWEN, LAYOUT = "qwen3-30b-a3b", "tp=2,ep=8,etp=1,world=16"


def judged(layout: str = LAYOUT, **more: Any) -> Report:
    return check(QWEN, layout, verify=False, **more)


@pytest.mark.parametrize(
    ("training", "each"),
    [
        ({"use_distributed_optimizer": False}, (2, 4, 12, 0)),
        ({"use_distributed_optimizer": False, "grad_reduce_in_fp32": False}, (2, 2, 12, 4)),
        ({}, (2, 4, 12 / 4, 0)),
        ({"use_precision_aware_optimizer": True, "grad_reduce_in_fp32": False}, (2, 2, 10 / 4, 0)),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "torch.bfloat16"},
            (2, 4, 6 / 4, 0),
        ),
        ({"use_precision_aware_optimizer": True, "store_param_remainders": False}, (2, 4, 12 / 4, 0)),
        ({"trains": False}, (2, 0, 0, 0)),
    ],
)
def test_bytes_of_a_parameter(training: dict[str, Any], each: tuple[float, ...]) -> None:
    """Over 4 replicas: the 18 and 6 + 12/DP bytes of Megatron-LM's documentation, and what changes them."""
    model = families.read({**models.CONFIGS["qwen3_moe"], "vocab_size": 128_000}, "bfloat16")
    layout = Layout(world=4)
    shards = [s for s in ShardMap(model, layout).local_shards(0) if s.local_name == "output_layer.weight"]
    elements = 128_000 * model.hidden
    found = states(shards, layout, Training(**training))
    expected = [elements * one for one in each]
    assert [found.weights, found.gradients, found.optimizer, found.step] == expected


def test_experts_are_cut_over_their_own_replicas() -> None:
    """ep=4 on 8 ranks: 8 replicas of dense parameters, 2 of an expert."""
    model, layout = families.read(models.CONFIGS["qwen3_moe"], "bfloat16"), Layout(ep=4, world=8)
    shards = ShardMap(model, layout).local_shards(0)
    dense, experts = ([s for s in shards if (s.param.expert is None) == kind] for kind in (True, False))
    for held, replicas in ((dense, 8), (experts, 2)):
        found = states(held, layout, Training())
        assert found.optimizer * replicas == 12 * found.weights / 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"exp_avg_dtype": "bf16"}, "needs use_precision_aware_optimizer"),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": False}, "needs use_distributed"),
        ({"main_params_dtype": "bf16", "use_precision_aware_optimizer": True}, "none of fp32, fp16"),
        ({"micro_batch_size": 0}, "at least 1"),
        ({"trains": "yes"}, "neither true nor false"),
        ({"use_distributed_optimiser": True}, "did you mean use_distributed_optimizer"),
    ],
)
def test_training_that_means_nothing_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(CostError, match=says):
        Training.from_mapping(values)
    with pytest.raises(CheckError, match=says):
        judged(training=values)


@pytest.mark.parametrize("hbm", [0, -1, float("nan"), True, "80"])
def test_a_budget_is_a_number(hbm: Any) -> None:
    with pytest.raises(CheckError, match="hbm"):
        judged(hbm=hbm)


def test_a_rank_that_does_not_fit_is_refused_with_its_stage_and_what_to_change() -> None:
    whole = judged(hbm=1000)
    assert whole.works
    peak = max(found.peak for found in whole.memory.values())
    assert judged(hbm=peak / GIB).works
    report = judged(hbm=peak / GIB - 0.01)
    (problem,) = report.problems
    assert (report.verdict, problem.about) == ("refused", "memory")
    assert "pp 0" in problem.text
    assert "grad_reduce_in_fp32=false" in problem.fix
    assert report.record is None
    for change in problem.fix.split(";")[0].removesuffix(" is enough").split(" or "):
        name, _, value = change.partition("=")
        assert judged(hbm=peak / GIB - 0.01, training={name: json.loads(value)}).works


def test_kimi_k2_on_8_ranks_does_not_fit() -> None:
    assert check("kimi-k2", "tp=8,ep=8,etp=1", hbm=141, verify=False).verdict == "refused"


def test_the_command_line_and_a_run_file_say_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"model": QWEN, "layout": LAYOUT, "policy": {}, "reference": {}, "hbm": 40}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert main(["check", str(path), "--no-verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    policy, reference = (found[name]["memory_bytes"]["pp0"] for name in ("policy", "reference"))
    assert reference["peak"] == reference["weights"] == policy["weights"]
    assert found["policy"]["problems"][0]["about"] == "memory"
    assert found["reference"]["works"]
    assert main(["check", str(path), "--no-verify", "--hbm", "1000", "--train", "grad_reduce_in_fp32=false"]) == 0
    page = capsys.readouterr().out
    assert "distributed optimizer" in page
    assert "more during its step" in page


def test_activations_follow_length_recompute_and_pipeline() -> None:
    def of(layout: str = "pp=4,ep=8,world=32", **settings: Any) -> list[int]:
        asked = MoEConfig(transformer_config_kwargs=settings)
        report = check(QWEN, layout, asked=asked, seq_length=4096, verify=False)
        return [found.activations or 0 for found in report.memory.values()]

    kept = of()
    assert kept[0] > kept[1] > kept[2]  # 4, 3 and 2 microbatches in flight
    full = of(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert all(less < more for less, more in zip(full, kept, strict=True))
    moe = of(recompute_granularity="selective", recompute_modules=["moe"])
    assert full[0] < moe[0] < kept[0]
    batch = check(QWEN, "pp=4,ep=8,world=32", seq_length=4096, training={"global_batch_size": 8}, verify=False)
    assert (batch.memory[0].activations or 0) < kept[0] / 3  # one microbatch


def test_a_model_whose_activations_are_not_counted_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("qwen3-next-80b-a3b", "ep=8", seq_length=4096, verify=False).memory[0].activations is None
    main(["check", "qwen3-next-80b-a3b", "--layout", "ep=8", "--seq-length", "4096", "--no-verify"])
    assert "without activations" in capsys.readouterr().out


def test_recompute_is_offered_where_it_is_enough() -> None:
    report = judged(seq_length=65_536, hbm=80)
    assert "recompute_granularity=full" in report.problems[0].fix
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert judged(seq_length=65_536, hbm=80, asked=MoEConfig(transformer_config_kwargs=full)).works


def test_replay_keeps_the_routes_of_what_is_in_flight() -> None:
    (found,) = judged(seq_length=8192, replay="R3").memory.values()
    assert found.routes == 4 * 48 * 8 * 8192 // 2  # int32, layers, top-k, rows of one of two TP ranks


@pytest.mark.parametrize(
    ("layout", "training", "says"),
    [
        ("world=8", {"global_batch_size": 12}, "micro_batch_size·dp = 1·8"),
        ("tp=2,etp=2,world=8", {"global_batch_size": 12, "micro_batch_size": 2}, "micro_batch_size·dp = 2·4"),
        ("pp=4,vpp=2,world=8", {"global_batch_size": 12}, "6 microbatches are no multiple of pp=4"),
        ("pp=4,vpp=2,world=8", {"global_batch_size": 16}, None),
        ("pp=4,world=8", {"global_batch_size": 12}, None),
    ],
)
def test_a_batch_divides_over_replicas_and_stages(layout: str, training: dict[str, Any], says: str | None) -> None:
    report = judged(layout, training=training)
    if says is None:
        assert report.works
        return
    (problem,) = report.problems
    assert (problem.about, report.record) == ("batch", None)
    assert says in problem.text
    multiple = int(problem.fix.split()[-1])
    assert judged(layout, training={**training, "global_batch_size": multiple}).works


def test_groups_across_nodes_are_those_with_ranks_on_two() -> None:
    found = judged("tp=4,ep=16,etp=1,world=32", gpus_per_node=8).nodes
    assert {kind: (one.size, one.groups, one.across) for kind, one in found.items()} == {
        "tp": (4, 8, 0),
        "ep": (16, 2, 2),
        "dp-cp": (8, 4, 4),
        "edp": (2, 16, 16),
    }
    with pytest.raises(CheckError, match="gpus_per_node"):
        judged(gpus_per_node=0)


def rows_sent(routes: np.ndarray[Any, Any], experts: int, ep: int) -> tuple[int, int]:
    """(rows to other ranks once for each expert, once for each rank) from rank 0, row by row."""
    ranks = [[expert // (experts // ep) for expert in row] for row in routes]
    return sum(rank != 0 for row in ranks for rank in row), sum(len(set(row) - {0}) for row in ranks)


def test_bytes_of_a_dispatch_are_those_of_random_balanced_routes() -> None:
    model, layout = families.read(families.known(QWEN)), Layout(ep=8, world=8)
    shape = Shape(model=model, layout=layout, tokens=4000)
    rng = np.random.default_rng(1)
    routes = rng.random((4000, model.experts)).argpartition(model.top_k, axis=1)[:, : model.top_k]
    by_expert, by_rank = rows_sent(routes, model.experts, 8)
    row = 2 * model.hidden
    assert dispatch_bytes(shape, "alltoall") == pytest.approx(by_expert * row, rel=0.01)
    assert dispatch_bytes(shape, "flex-deepep") == pytest.approx(by_rank * row, rel=0.01)
    assert dispatch_bytes(shape, "allgather") == 4000 * 7 * row


def test_padding_wastes_what_the_plan_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tp=2, cp=2, etp=1, world=4)
    made = padding.plan(layout)
    found = waste(made, {5: 3, 100: 1}, None)
    rows = [made.pack([length]).total for length in (5, 5, 5, 100)]
    assert (found.samples, found.packs, found.tokens, found.padded) == (4, 4, 115, sum(rows))
    packed = waste(made, {7: 9, 50: 2}, 100)
    assert (packed.packs, packed.padded) == (2, made.pack([50, 50]).total + made.pack([7] * 9).total)
    with pytest.raises(CostError, match="does not fit"):
        waste(made, {101: 1}, 100)
    file = tmp_path / "lengths.txt"
    file.write_text("100\n200 30\n")
    arguments = ["check", QWEN, "--layout", "tp=2,ep=2,etp=1", "--no-verify", "--seq-length", "1000"]
    assert main([*arguments, "--lengths", str(file), "--gpus-per-node", "8"]) == 0
    page = capsys.readouterr().out
    assert "31 samples in 7 sequences" in page
    assert "each inside one node" in page
    file.write_text("100\n-3\n")
    assert main([*arguments, "--lengths", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


@given(lengths=st.dictionaries(st.integers(1, 100), st.integers(1, 20), min_size=1), budget=st.integers(100, 300))
def test_every_sample_is_packed_once_and_no_pack_is_over_the_budget(lengths: dict[int, int], budget: int) -> None:
    found = waste(padding.plan(Layout()), lengths, budget)
    assert found.padded == found.tokens == sum(length * number for length, number in lengths.items())
    assert -(-found.tokens // budget) <= found.packs <= 2 * -(-found.tokens // budget) + 1
