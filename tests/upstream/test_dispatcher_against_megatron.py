"""The dispatcher table against megatron-core: the same verdict for every combination of an enumerated space.

The combinations and what is built for each are in dispatcher_outcomes.py, run in a process of its own. It runs once on
the installation as it is, and once more for flex with an empty package `deep_ep` on the path: the kernels need a GPU,
but their presence is all that construction asks for.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeref.dispatcher import RULES, Choice, Environment, Refusal, Setup, installed, refusals
from moeref.layout import Layout
from tests import warm

sys.path.insert(0, str(Path(__file__).parent))
import dispatcher_outcomes

pytestmark = pytest.mark.cpu
HERE = str(Path(__file__).parent)

#: Every rule by which moeref refuses what megatron-core constructs, with the reason that its text has to give.
STRICTER = {
    "fp4-needs-te-later": "unasked",
    "tp-needs-sp": "first forward",
    "drop-policy": "first drop",
    "capacity-over-rows": "more places than there are rows",
    "etp-without-ep": "gradients wrongly",
    "equal-rows": "unequal counts",
    "flex-rows-bf16": "not fp32",
    "flex-gpu": "no GPU",
}
#: Names that construction imports from deep_ep, without anything behind them.
NAMES_OF_DEEP_EP = {
    "__init__.py": "class Buffer:\n    set_num_sms = staticmethod(id)\n\n\nclass HybridEPBuffer: ...\n",
    "utils.py": "class EventHandle: ...\n\n\nclass EventOverlap: ...\n",
}


@dataclasses.dataclass
class Run:
    environment: Environment
    found: list[tuple[dict[str, Any], list[str]]]

    @functools.cached_property
    def refused(self) -> list[tuple[Refusal, ...]]:
        """What moeref refuses of each combination, in the environment of this run."""
        return [tuple(refusals(setup(combination), self.environment)) for combination, _ in self.found]

    @property
    def both(self) -> Iterator[tuple[dict[str, Any], list[str], tuple[Refusal, ...]]]:
        """Each combination, what megatron-core does with it, and what moeref refuses of it."""
        return ((*found, refused) for found, refused in zip(self.found, self.refused, strict=True))


def program(out: Path, only: str = "") -> str:
    return f"import dispatcher_outcomes\ndispatcher_outcomes.main({str(out)!r}, {only!r})"


def outcomes(done: warm.Done, out: Path, only: str = "") -> Run:
    assert done.returncode == 0, done.stderr
    head, *lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    environment = Environment(core=head["core"], packages=frozenset(head["packages"]))
    return Run(environment, list(zip(dispatcher_outcomes.combinations(only), lines, strict=True)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, megatron_on_cpu: warm.Prepared) -> Run:
    out = tmp_path_factory.mktemp("plain") / "outcomes.jsonl"
    return outcomes(megatron_on_cpu.run(program(out), cwd=out.parent, path=[HERE]), out)


@pytest.fixture(scope="module")
def with_packages(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("path")
    (path / "deep_ep").mkdir()
    for name, text in NAMES_OF_DEEP_EP.items():
        (path / "deep_ep" / name).write_text(text, encoding="utf-8")
    out = tmp_path_factory.mktemp("with_packages") / "outcomes.jsonl"
    # megatron-core is imported anew: after the kit's substitutions, and with the packages on the path.
    forget = ["megatron", "moeref_conformance"]
    done = warm.run(program(out, "flex"), cwd=out.parent, path=[str(path), HERE], forget=forget)
    return outcomes(done, out, "flex")


def setup(combination: dict[str, Any]) -> Setup:
    tp, sp, ep, etp = combination["layout"]
    rest = {name: value for name, value in combination.items() if name not in ("layout", "grouped_gemm")}
    return Setup(layout=Layout(tp=tp, ep=ep, etp=etp), sequence_parallel=sp, **rest)


def disagreements(found: Run) -> Iterator[tuple[Any, ...]]:
    for combination, outcome, refused in found.both:
        upstream = [r for r in refused if not r.stricter]
        ours = [upstream[0].stage, upstream[0].error] if upstream else []
        if ours != outcome[:2]:
            yield tuple(ours), tuple(outcome), tuple(combination.items())


@pytest.mark.parametrize("which", ["plain", "with_packages"])
def test_every_verdict_is_megatrons(which: str, request: pytest.FixtureRequest) -> None:
    found: Run = request.getfixturevalue(which)
    assert len(found.found) > 5000
    wrong = list(disagreements(found))
    assert not wrong, f"{len(wrong)} of {len(found.found)}: {wrong[:3]}"
    assert {outcome[0] for _, outcome in found.found if outcome} == {"config", "construction"}
    assert any(not outcome for _, outcome in found.found)


def test_packages_are_seen_as_megatron_sees_them(plain: Run, with_packages: Run) -> None:
    found = installed(gpu=False)
    # In a git checkout megatron-core's own version ends with the commit.
    assert (found.minor, found.packages, found.gpu) == (plain.environment.minor, plain.environment.packages, False)
    assert with_packages.environment.packages == plain.environment.packages | {"deep_ep", "hybrid_ep"}


def test_where_moeref_is_stricter_is_the_list(plain: Run, with_packages: Run) -> None:
    assert {rule.id for rule in RULES if rule.stricter} == set(STRICTER)
    assert all(STRICTER[rule.id] in rule.text for rule in RULES if rule.stricter)
    seen: collections.Counter[str] = collections.Counter()
    for found in (plain, with_packages):
        for _, outcome, refused in found.both:
            if not outcome:
                seen.update(refusal.rule for refusal in refused)
    old = plain.environment.minor == "0.16"
    assert set(seen) == set(STRICTER) - ({"etp-without-ep"} if not old else set())


def test_every_rule_of_construction_was_met_first_somewhere(plain: Run, with_packages: Run) -> None:
    met = set()
    for found in (plain, with_packages):
        for _, outcome, refused in found.both:
            if outcome:
                met.add(refused[0].rule)
    new = {"uneven-is-new", "fp4-needs-te"} if plain.environment.minor != "0.16" else set()
    assert met == {rule.id for rule in RULES if not rule.stricter} - new


def test_every_row_of_the_table_can_be_used(with_packages: Run) -> None:
    """With the packages and a GPU each choice has a setup that both sides take."""
    environment = dataclasses.replace(with_packages.environment, gpu=True)
    taken = {
        setup(combination).choice
        for combination, outcome in with_packages.found
        if not outcome and not refusals(setup(combination), environment)
    }
    assert taken == {Choice.FLEX_DEEPEP, Choice.FLEX_HYBRIDEP}
