"""Judges: a faultless run has no findings; each way of spoiling it is found by its rule, and told where and what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import MANY, ONE, Run, read_run, write_run
from moeref_conformance.contract import topology
from moeref_conformance.contract.api import FACETS, Claims
from moeref_conformance.contract.exits import RankExit, RunOutcome
from moeref_conformance.contract.findings import Finding, Outcome
from moeref_conformance.contract.records import Observation, RankRecord, rank_dir
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.judges import JUDGES, Case, grouped, judges
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.oracles.expected import Expected
from safetensors.torch import save_file

pytestmark = pytest.mark.cpu
DOWN = "model.layers.2.mlp.experts.13.down_proj.weight"
GATE = "model.layers.2.mlp.experts.13.gate_proj.weight"
DTYPE = "torch.get_default_dtype()"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CLAIMS = Claims(facets=frozenset(FACETS), families=frozenset({MANY.family}), backends=frozenset({MANY.backend}))
FC1 = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Expected, Path, Observation]:
    work = tmp_path_factory.mktemp("runs")
    want = expected(MANY, work)
    one = read_run(ONE, write_run(ONE, want, work / "one"))
    return want, write_run(MANY, want, work / "many"), one


@pytest.fixture
def run(good: tuple[Expected, Path, Observation], tmp_path: Path) -> Run:
    want, folder, one = good
    shutil.copytree(folder, tmp_path / "many")
    return Run(Case(MANY, want, read_run(MANY, tmp_path / "many"), one, CLAIMS), tmp_path / "many")


def judge(run: Run, rule: str) -> tuple[Finding, ...]:
    outcome = JUDGES[rule](run.case)
    assert not outcome.untested
    return outcome.findings


def test_every_rule_has_a_judge() -> None:
    assert set(JUDGES) == set(load_rules())


#: Rules that read what the hand-made records hold.
RECORDED = sorted(r.id for r in load_rules().values() if {*r.facets} <= {"names", "export", "forward"})


@pytest.mark.parametrize("rule", RECORDED)
def test_a_faultless_run_has_no_findings(rule: str, run: Run) -> None:
    exact = rule in ("EXP-002", "EXP-006", "EXP-007", "EXP-009", "EXP-012", "EXP-013", "FWD-001", "FWD-002", "LOD-001")
    assert JUDGES[rule](run.case) == Outcome(met="exact" if exact else "")


@pytest.mark.parametrize("rule", [rule for rule in RECORDED if rule != "RUN-002"])
def test_missing_records_are_findings(rule: str, run: Run) -> None:
    run.case.observation = Observation(MANY, [])
    messages = [f.message for f in judge(run, rule)]
    assert messages
    assert all("no record of step" in m or "no rank lists" in m for m in messages)


def test_all_findings_name_rank_and_coordinates(run: Run) -> None:
    run.tensors(3, "shards", lambda t: t[f"0:{FC1}"].zero_())
    (found,) = judge(run, "LOD-001")
    assert (found.rank, found.coords) == (3, "tp1 pp1 ep1 etp0 dp0")
    assert (found.layer, found.expert, found.local_name) == (3, 11, FC1)
    assert found.hf_name == "model.layers.3.mlp.experts.11.gate_proj.weight"
    assert (found.index, found.diagnosis) == ((0, 0), "all zero")
    assert found.got == "0.0 (0x00000000)"


# Spoiling by name: what is done to the run, the rule that has to see it, and a piece of what it says.


def row(rank: int, local: str, /, **new: Any) -> Callable[[Run], None]:
    def change(rows: list[dict[str, Any]]) -> None:
        next(r for r in rows if r["local"] == local).update(new)

    return lambda run: run.value(rank, "names", change)


def drop_row(rank: int, local: str) -> Callable[[Run], None]:
    return lambda run: run.value(rank, "names", lambda rows: [r for r in rows if r["local"] != local])


def stream(rank: int, step: str, change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Run], None]:
    return lambda run: run.value(rank, step, change)


def tensor(step: str, change: Callable[[dict[str, torch.Tensor]], Any], rank: int = 0) -> Callable[[Run], None]:
    return lambda run: run.tensors(rank, step, change)


def swap(tensors: dict[str, torch.Tensor], a: str, b: str) -> None:
    tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()


def error(rank: int, step: str, message: str | None) -> Callable[[Run], None]:
    def change(events: list[dict[str, Any]]) -> None:
        event = next(e for e in events if e["step"] == step)
        if message is None:
            event["phase"] = "ok"
        else:
            event["error"]["message"] = message

    return lambda run: run.events(rank, change)


def loads_with(rank: int, texts: list[str]) -> Callable[[Run], None]:
    """The rank takes the checkpoint with a tensor too many, and warns."""
    return both(error(rank, "refuse_extra", None), stream(rank, "refuse_extra", lambda _: {"warned": texts}))


def both(*spoil: Callable[[Run], None]) -> Callable[[Run], None]:
    return lambda run: [one(run) for one in spoil] and None


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
SPOILED: dict[str, tuple[str, Callable[[Run], None], str]] = {
    "wrong ep rank": ("TOP-001", stream(1, "topology", lambda v: v.update(ep=0)), "ep rank is 0, expected 1"),
    "wrong ep group": (
        "TOP-001",
        stream(0, "topology", lambda v: v["groups"].update(ep=[0, 2])),
        "ep group is [0, 2], expected [0, 1]",
    ),
    "bias in no table": (
        "NAM-001",
        both(*(drop_row(r, "decoder.layers.1.mlp.router.expert_bias") for r in (0, 1))),
        f"no rank lists {BIAS}",
    ),
    "invented name": (
        "NAM-001",
        row(0, "embedding.word_embeddings.weight", hf=["model.embed.weight"]),
        "model.embed.weight is not in the checkpoint",
    ),
    "rank 1 has another name": ("NAM-002", row(1, QKV, global_name="decoder.layers.0.x"), "belongs to 2 tensors"),
    "rank 1 has other HF names": (
        "NAM-002",
        row(1, QKV, hf=["model.layers.1.self_attn.q_proj.weight"]),
        "on rank 0",
    ),
    "wrong kind on all ranks": (
        "NAM-002",
        both(*(row(r, "decoder.layers.1.mlp.router.weight", hf=["model.norm.weight"]) for r in range(4))),
        "decoder.layers.1.mlp.router.weight is made of",
    ),
    "dtype differs": ("NAM-002", row(1, QKV, dtype="bfloat16"), "bfloat16 here"),
    "stage 1 numbered as stage 0": (
        "NAM-003",
        row(2, "decoder.layers.1.input_layernorm.weight", hf=["model.layers.1.input_layernorm.weight"]),
        "is layer 3, the table says 1",
    ),
    "layer left out": (
        "NAM-003",
        lambda run: run.value(2, "names", lambda rows: [r for r in rows if "layers.1." not in r["local"]]),
        "chunk 0: layer 3 (local 1) is not in the table",
    ),
    "third layer on a stage of two": (
        "NAM-003",
        row(2, "decoder.layers.1.input_layernorm.weight", local="decoder.layers.2.input_layernorm.weight"),
        "has only 2 layers",
    ),
    "local expert number": (
        "NAM-004",
        row(1, FC1, hf=[f"model.layers.1.mlp.experts.3.{x}_proj.weight" for x in ("gate", "up")]),
        "is expert 11 (ep_rank · E/EP + local), the table says 3",
    ),
    "expert left out": ("NAM-004", drop_row(3, FC1), "layer 3: expert 11 is not in the table"),
    "ninth expert of eight": (
        "NAM-004",
        row(3, FC1, local=FC1.replace("experts.3", "experts.8")),
        "has 8 experts, so there is no",
    ),
    "a tensor that Megatron has not": (
        "LOD-001",
        stream(1, "inventory", lambda rows: rows[0].update(local="decoder.layers.0.mlp.extra.weight")),
        "no Megatron module known to the oracle has a tensor decoder.layers.0.mlp.extra.weight",
    ),
    "logits of fewer tokens": (
        "FWD-001",
        tensor("forward", lambda t: t.update(logits=t["logits"][:, :7].clone()), rank=3),
        "logits are torch.float32 [2, 7, 131], transformers torch.float32 [2, 16, 131]",
    ),
    "logits in fp64": (
        "FWD-001",
        tensor("forward", lambda t: t.update(logits=t["logits"].double()), rank=3),
        "logits are torch.float64",
    ),
    "a name twice on a rank": (
        "NAM-002",
        row(0, "decoder.layers.1.pre_mlp_layernorm.weight", global_name="decoder.layers.1.input_layernorm.weight"),
        "decoder.layers.1.input_layernorm.weight is listed twice on this rank",
    ),
    "a row twice": (
        "NAM-005",
        stream(1, "names", lambda rows: rows.append(rows[0])),
        "embedding.word_embeddings.weight is listed twice",
    ),
    "parameter not in the table": ("NAM-005", drop_row(1, QKV), f"parameter {QKV} is not in the table"),
    "unpadded shape": (
        "NAM-005",
        row(0, "embedding.word_embeddings.weight", shape=[65, 40]),
        "is [66, 40], the table says [65, 40]",
    ),
    "rank 0's table for all": ("NAM-005", row(1, QKV, local="decoder.layers.7.x"), "has no tensor decoder.layers.7.x"),
    "unmapped: nothing raised": (
        "NAM-006",
        both(*(error(r, "refuse_parameter", None) for r in range(4))),
        "nothing was raised on any rank",
    ),
    "unmapped buffer: nothing raised": (
        "NAM-009",
        both(*(error(r, "refuse_buffer", None) for r in range(4))),
        "a persistent buffer kit_unmapped.weight was added inside the first chunk, and nothing was raised",
    ),
    "unmapped: not raised on one rank": ("NAM-008", error(2, "refuse_parameter", None), "nothing was raised"),
    "unmapped: not named": ("NAM-008", error(2, "refuse_parameter", "bad model"), "does not name kit_unmapped.weight"),
    "surplus: nothing raised": ("LOD-002", error(3, "refuse_extra", None), "nothing was raised"),
    "surplus: another is warned of": (
        "LOD-002",
        both(*(loads_with(r, ["model.norm.bias is unused"]) for r in range(4))),
        "nothing was raised",
    ),
    "surplus: warned of on one rank, refused on the others": (
        "LOD-002",
        lambda run: loads_with(2, [run.case.expected.extra])(run),  # type: ignore[union-attr]
        "nothing was raised",
    ),
    "missing: nothing raised": (
        "LOD-003",
        both(*(error(r, "refuse_missing", None) for r in range(4))),
        "nothing was raised on any rank",
    ),
    "unlike: nothing raised": (
        "LOD-006",
        both(*(error(r, "refuse_unlike", None) for r in range(4))),
        "in another shape, and nothing was raised on any rank",
    ),
    "missing: not raised on one rank": ("LOD-004", error(1, "refuse_missing", None), "nothing was raised"),
    "missing: not named": ("LOD-004", error(3, "refuse_missing", "KeyError"), "does not name lm_head.weight"),
    "missing: the error names another": (
        "LOD-004",
        both(*(error(r, "refuse_missing", "no model.layers.3.mlp.gate.weight") for r in range(4))),
        "does not name lm_head.weight",
    ),
    "fc1 halves swapped": (
        "LOD-001",
        tensor("shards", lambda t: t[f"0:{FC1}"].copy_(t[f"0:{FC1}"].roll(56, 0)), 3),
        "halves swapped",
    ),
    "neighbour's expert": (
        "LOD-001",
        tensor("shards", lambda t: swap(t, f"0:{FC1}", f"0:{FC1.replace('experts.3', 'experts.5')}"), 3),
        "holds expert 13",
    ),
    "expert of another rank": (
        "LOD-001",
        lambda run: run.tensors(3, "shards", lambda t: t[f"0:{FC1}"].copy_(first_experts(run, 3))),
        "holds expert 3",
    ),
    "expert bias never loaded": (
        "LOD-001",
        tensor("shards", lambda t: t["0:decoder.layers.1.mlp.router.expert_bias"].zero_(), 1),
        "all zero",
    ),
    "shard without a record": ("LOD-001", tensor("shards", lambda t: t.pop(f"0:{QKV}"), 1), f"no record of {QKV}"),
    "buffer missing in the module": (
        "LOD-001",
        stream(1, "inventory", lambda v: [t for t in v if "expert_bias" not in t["local"]]),
        f"no tensor of this rank holds {BIAS}",
    ),
    "padding is NaN": (
        "LOD-005",
        tensor("shards", lambda t: t["0:output_layer.weight"][-1].fill_(float("nan")), 3),
        "40 values of the rows that pad output_layer.weight are NaN",
    ),
    "never sent": ("EXP-001", stream(0, "export", lambda v: [m for m in v if m["name"] != DOWN]), "was never sent"),
    "sent twice": ("EXP-001", stream(0, "export", lambda v: [*v, v[5]]), "was sent 2 times"),
    "sent too much": (
        "EXP-001",
        stream(0, "export", lambda v: [*v, {**v[5], "name": "lm_head.bias"}]),
        "lm_head.bias is not in the checkpoint",
    ),
    "gate and up swapped": (
        "EXP-002",
        tensor("export", lambda t: swap(t, GATE, GATE.replace("gate", "up"))),
        "gate and up swapped",
    ),
    "one bit": ("EXP-002", tensor("export", lambda t: t[DOWN].view(torch.int32)[3, 7].bitwise_xor_(1)), "[3, 7]"),
    "padded rows": (
        "EXP-003",
        tensor("export", lambda t: t.update({"lm_head.weight": torch.cat([t["lm_head.weight"], torch.zeros(1, 40)])})),
        "1 rows of zeros appended",
    ),
    "bias in bf16": (
        "EXP-003",
        tensor("export", lambda t: t.update({BIAS: t[BIAS].bfloat16()})),
        "rounded from float32 to bfloat16",
    ),
    "metadata lies": (
        "EXP-003",
        stream(0, "export", lambda v: v[3].update(dtype="bfloat16")),
        "the metadata says dtype",
    ),
    "another order on rank 2": ("EXP-004", stream(2, "export", lambda v: v[::-1]), "entry 0 of export is"),
    "plan is short": ("EXP-004", stream(3, "plan", lambda v: v[:-1]), "entries in plan"),
    "second stream is another": ("EXP-004", stream(0, "export_changed", lambda v: v[:-2]), "entries in export_changed"),
    "two writers": (
        "EXP-005",
        stream(2, "export", lambda v: [{**m, "materialised": True} for m in v]),
        "full tensors are materialised here too",
    ),
    "other bytes on another receiver": (
        "EXP-009",
        both(
            stream(2, "export", lambda v: [{**m, "materialised": True} for m in v]),
            lambda run: shutil.copy(
                rank_dir(run.folder, 0) / "export.safetensors", rank_dir(run.folder, 2) / "export.safetensors"
            ),
            tensor("export", lambda t: t[DOWN].zero_(), 2),
        ),
        "all zero",
    ),
    "kept alive": (
        "EXP-005",
        stream(0, "export", lambda v: [{**m, "alive": i} for i, m in enumerate(v)]),
        "1 earlier tensors are still alive",
    ),
    "stale": (
        "EXP-006",
        tensor("export_changed", lambda t: t[DOWN].mul_(-2)),
        "stale: the values of before the change",
    ),
    "second stream incomplete": (
        "EXP-006",
        stream(0, "export_changed", lambda v: [m for m in v if m["name"] != BIAS]),
        f"{BIAS} was never sent",
    ),
    "stream of what is as it was incomplete": (
        "EXP-006",
        stream(0, "own", lambda v: v.update(again=[DOWN])),
        "lm_head.weight was never sent",
    ),
    "names depend on the layout": (
        "EXP-007",
        stream(0, "export", lambda v: [m for m in v if m["name"] != DOWN]),
        f"only this export has nothing; only the one-rank export has {DOWN}",
    ),
    "order depends on the layout": ("EXP-010", stream(0, "export", lambda v: v[1:] + v[:1]), "the one-rank export has"),
    "bytes depend on the layout": (
        "EXP-007",
        tensor("export", lambda t: t[DOWN].copy_(torch.cat([t[DOWN][:, 28:], t[DOWN][:, :28]], 1))),
        "TP or ETP shards of dim 1 in the order 1, 0",
    ),
    "aliases": ("EXP-008", stream(0, "own", lambda v: v["changed"].append(f"0:{QKV}")), f"changed {QKV} of chunk 0"),
    "kept and overwritten": (
        "EXP-012",
        stream(0, "kept", lambda v: v["overwritten"].append(DOWN)),
        f"{DOWN} held other values at the end",
    ),
    "left in another dtype": (
        "RUN-004",
        stream(0, "settings", lambda v: v.append(["load", DTYPE, "torch.float32", "torch.bfloat16"])),
        "step load left torch.get_default_dtype() at torch.bfloat16, which was torch.float32",
    ),
    "left in another mode": (
        "EXP-014",
        stream(0, "left", lambda v: v.append(["training mode", "0:decoder"])),
        "changed the training mode of 0:decoder",
    ),
    "left in another mode by an export that broke off": (
        "EXP-014",
        stream(0, "broken_off", lambda v: v.append(["training mode", "0:decoder"])),
        "the export that broke off changed the training mode of 0:decoder",
    ),
    "left in another mode by the second export": (
        "EXP-014",
        stream(0, "kept", lambda v: v["left"].extend(["training mode", f"0:{name}"] for name in ("decoder", "head"))),
        "the second export changed the training mode of 0:decoder and 1 more",
    ),
    "not in the new memory": (
        "EXP-013",
        stream(0, "own", lambda v: v["outdated"].append(DOWN)),
        f"{DOWN} is not what the modules hold",
    ),
    "later tensor": ("EXP-008", stream(0, "own", lambda v: v["later"].append(DOWN)), f"changed {DOWN}"),
    "logits off": ("FWD-001", tensor("forward", lambda t: t["logits"][1, 3, 5].add_(1e-3), 3), "[1, 3, 5]"),
    "logits NaN": (
        "FWD-001",
        tensor("forward", lambda t: t["logits"][1, 3].fill_(float("nan")), 2),
        "131 of 4192 logits",
    ),
    "no logits": ("FWD-001", stream(3, "forward", lambda _: {"has": False}), "no logits on a rank of the last stage"),
    "layout changes logits": (
        "FWD-002",
        tensor("forward", lambda t: t["logits"].mul_(1 + 1e-4), 3),
        "the one-rank run by",
    ),
}


def first_experts(run: Run, layer: int) -> torch.Tensor:
    assert run.case.expected is not None
    names = [f"model.layers.{layer}.mlp.experts.3.{x}_proj.weight" for x in ("gate", "up")]
    return torch.cat([run.case.expected.tensors[n] for n in names])


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled(name: str, run: Run) -> None:
    rule, spoil, text = SPOILED[name]
    spoil(run)
    found = judge(run, rule)
    assert found
    assert any(text in f"{f.message} {f.diagnosis}" for f in found), [(f.message, f.diagnosis) for f in found]


def test_no_parallel_state(run: Run) -> None:
    def forget(events: list[dict[str, Any]]) -> None:
        next(e for e in events if e["step"] == "topology")["value"] = None

    run.events(1, forget)
    assert [f.message for f in judge(run, "TOP-001")] == ["megatron.core.parallel_state is not initialised"]


def test_a_hang_on_bad_input_is_the_refusals_business(run: Run) -> None:
    run.events(1, lambda events: events.__delitem__(slice([e["step"] for e in events].index("refuse_missing"), None)))
    record = rank_dir(run.folder, 1)
    with (record / "events.jsonl").open("a") as file:
        file.write('{"step": "refuse_missing", "phase": "begin", "at": 0.0, "seconds": 0.0}\n')
    hung = [RankExit(r, 0, None, r == 1, "refuse_missing", "", "", finished=r != 1) for r in range(MANY.layout.world)]
    run.case.observation = Observation.read(MANY, run.folder, RunOutcome(tuple(hung), 0.0))
    assert run.case.observation.crashes[0].kind == "hung"
    assert not judge(run, "RUN-001")
    (found,) = judge(run, "LOD-003")
    assert (found.rank, found.message) == (1, "no record of step refuse_missing: it hung in step refuse_missing")


def test_a_rank_that_fails_is_one_finding_and_what_it_left_out_is_untested(run: Run) -> None:
    """Rules that do not require RUN-001 read records that the rank did not come to."""
    run.events(1, lambda events: events.__delitem__(slice([e["step"] for e in events].index("names"), None)))
    with (rank_dir(run.folder, 1) / "events.jsonl").open("a") as file:
        raised = {"step": "names", "phase": "raised", "error": {"type": "ValueError", "message": "x"}}
        file.write(json.dumps({**raised, "at": 0.0, "seconds": 0.0}) + "\n")
    ends = [RankExit(r, 3 * (r == 1), None, False, "", "", "", finished=r != 1) for r in range(MANY.layout.world)]
    run.case.observation = Observation.read(MANY, run.folder, RunOutcome(tuple(ends), 0.0))
    outcomes = {rule: JUDGES[rule](run.case) for rule in RECORDED if "RUN-001" not in load_rules()[rule].requires}
    assert {rule for rule, outcome in outcomes.items() if outcome.findings} == {"RUN-001"}
    untested = {rule: outcome.untested for rule, outcome in outcomes.items() if outcome.untested}
    names = {f"NAM-00{number}" for number in (1, 2, 3, 4, 7)}
    assert {rule: untested[rule] for rule in names} == dict.fromkeys(names, "rank 1 raised in step names")
    # What it did record tells why, where it does.
    run.value(1, "topology", lambda value: value | {"tp": 9})
    assert any("tp rank is 9" in f.message for f in judge(run, "TOP-001"))
    run.value(0, "settings", lambda rows: rows.append(["topology", DTYPE, "torch.float32", "torch.bfloat16"]))
    assert [(f.rank, f.stage) for f in judge(run, "RUN-004")] == [(0, "topology")]


def test_a_rank_that_fails_at_once_has_no_place_in_the_groups(run: Run) -> None:
    run.events(1, lambda events: events.clear())
    ends = [RankExit(r, r == 1, None, False, "open", "", "", finished=r != 1) for r in range(MANY.layout.world)]
    run.case.observation = Observation.read(MANY, run.folder, RunOutcome(tuple(ends), 0.0))
    assert JUDGES["TOP-001"](run.case).untested == "rank 1 died in step open"


def test_a_hang_on_one_bad_input_leaves_the_next_untested(run: Run) -> None:
    run.events(1, lambda events: events.__delitem__(slice([e["step"] for e in events].index("refuse_extra"), None)))
    hung = [RankExit(r, 0, None, r == 1, "refuse_extra", "", "", finished=r != 1) for r in range(MANY.layout.world)]
    run.case.observation = Observation.read(MANY, run.folder, RunOutcome(tuple(hung), 0.0))
    assert judge(run, "LOD-002")
    for rule in ("LOD-003", "LOD-004", "LOD-006"):
        assert JUDGES[rule](run.case).untested == "rank 1 hung in step refuse_extra"
    assert not judge(run, "RUN-001")


def test_what_the_first_export_had_wrong_is_not_told_again(run: Run) -> None:
    for step in ("export", "export_changed"):
        run.tensors(0, step, lambda t: t[DOWN].add_(1))
    assert judge(run, "EXP-002")
    assert "so in the first export" in JUDGES["EXP-006"](run.case).untested
    run.tensors(0, "export_changed", lambda t: t[BIAS].add_(1))
    assert [f.hf_name for f in judge(run, "EXP-006")] == [BIAS]


def test_a_target_that_announces_nothing_is_judged_by_its_streams(run: Run) -> None:
    def none(events: list[dict[str, Any]]) -> None:
        next(e for e in events if (e["step"], e["phase"]) == ("plan", "ok"))["value"] = None

    for rank in range(MANY.layout.world):
        run.events(rank, none)
    outcome = JUDGES["EXP-004"](run.case)
    assert (outcome.findings, outcome.met) == ((), "without a plan: the target claims none")
    run.value(1, "export", lambda rows: rows.reverse())
    assert judge(run, "EXP-004")


def test_an_export_that_nobody_is_given_is_one_finding(run: Run) -> None:
    for rank in range(MANY.layout.world):
        run.value(rank, "export", lambda rows: [{**row, "materialised": False} for row in rows])
    for rule in ("EXP-001", "EXP-005"):
        assert [f.message for f in judge(run, rule)] == ["no rank was given a tensor"], rule


def test_a_list_that_is_too_long_names_what_it_has_more(run: Run) -> None:
    run.value(1, "plan", lambda rows: [*rows, rows[0]])
    (found,) = judge(run, "EXP-004")
    assert found.message == "210 entries in plan, the export of rank 0 has 209: lm_head.weight"


def test_without_an_export_of_one_rank_nothing_is_compared(run: Run) -> None:
    case = run.case
    for rule in ("EXP-007", "EXP-010"):
        assert "no one-rank run" in JUDGES[rule](replace(case, baseline=None)).untested
        assert JUDGES[rule](replace(case, baseline=case.observation)).met == "the one-rank run itself"
        without = Observation(ONE, [])
        assert JUDGES[rule](replace(case, baseline=without)).untested == "the one-rank run exported nothing"


def test_a_tensor_of_another_shape_is_one_finding_and_hides_no_other_tensor(run: Run) -> None:
    padded = torch.zeros(1, 40)
    tensor("export", lambda t: t.update({"lm_head.weight": torch.cat([t["lm_head.weight"], padded])}))(run)
    rows = run.case.expected.tensors["lm_head.weight"].shape[0] + 1  # type: ignore[union-attr]
    announced = lambda v: next(m for m in v if m["name"] == "lm_head.weight").update(shape=[rows, 40])  # noqa: E731
    stream(0, "export", announced)(run)
    assert [f.hf_name for f in judge(run, "EXP-003")] == ["lm_head.weight"]
    assert JUDGES["EXP-002"](run.case).untested == "lm_head.weight: EXP-003"
    tensor("export", lambda t: t[DOWN].zero_())(run)
    assert [f.hf_name for f in judge(run, "EXP-002")] == [DOWN]


def test_where_all_ranks_receive_each_receives_everything(run: Run) -> None:
    assert not judge(run, "EXP-009")
    run.case.claims = replace(CLAIMS, receivers="all")
    (first, *_) = judge(run, "EXP-009")
    assert first.rank == 1
    assert "was never sent" in first.message


def test_where_each_rank_receives_a_share_each_tensor_has_one_rank(run: Run) -> None:
    run.case.claims = replace(CLAIMS, receivers="share")
    held = run.case.observation.ranks[0].tensors("export")  # type: ignore[union-attr]

    def given(of: dict[str, Any]) -> Callable[[list[dict[str, Any]]], None]:
        def change(rows: list[dict[str, Any]]) -> None:
            for row in rows:
                row["materialised"] = row["name"] in of

        return change

    def share(rank: int, names: Sequence[str]) -> None:
        mine = {name: held[name] for name in names}
        save_file(mine, run.case.observation.ranks[rank].dir / "export.safetensors")  # type: ignore[union-attr]
        run.value(rank, "export", given(mine))

    names = sorted(held)
    share(0, names[::2])
    share(1, names[1::2])
    for rule in ("EXP-001", "EXP-002", "EXP-003", "EXP-009"):
        assert not judge(run, rule), rule
    share(1, names[3::2])
    assert [f.hf_name for f in judge(run, "EXP-001")] == [names[1]]
    share(1, [names[0], *names[1::2]])
    assert [f.message for f in judge(run, "EXP-001")] == [f"{names[0]} was sent 2 times"]
    held[names[3]] = held[names[3]] + 1
    share(1, names[1::2])
    assert [f.hf_name for f in judge(run, "EXP-002")] == [names[3]]


def test_a_surplus_tensor_may_be_left_out_with_a_warning(run: Run) -> None:
    for rank in range(MANY.layout.world):
        loads_with(rank, [f"unused: {run.case.expected.extra}"] * (rank == 1))(run)  # type: ignore[union-attr]
    assert not judge(run, "LOD-002")


def test_a_refusal_on_one_rank_is_a_refusal(run: Run) -> None:
    for rank in (0, 1, 3):
        error(rank, "refuse_missing", None)(run)
        error(rank, "refuse_parameter", None)(run)
    assert not judge(run, "LOD-003") + judge(run, "NAM-006")
    assert [f.ranks for f in judge(run, "LOD-004")] == [f.ranks for f in judge(run, "NAM-008")] == [(0, 1, 3)]


def test_ranks_that_are_given_nothing_may_yield_nothing(run: Run) -> None:
    for rank in (0, 1, 2):
        run.value(rank, "export", lambda rows: rows.clear())
        run.value(rank, "export_changed", lambda rows: rows.clear())
    run.value(3, "export", lambda rows: [{**row, "materialised": True} for row in rows])
    assert judge(run, "EXP-004")
    run.case.claims = replace(CLAIMS, non_writers="nothing")
    assert not judge(run, "EXP-004")
    run.value(1, "plan", lambda rows: rows.reverse())
    assert [f.rank for f in judge(run, "EXP-004")] == [1]


def _shared(run: Run) -> None:
    """Each rank is given a fourth of the tensors, and names these alone."""
    run.case.claims = replace(CLAIMS, receivers="share", non_writers="nothing")
    for rank in range(4):
        for step in ("export", "export_changed"):
            run.value(rank, step, lambda rows, first=rank: [{**row, "materialised": True} for row in rows[first::4]])


def test_ranks_may_name_their_share_alone(run: Run) -> None:
    _shared(run)
    rules = ("EXP-001", "EXP-004", "EXP-010")
    assert [rule for rule in rules if judge(run, rule)] == []
    run.value(2, "plan", lambda rows: rows[2::4])
    assert not judge(run, "EXP-004")


@pytest.mark.parametrize(
    ("step", "change", "says"),
    [
        ("plan", lambda rows: rows[::-1], "entry 0 of export is"),
        ("plan", lambda rows: rows[:-1], "neither of this rank's share nor of all of them: "),
        ("plan", lambda rows: rows[1::4][:-1], "neither of this rank's share nor of all of them: "),
        ("export_changed", lambda rows: rows[::-1], "entry 0 of export_changed is"),
        ("export_changed", lambda rows: rows[:-1], "51 entries in export_changed, the export of rank 1 has 52"),
    ],
)
def test_a_share_in_another_order_or_of_other_names(
    run: Run, step: str, change: Callable[[list[dict[str, Any]]], Any], says: str
) -> None:
    _shared(run)
    run.value(1, step, change)
    (found,) = judge(run, "EXP-004")
    assert found.rank == 1
    assert says in found.message


def test_shares_that_lack_or_repeat_a_tensor(run: Run) -> None:
    _shared(run)
    run.value(3, "export", lambda rows: [*rows, rows[0]])
    assert [f.message.partition(" ")[2] for f in judge(run, "EXP-001")] == ["was sent 2 times"]
    run.value(3, "export", lambda rows: rows[1:-1])
    assert [f.message.partition(" ")[2] for f in judge(run, "EXP-001")] == ["was never sent"]
    run.value(2, "export", lambda rows: rows[::-1])
    assert [f.rank for f in judge(run, "EXP-010")] == [2]


def test_ranks_in_another_order_are_right_where_it_is_claimed(
    good: tuple[Expected, Path, Observation], tmp_path: Path
) -> None:
    want, _, one = good
    cell = replace(MANY, layout=replace(MANY.layout, order="tp-cp-ep-pp-dp", world=8))
    observation = read_run(cell, write_run(cell, want, tmp_path / "ordered"))
    case = Case(cell, want, observation, one, CLAIMS)
    assert topology.coords(cell.layout, 2)["pp"] == 1
    assert [rule for rule in RECORDED if JUDGES[rule](case).findings] == []
    case = Case(replace(cell, layout=replace(cell.layout, order="tp-cp-ep-dp-pp")), want, observation, one, CLAIMS)
    assert {"TOP-001", "LOD-001"} <= {rule for rule in RECORDED if JUDGES[rule](case).findings}


def test_crashes_come_in_the_order_of_failure(run: Run) -> None:
    def crash(message: str, at: float) -> Callable[[list[dict[str, Any]]], None]:
        def change(events: list[dict[str, Any]]) -> None:
            del events[7:]
            what = {"type": "RuntimeError", "message": message, "traceback": ""}
            events.append({"step": "export", "phase": "raised", "at": at, "seconds": 0.0, "error": what})

        return change

    run.events(0, crash("connection closed by peer", 9.0))
    run.events(2, crash("shapes differ", 8.0))
    exits = [
        RankExit(0, 3, None, False, "export", "", "tp0"),
        RankExit(1, None, 9, False, "export", "", "tp1", killed=True),
        RankExit(2, 3, None, False, "export", "", "tp0"),
        RankExit(3, None, 9, True, "export", "", "tp1"),
    ]
    run.reread(exits)
    found = judge(run, "RUN-001")
    assert found[0].rank == 2
    assert found[0].coords == "tp0 pp1 ep0 etp0 dp0"
    assert found[0].message == "failed first: raised in step export: RuntimeError: shapes differ"
    assert [f.rank for f in found] == [2, 0, 3, 1]
    assert JUDGES["RUN-002"](run.case).untested.startswith("rank 2 raised in step export")


def test_a_disagreement_in_a_collective(run: Run) -> None:
    def change(events: list[dict[str, Any]]) -> None:
        what = {"type": "CollectiveMismatch", "message": "all_to_all_single: …", "traceback": ""}
        events[7:] = [{"step": "export", "phase": "raised", "at": 1.0, "seconds": 0.0, "error": what}]

    run.events(1, change)
    (found,) = (f for f in judge(run, "RUN-002") if "Mismatch" in f.message)
    assert (found.rank, found.stage) == (1, "export")


def test_a_rank_cut_off_in_the_middle_of_a_line(run: Run) -> None:
    path = rank_dir(run.folder, 1) / "events.jsonl"
    text = path.read_text()
    path.write_text(text[: text.index('{"step": "export"') + 12])
    run.reread()
    record = run.case.observation.ranks[1]  # type: ignore[union-attr]
    assert record.has("plan")
    assert record.last_step == "plan"
    assert any(f.rank == 1 for f in judge(run, "EXP-004"))


def test_tolerance_is_told(run: Run) -> None:
    for rank in (2, 3):
        run.tensors(rank, "forward", lambda t: t["logits"][0, 0, 0].add_(5e-7))
    outcome = JUDGES["FWD-002"](run.case)
    assert not outcome.findings
    assert outcome.met.endswith("≤ 1e-05")
    assert float(outcome.met.split()[0]) < 2e-6


def test_pipeline_alone_is_bitwise(run: Run) -> None:
    run.case.cell = replace(MANY, layout=replace(MANY.layout, tp=1, ep=1, etp=1, world=4))
    run.tensors(3, "forward", lambda t: t["logits"][0, 0, 0].add_(1e-7))
    assert JUDGES["FWD-002"](run.case).findings


def test_on_a_gpu_sums_come_in_any_order(run: Run) -> None:
    pipeline = replace(MANY, backend="nccl", layout=replace(MANY.layout, tp=1, ep=1, etp=1, world=4))
    run.case.cell = pipeline
    run.tensors(3, "forward", lambda t: t["logits"][0, 0, 0].add_(1e-6))
    met = JUDGES["FWD-002"](run.case).met
    assert met.endswith("≤ 1e-05, a limit measured on CPUs")
    run.case.cell = replace(pipeline, dtype="bfloat16")
    assert JUDGES["FWD-002"](run.case).untested
    run.case.cell = pipeline
    run.tensors(3, "forward", lambda t: t["logits"][0, 0, 0].add_(2e-5))
    assert judge(run, "FWD-002")


@pytest.mark.parametrize(
    ("backend", "off", "found"), [("gloo", 0.0, 0), ("gloo", 1e-7, 2), ("nccl", 1e-6, 0), ("nccl", 2e-5, 2)]
)
def test_replayed_logits_are_the_recorded_ones(backend: str, off: float, found: int, run: Run) -> None:
    run.case.cell = replace(MANY, backend=backend, replay="R2")
    for rank in range(MANY.layout.world):
        run.events(rank, lambda events: events.append({"step": "replay", "phase": "ok", "at": 40.0, "seconds": 0.0}))
        logits_BSV = run.case.expected.logits_BSV  # type: ignore[union-attr]
        held = {"record.logits": logits_BSV, "replay.logits": logits_BSV + off} if rank in (2, 3) else {}
        save_file(held, rank_dir(run.folder, rank) / "replay.safetensors")
    run.reread()
    assert len(JUDGES["RPL-005"](run.case).findings) == (found > 0)
    if found:
        assert len(judge(run, "RPL-005")[0].ranks) == found
    run.case.cell = replace(run.case.cell, dtype="bfloat16")
    assert bool(JUDGES["RPL-005"](run.case).untested) == (backend == "nccl")


def test_positions_in_their_own_order_are_no_diagnosis(run: Run) -> None:
    for rank in (2, 3):
        run.tensors(rank, "forward", lambda t: t["logits"][0, 0, 0].add_(2e-5))
    assert {f.diagnosis for f in JUDGES["FWD-002"](run.case).findings} == {"1 of 32 positions differ"}


def test_what_cannot_be_judged_says_why(run: Run) -> None:
    run.case.cell = replace(MANY, dtype="bfloat16")
    for rule in ("FWD-001", "FWD-002"):
        assert "bfloat16" in JUDGES[rule](run.case).untested
        assert JUDGES[rule](run.case).untested.endswith("by RPL-004")
    run.case.baseline = None
    for rule in ("EXP-007", "EXP-010", "FWD-002"):
        assert "no one-rank run" in JUDGES[rule](run.case).untested


def test_names_alone_are_enough_for_the_static_rules(run: Run) -> None:
    ranks = [RankRecord(record.rank, Path()) for record in run.case.observation.ranks]  # type: ignore[union-attr]
    for bare, record in zip(ranks, run.case.observation.ranks, strict=True):  # type: ignore[union-attr]
        bare.events = [event for event in record.events if event["step"] == "names"]
    run.case.observation = Observation(MANY, ranks)
    for rule in ("NAM-001", "NAM-002", "NAM-003", "NAM-004"):
        assert judge(run, rule) == ()


def test_tables_that_ranks_share_are_not_mixed_up(run: Run) -> None:
    from moeref_conformance.judges.common import name_rows, tables

    found = {rank: given.rows for given in tables(run.case) for rank in given.ranks}
    for record in run.case.observation.ranks:  # type: ignore[union-attr]
        assert found[record.rank] == name_rows(record), record.rank


def test_many_findings_are_grouped() -> None:
    found = [Finding("export", f"tensor {i}", diagnosis=f"is expert {i}") for i in range(90)]
    found += [Finding("export", "other", diagnosis="all zero")]
    kept = grouped(found)
    assert [(finding.message, finding.count) for finding in kept] == [("tensor 0", 90), ("other", 1)]
    assert kept[1].diagnosis == "all zero"
    letters = grouped([Finding("a", chr(65 + i)) for i in range(26)])
    assert len(letters) == 20
    assert letters[-1].message == "T … and 6 more of other patterns"


def test_a_finding_says_what_it_stands_for() -> None:
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in (0, 1) for expert in (8, 9)]
    names = [f"{expert}.{part}.weight" for expert in experts for part in ("up", "gate")]
    names += ["model.layers.0.self_attn.q_proj.bias"]
    found = [Finding("hf", f"{name} was never sent", rank=rank, hf_name=name) for rank in (3, 1) for name in names]
    (kept,) = grouped(found)
    assert (kept.message, kept.count, kept.ranks) == (f"{names[0]} was never sent", 18, (1, 3))
    assert kept.kinds == {"gate": 4, "up": 4, "q_proj.bias": 1}
    local = Finding("shards", "x", local_name="decoder.layers.0.mlp.experts.linear_fc1.weight3")
    assert grouped([local, replace(local, rank=1)])[0].kinds == {"linear_fc1": 1}


def test_two_judges_for_one_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="EXP-001 has two judges"):
        judges("EXP-001")(lambda case: Outcome())
