"""The kit is able to fail: every fault turns its rules red and no others, and the good target stays green there.

A fault is asked for the facets that its rules read; `nox -s faults` asks for all.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moeref_conformance import selftest
from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.records import RankRecord
from moeref_conformance.diagnosis.diagnose import UNKNOWN
from moeref_conformance.judges import JUDGES
from moeref_conformance.judges.dispatch import FIELDS
from moeref_conformance.oracles import recipes
from moeref_conformance.oracles.checkpoint import expected
from moeref_conformance.plan.matrix import load
from moeref_conformance.selftest.faults import FAULTS, MODULES, Fault, bugs_of
from moeref_conformance.selftest.faults.base import cell
from moeref_conformance.selftest.faulty import by_tag
from moeref_conformance.selftest.known_bugs import KNOWN_BUGS, NOT_EXPRESSIBLE
from moeref_conformance.steps import gradients
from moeref_conformance.steps.facet import facets
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import NATIVE, RULES, Bench, otherwise, spoiled, without
from tests.kit.shared_world import ONLY, Shared

pytestmark = [pytest.mark.cpu, pytest.mark.ranks]


#: Those of engines are run by tests/rollout/test_kit_facet.py.
HERE = {name: fault for name, fault in FAULTS.items() if fault.cell.backend != ENGINE}
#: Their cells that the good target claims.
GOOD = {fault.cell.id: fault.cell for fault in HERE.values() if not by_tag.claims_in(fault.cell).why_not(fault.cell)}
#: Pairs that touch different things: with both, the rules of each are red.
PAIRS = (
    ("load-without-ep-offset", "plan-in-another-order"),
    ("gate-up-not-rechunked", "one-rank-ends-early"),
    ("bias-rounded-to-bf16", "prefix-of-a-wrapper"),
    ("tied-head-unset", "embedding-sent-twice"),
    ("row-shards-mirrored", "extra-tensor-skipped"),
    ("layers-not-globalised", "embedding-cached"),
)
#: What of a cell is its size, or how it runs.
SHAPE = {"layout", "layout_name", "layers", "tags", "backend"}
#: Faults of cells that no matrix has: the first, as moeref does not claim the loss; the others in smaller cells than
#: those that show them.
UNSHIPPED = {
    *("global-loss-of-megatron", "expert-gradient-lost", "policy-routes-on-the-first-stage"),
    *("mtp-layers-swapped", "expert-twice-let-through"),
}
#: Reports of garbled or missing weights and of confused layouts.
REPORTS = (
    *("SkyRL#1816", "SkyRL#1680", "SkyRL#1345", "SkyRL#1471", "SkyRL#1505", "training-gym#100", "slime#1840"),
    *("slime#2209", "Dressage#1", "verl#7195", "ms-swift#9828", "prime-rl#3543", "Megatron-LM#1584"),
    *(f"Megatron-Bridge#{n}" for n in (4083, 1857, 3414, 4592, 2746, 4694, 1716)),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, shared_world: ForkedWorld, variants: Path) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("faults")
    with (
        Shared(shared_world, "moeref_conformance.selftest.faulty:by_tag", grace=1.0) as world,
        ThreadPoolExecutor(1) as pool,
    ):
        # Both sides import for seconds: the oracle makes its first model while the world starts.
        pool.submit(expected, next(iter(FAULTS.values())).cell, variants)
        world.start()
        yield Bench(world, folder, by_tag, inputs=variants)


def tagged(cell: Cell, *faults: Fault, only: Iterable[str] = ()) -> Cell:
    alone = [f"{ONLY}{'+'.join(sorted(only))}"] if only else []
    return replace(cell, tags=(*(f"fault:{fault.id}" for fault in faults), *alone))


def facets_of(fault: Fault) -> set[str]:
    """The facets of a fault's rules, of those that they require, and what these need.

    None, which means all, if a rule reads none or `ALL_FACETS` is set.
    """
    rules = [RULES[name] for name in (*fault.rules, *fault.also)]
    if any(not rule.facets for rule in rules) or os.environ.get("ALL_FACETS"):
        return set()
    read = {facet for rule in rules for name in (rule.id, *rule.requires) for facet in RULES[name].facets}
    return read.union(*(facet.needs for facet in facets() if facet.name in read))


def _judged(bench: Bench, fault: Fault, only: Iterable[str]) -> dict[str, list[Finding]]:
    """Findings by rule, of those that are red."""
    asked = tagged(fault.cell, fault, only=only)
    outcomes = bench.judge(asked, one_rank=fault.one_rank, deadline=fault.deadline)
    return {rule: outcome.findings for rule, outcome in outcomes.items() if outcome.findings}


def _amiss(fault: Fault, red: dict[str, list[Finding]]) -> list[str]:
    """What is otherwise than the fault says, in the rules that are red or in their findings; nothing if all is so."""
    if red.keys() != {*fault.rules, *fault.also}:
        return [f"{rule}: {findings[0].message}" for rule, findings in red.items()] or ["no rule is red"]
    found = [finding for findings in red.values() for finding in findings]
    if not any(fault.says in f.message for f in found):
        return [f.message for f in found]
    told = any(fault.diagnosis in f.diagnosis for f in found) and UNKNOWN not in {f.diagnosis for f in found}
    return [] if told else [f"{f.message}: {f.diagnosis}" for f in found]


@pytest.mark.parametrize("fault", HERE.values(), ids=HERE)
def test_fault_turns_its_rules_red(bench: Bench, fault: Fault) -> None:
    red = _judged(bench, fault, facets_of(fault))
    if _amiss(fault, red):  # some judges also look at what other facets have on record
        red = _judged(bench, fault, ())
    if os.environ.get("SHOW_FAULTS"):
        for rule, (first, *_) in sorted(red.items()):
            print(f"\n{fault.id}: {rule} {first.message} | {first.diagnosis}")
    assert _amiss(fault, red) == []
    assert fault.diagnosis or not red.keys() & {"LOD-001", "EXP-002"}, "tensors differ: say what is diagnosed"


@pytest.mark.parametrize("cell", GOOD.values(), ids=GOOD)
def test_the_good_target_stays_green(bench: Bench, cell: Cell) -> None:
    outcomes = bench.judge(cell)
    assert {rule: o.findings for rule, o in outcomes.items() if o.findings} == {}
    # A cell that takes no training step says so; in bf16 nothing compares what follows from a router's own choice.
    steps = gradients.asked(cell) or cell.backend == "static" or cell.optimizer_step
    untested = set() if steps else {"GRD-001"}
    if cell.dtype == "bfloat16":
        # Stages compute what the one-rank run computes, bit for bit.
        same = all(size == 1 for size in (cell.layout.tp, cell.layout.ep, cell.layout.expert_tp, cell.layout.cp))
        native = cell.replay == "R3" and cell.batch != "packed"
        judged = {*(["FWD-002"] if same else []), *(["RPL-002"] if native else [])}
        untested |= (NATIVE - judged) & outcomes.keys()
        untested |= {"RPL-008"} if cell.replay == "R2" else set()
        # One microbatch of one replica adds nothing up.
        groups = topology.groups(cell.layout)
        alone = len(topology.replica_rows(cell, 0, recipes.rows(cell)[0])) == cell.rows
        alone = alone and all(len(groups[axis][0]) == 1 for axis in ("dp", "cp", "edp"))
        untested |= {"RPL-010"} if cell.replay == "R3" and alone else set()
    untested |= {rule for rule in outcomes if rule.startswith("LRA-")} if cell.mtp else set()
    assert {rule for rule, o in outcomes.items() if o.untested} == untested


#: Rules that the good target meets in the cell of one of their faults, and of these cells one of the most ranks.
_BY_RANKS = sorted(GOOD.values(), key=lambda cell: cell.layout.world)
MET = {rule: cell for cell in _BY_RANKS for fault in HERE.values() if fault.cell == cell for rule in fault.rules}


@pytest.mark.parametrize("rule", sorted(MET))
def test_a_step_that_is_not_on_record_is_no_pass(bench: Bench, rule: str) -> None:
    case = bench.case(MET[rule])
    assert not JUDGES[rule](case).findings
    assert case.observation is not None
    for step in RULES[rule].steps:
        for rank, record in enumerate(case.observation.ranks):
            if all(event["step"] != step for event in record.events):
                continue
            outcome = JUDGES[rule](without(case, rank, step))
            assert outcome.findings or outcome.untested, f"passes without step {step} of rank {rank}"


def _first_refusal(value: dict[str, Any]) -> None:
    value["refused"][next(iter(value["refused"]))] = "ValueError: no"


def _first_answer(given: str) -> Callable[[dict[str, Any]], None]:
    def change(value: dict[str, Any]) -> None:
        answer = next(answer for answer in value.values() if "given" in answer)
        answer["given"][FIELDS[0]] = given

    return change


def _refused_without_a_name(value: dict[str, Any]) -> None:
    next(answer for answer in value.values() if "refused" in answer)["refused"] = "ValueError: no"


#: By what a record of the good target says instead: rule, step, the change of its value, and what is found.
OTHERWISE: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a refusal that does not say which seed": ("SED-003", "seeds_planned", _first_refusal, "does not name it"),
    "modules without a config": ("CFG-009", "config", lambda value: value.update(held=[]), "no module has a config"),
    "a module of a width that no layer has": (
        "CFG-009",
        "config",
        lambda value: value["held"][-1]["values"].update(ffn_hidden_size=1),
        "has ffn_hidden_size=1, not",
    ),
    "a config without a setting": (
        "CFG-002",
        "config",
        lambda value: value["given"].pop("tensor_model_parallel_size"),
        "says nothing of tensor_model_parallel_size",
    ),
    "a refusal of what is claimed": (
        "CFG-003",
        "config",
        lambda value: value["requests"].update({"grouped experts": {"refused": "moe_grouped_gemm"}}),
        "refused: moe_grouped_gemm",
    ),
    "a refusal that does not say what cannot be had": (
        "CFG-003",
        "config",
        lambda value: value["requests"].update({"deterministic": {"refused": "ValueError: no"}}),
        "refused: ValueError: no",
    ),
    "another dispatcher than was asked for": ("DSP-004", "dispatchers", _first_answer("none"), "is 'none'"),
    "a refusal that does not say which dispatcher": (
        "DSP-005",
        "dispatchers",
        _refused_without_a_name,
        "the refusal does not name",
    ),
    "a matrix of one value": (
        "SED-007",
        "begun",
        lambda rows: rows[0].update(constant=True),
        "one value in all places",
    ),
}


@pytest.mark.parametrize("said", OTHERWISE)
def test_a_record_that_says_otherwise_is_found(bench: Bench, said: str) -> None:
    rule, step, change, says = OTHERWISE[said]
    found = JUDGES[rule](otherwise(bench.case(MET[rule]), step, change)).findings
    assert any(says in finding.message for finding in found), [finding.message for finding in found]


def test_logprobs_on_other_stages_are_judged_too(bench: Bench) -> None:
    case = bench.case(cell("qwen3_moe", "pp2"))
    for rule in ("LGP-001", "LGP-002"):
        assert not JUDGES[rule](case).findings
        found = JUDGES[rule](otherwise(case, "logprobs", lambda value: value.update(has=True))).findings
        assert [finding.rank for finding in found] == [0]


#: Rules that read values alone of steps that have tensors too, what one rank has for all, or padding.
VALUES = (
    *("DSP-009", "EXP-004", "EXP-005", "EXP-008", "EXP-009", "EXP-014", "LGP-005", "LOD-005"),
    *("OPT-003", "OPT-005", "QNT-007"),
)


class _Other(RankRecord):
    """A record that has other tensors of a step: none."""

    def __init__(self, whole: RankRecord, step: str) -> None:
        super().__init__(whole.rank, whole.dir)
        self.step = step

    def tensors(self, step: str) -> dict[str, torch.Tensor]:
        held = super().tensors(step)
        return self.instead(held) if step == self.step else held

    def instead(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}


class Cut(_Other):
    """A record whose tensors of a step lack their last row, but for those that the kit's own hooks saw.

    Recorded logits are as they were: RPL-005 compares others with them.
    """

    def shaped(self, of: torch.Tensor) -> torch.Tensor:
        return of[:-1]

    def instead(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {name for name, of in held.items() if of.dim() and (self.step != "replay" or _GIVEN.search(name))}
        return {name: self.shaped(of) if name in given else of for name, of in held.items()}


_GIVEN = re.compile(r"(?<!record\.)logits|gradients")


class Deeper(Cut):
    """The same, of a shape that broadcasts."""

    def shaped(self, of: torch.Tensor) -> torch.Tensor:
        return of[None]


#: Rules that leave shapes to another one, such as QNT-002, that look for one value in a gradient, or that read what the
#: kit's own hooks saw.
OF_ANY_SHAPE = (
    *("LRA-002", "LRA-005", "QNT-001", "QNT-004", "QNT-006", "QNT-008"),
    *("RPL-001", "RPL-002", "RPL-003", "RPL-006", "RPL-010"),
)

#: Rules that read what the writer received, which is the first rank. Others find it of the last rank that has tensors.
OF_THE_WRITER = {"LRA-006"}


@pytest.mark.parametrize("kind", [Cut, Deeper])
@pytest.mark.parametrize("rule", sorted(MET.keys() - {*VALUES, *OF_ANY_SHAPE}))
def test_tensors_of_another_shape_are_findings(bench: Bench, rule: str, kind: type[Cut]) -> None:
    case = bench.case(MET[rule])
    assert case.observation is not None
    for step in RULES[rule].steps:
        ranks = case.observation.ranks if rule in OF_THE_WRITER else case.observation.ranks[::-1]
        if record := next((record for record in ranks if record.tensors(step)), None):
            other = spoiled(case, record.rank, kind(record, step))
            assert JUDGES[rule](other).findings, f"passes with other tensors of {step}"


def test_a_step_that_one_rank_alone_refuses_is_a_finding(bench: Bench) -> None:
    case = bench.case(cell("qwen3_moe", "pp2", loss_mask=True))
    assert not JUDGES["GRD-003"](case).findings
    alone = otherwise(case, "on_no_token", lambda value: value.clear())  # moeref refuses it on all ranks
    assert "refused a step that other ranks took" in JUDGES["GRD-003"](alone).findings[0].message


class _Surplus(_Other):
    """A record with a gradient of no parameter."""

    def instead(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**held, "0:decoder.layers.0.mlp.nothing.weight": torch.ones(2)}


@pytest.mark.parametrize(("kind", "says"), [(Deeper, "the gradient of"), (_Surplus, "mlp.nothing.weight")])
def test_gradients_are_judged_where_biases_are_updated(bench: Bench, kind: type[_Other], says: str) -> None:
    case = bench.case(cell("glm4_moe", "one", bias_update=True))
    assert case.observation is not None
    assert not JUDGES["GRD-001"](case).findings
    found = JUDGES["GRD-001"](spoiled(case, 0, kind(case.observation.ranks[0], "gradients"))).findings
    assert any(says in finding.message for finding in found)


class _Silent(_Other):
    """A record of a rank that had no logits in a forward between replays."""

    def instead(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: of for name, of in held.items() if name != "native-between.logits"}


def test_a_rank_of_the_last_stage_has_logits_between_replays(bench: Bench) -> None:
    case = bench.case(cell("qwen3_moe", "tp2", replay="R3"))
    assert case.observation is not None
    found = JUDGES["RPL-002"](spoiled(case, 1, _Silent(case.observation.ranks[1], "replay"))).findings
    assert [(f.rank, f.message) for f in found] == [(1, "no logits of native-between on a rank of the last stage")]


@pytest.mark.parametrize("rule", sorted(MET.keys() - {*VALUES}))
def test_tensors_that_are_not_on_record_are_findings(bench: Bench, rule: str) -> None:
    case = bench.case(MET[rule])
    assert case.observation is not None
    for step in RULES[rule].steps:
        for rank, record in enumerate(case.observation.ranks):
            if not record.tensors(step):
                continue
            assert JUDGES[rule](spoiled(case, rank, _Other(record, step))).findings, (
                f"passes without the tensors of step {step} of rank {rank}"
            )


class _Sent(_Other):
    """A record of an optimizer's steps behind which one tensor is sent otherwise, or is not."""

    to: torch.Tensor | None = None

    def instead(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "sent.model.norm.weight"
        assert name in held
        others = {key: of for key, of in held.items() if key != name}
        return others if self.to is None else {**others, name: self.to}


@pytest.mark.parametrize(
    ("to", "says"),
    [(None, "was never sent"), (torch.ones(2), "in another shape"), (torch.ones(40), "is not what is sent")],
)
@pytest.mark.parametrize("step", ["optimizer", "optimizer_resumed"])
def test_what_is_sent_behind_a_step_is_judged(bench: Bench, step: str, to: torch.Tensor | None, says: str) -> None:
    case = bench.case(cell("qwen3_moe", "one", optimizer_step=True))
    assert case.observation is not None
    assert not JUDGES["EXP-006"](case).findings
    other = _Sent(case.observation.ranks[0], step)
    other.to = to
    (found,) = JUDGES["EXP-006"](spoiled(case, 0, other)).findings
    assert says in found.message


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_faults_turn_the_rules_of_both_red(bench: Bench, pair: tuple[str, str]) -> None:
    first, second = (FAULTS[name] for name in pair)
    outcomes = bench.judge(tagged(first.cell, first, second), one_rank=first.one_rank or second.one_rank)
    assert {*first.rules, *second.rules} <= {rule for rule, outcome in outcomes.items() if outcome.findings}


def test_no_two_faults_have_one_id() -> None:
    assert sum(len(module.FAULTS) for module in MODULES) == len(FAULTS)


def test_every_rule_is_turned_red_by_a_fault() -> None:
    assert {rule for fault in FAULTS.values() for rule in fault.rules} == RULES.keys()


def test_rules_name_the_faults_that_turn_them_red() -> None:
    found = {rule: sorted(f.id for f in FAULTS.values() if rule in f.rules) for rule in RULES}
    assert {rule: sorted(r.faults) for rule, r in RULES.items()} == found


def shows(shipped: Cell, needed: Cell) -> bool:
    """Whether a shipped cell asks for all that a fault's cell asks for, and cuts the model over the same axes.

    With more than two parts where the fault has them: of stages some are then neither first nor last.
    """
    asked = {of.name: of.default for of in fields(Cell) if of.name not in {*SHAPE, "family"}}
    same = all(getattr(needed, name) in (plain, getattr(shipped, name)) for name, plain in asked.items())
    wide = ((getattr(needed.layout, axis), getattr(shipped.layout, axis)) for axis in ("tp", "pp", "cp", "ep", "vpp"))
    return same and shipped.family == needed.family and all(other >= min(one, 3) for one, other in wide)


def test_a_shipped_cell_asks_for_what_each_fault_needs() -> None:
    """A fault in a cell that no matrix has alike would prove what no user's run judges."""
    cells = [one for name in ("cpu", "gpu", "rollout", "static", "peers") for one in load(name).cells]
    assert {name for name, fault in FAULTS.items() if not any(shows(one, fault.cell) for one in cells)} == UNSHIPPED


def test_every_known_bug_is_a_fault_or_told_why_not() -> None:
    known = {*KNOWN_BUGS, *REPORTS}
    brought_back = {name for fault in FAULTS.values() for name in bugs_of(fault)}
    assert known <= brought_back | NOT_EXPRESSIBLE.keys()
    assert not brought_back & NOT_EXPRESSIBLE.keys()


#: All that the kit's own proof may import of the good target.
GOOD_TARGET = ("moeref_conformance.targets.moeref", {"MoerefTarget"})


def inside(source: str) -> list[str]:
    """What a module of `selftest` imports, names or reads of a target's inside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if f"{alias.name}.".startswith(("moeref.", GOOD_TARGET[0]))]
            case ast.ImportFrom(module=str(module), names=names) if f"{module}.".startswith("moeref."):
                found += [f"{module}.{alias.name}" for alias in names]
            case ast.ImportFrom(module="moeref_conformance.targets", names=names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names) if module == GOOD_TARGET[0]:
                found += [f"{module}.{alias.name}" for alias in names if alias.name not in GOOD_TARGET[1]]
            case ast.Attribute(value=owner, attr=attr) if re.match(r"_[a-z]", attr):
                own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                found += [] if own else [ast.unparse(node)]
            case ast.Constant(value=str(text)) if re.search(r"\bmoeref\.\w|^_[a-z]\w*$", text):
                found.append(text)
    return found


@pytest.mark.parametrize("file", sorted(Path(selftest.__path__[0]).rglob("*.py")), ids=lambda file: file.name)
def test_no_fault_names_the_inside_of_a_target(file: Path) -> None:
    assert inside(file.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import moeref",
        "from moeref import bridge",
        "from moeref.exporter.stream import export",
        "import moeref_conformance.targets.moeref",
        "from moeref_conformance.targets.moeref import ROOMS",
        "from moeref_conformance.targets import moeref",
        "session._built",
        "mock.patch.object(stream, '_fill', fill)",
        "importlib.import_module('moeref.exporter')",
    ],
)
def test_the_inside_of_a_target_is_seen(source: str) -> None:
    assert inside(source)
