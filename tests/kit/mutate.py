"""Changes judges and oracles bit by bit, and lists the changes that no test sees.

mutmut leaves decorated functions alone, and every judge is one. Tools that start a process for a change would import
torch, transformers and megatron-core for each. Here one process gives one function other code, in place, so that
whoever holds the function runs it, judges again what the ranks of every fault have left on record, runs the tests that
need no ranks, and gives the function its own code again. Only rules that can see the change are judged again, in runs
whose judges reach the function; only faults of such rules are run at all.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import inspect
import os
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from moeref_conformance.contract.api import Cell, Target
from moeref_conformance.contract.backends import ENGINE
from moeref_conformance.contract.findings import Outcome
from moeref_conformance.judges import JUDGES
from moeref_conformance.worlds.forked import ForkedWorld

from tests.kit.bench import RULES, Bench

#: What tests judges and oracles without rank processes.
_OF_JUDGES = (
    "judges",
    "delta_judges",
    "quantised_judges",
    "settings",
    "placement",
    "compare",
    "dispatch",
    "tolerances",
)
_OF_ORACLES = (
    "checkpoint",
    *(f"{name}_oracle" for name in ("adapters", "gradient", "mtp", "packed", "balancing", "quantised", "logprobs")),
)
TESTS = [f"tests/kit/test_{name}.py" for name in (*_OF_JUDGES, *_OF_ORACLES)]
SECONDS = 120
#: Bytes that a change may take beyond what recording took: an endless list would end the whole run.
MEMORY = 4 << 30
KIT = "moeref_conformance"
_PAIRS = (
    *((ast.Eq, ast.NotEq), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
_OTHER: dict[type[ast.AST], Any] = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One change: the node of this number in the function of this name, as `ast.walk` counts them."""

    module: str
    function: str
    node: int
    text: str


class Late(BaseException):
    """The tests did not end in time. No `Exception`, so that no judge takes it for its own."""


def change(node: ast.AST) -> str:
    """Change a node in place and say how; nothing, and empty, for a node of another kind."""
    before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _OTHER:
            node.ops[0] = _OTHER[type(op)]()
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _OTHER:
            node.op = _OTHER[type(op)]()
        case ast.Constant(value=bool(value)):
            node.value = not value
        case ast.Constant(value=int(value)):
            node.value = value + 1
        case ast.AugAssign(op=op) if type(op) in _OTHER:
            node.op = _OTHER[type(op)]()
        case (
            ast.If(test=ast.Name() | ast.Attribute() | ast.Call() as test)
            | ast.IfExp(test=ast.Name() | ast.Attribute() | ast.Call() as test)
        ):
            node.test = ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.YieldFrom() | ast.Yield() | ast.Call() as value):
            # Without the finding or the call. Names stay, so that the code has its function's variables.
            node.value = ast.BoolOp(ast.And(), [ast.Constant(None), value])
        case _:
            return ""
    return f"{before} → {ast.unparse(ast.fix_missing_locations(node))}"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and the methods of its classes, by qualified name."""
    for outer in tree.body:
        inside = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        prefix = f"{outer.name}." if isinstance(outer, ast.ClassDef) else ""
        yield from ((prefix + node.name, node) for node in inside if isinstance(node, ast.FunctionDef))


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """Every change of a module's functions that `change` knows."""
    for name, function in functions(ast.parse(inspect.getsource(module))):
        for number, node in enumerate(_nodes(function)):
            if text := change(copy.deepcopy(node)):
                yield Mutant(module.__name__, name, number, text)


def _nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function's body, without its docstring and annotations."""
    return [node for statement in function.body for node in ast.walk(statement)]


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Within, the function, and those that it has made inside, have the changed code.

    Raises LookupError if there is none.
    """
    module = importlib.import_module(mutant.module)
    tree = ast.parse(inspect.getsource(module))
    change(_nodes(dict(functions(tree))[mutant.function])[mutant.node])
    whole = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    inside = f"{mutant.function}."
    changed = {_place(code): code for code in _codes(whole) if f"{code.co_qualname}.".startswith(inside)}
    before = [(one, one.__code__) for one in _held(module) if _place(one.__code__) in changed]
    if not before:
        raise LookupError(f"{mutant.function} of {mutant.module} is no function")
    try:
        for one, code in before:
            one.__code__ = changed[_place(code)]
        forget(mutant)
        yield
    finally:
        for one, code in before:
            one.__code__ = code
        forget(mutant)


@cache
def _held(module: ModuleType) -> list[FunctionType]:
    """The functions of a module, whoever holds them; those that they make later have their code from them."""
    gc.unfreeze()  # what is frozen is not listed
    # `isinstance` would wake what is imported lazily.
    return [one for one in gc.get_objects() if type(one) is FunctionType and one.__module__ == module.__name__]


def _place(code: CodeType) -> tuple[object, ...]:
    return code.co_qualname, code.co_firstlineno, next(code.co_positions(), None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def forget(mutant: Mutant) -> None:
    """Empty the caches of what an oracle's change reaches: an answer with other code is none. Judges keep nothing."""
    for name in () if ".judges" in mutant.module else [name for name in _kit() if mutant.module in reach(name)]:
        for key, held in list(vars(sys.modules[name]).items()):
            # `_DONE` is what oracles name the answers that they keep by themselves.
            clear = held.clear if key == "_DONE" else getattr(held, "cache_clear", None)
            if callable(clear):
                clear()


def _kit() -> list[str]:
    return [name for name in sys.modules if name.startswith(f"{KIT}.")]


@cache
def reach(name: str) -> frozenset[str]:
    """The module of this name and all modules of the kit that it imports, directly or not."""
    found, left = set[str](), [name]
    while left:
        if (one := left.pop()) not in found and getattr(sys.modules.get(one), "__file__", None):
            found.add(one)
            left += _imports(one)
    return frozenset(found)


@cache
def _imports(name: str) -> list[str]:
    nodes = ast.walk(ast.parse(Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8")))
    sources = [(node.module, node.names) for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    named = [part for module, names in sources for part in (module, *(f"{module}.{alias.name}" for alias in names))]
    return [part for part in named if part.startswith(f"{KIT}.")]


def rules_of(module: str) -> set[str]:
    """The rules whose judges have, or import, this module of the kit."""
    return {rule for rule, judge in JUDGES.items() if module in reach(judge.__module__)}


class Again(Bench):
    """Judges a cell again by the rules of `afresh` alone, and by those that require them; the rest stays as it was."""

    def __init__(self, world: ForkedWorld, folder: Path, target: Target, inputs: Path | None = None) -> None:
        super().__init__(world, folder, target, inputs)
        self.afresh: Collection[str] = ()
        self._kept: dict[tuple[str, tuple[str, ...]], dict[str, Outcome]] = {}

    def judge(self, cell: Cell, *, one_rank: bool = False, deadline: float = 60.0) -> dict[str, Outcome]:
        """As of `Bench`."""
        key = cell.id, cell.tags
        if key not in self._kept:
            self._kept[key] = super().judge(cell, one_rank=one_rank, deadline=deadline)
        before = self._kept[key]
        if not self.afresh:
            return before
        case, outcomes = self.case(cell, one_rank=one_rank, deadline=deadline), dict(before)
        for rule in before:
            unmet, was = ([r for r in RULES[rule].requires if _bad(of, r)] for of in (outcomes, before))
            if unmet and unmet != was:
                outcomes[rule] = Outcome(untested=f"requires {unmet}")
            elif not unmet and (was or rule in self.afresh):
                outcomes[rule] = JUDGES[rule](case)
        return outcomes


def _bad(outcomes: dict[str, Outcome], rule: str) -> bool:
    return rule in outcomes and bool(outcomes[rule].findings or outcomes[rule].untested)


@dataclass
class Check:
    """A test, as a call that raises, the rules that it judges, and the functions that it reached without a change."""

    name: str
    run: Callable[[], object]
    rules: Collection[str] = ()
    reached: set[tuple[str, str]] = field(default_factory=set)

    def sees(self, mutant: Mutant) -> bool:
        """Whether the change can show. Caches hide which oracles a check reaches: there its rules say so."""
        function = mutant.module, mutant.function
        return function in self.reached or (
            ".oracles" in mutant.module and not rules_of(mutant.module).isdisjoint(self.rules)
        )


@contextmanager
def reached(modules: Collection[str]) -> Iterator[Callable[[], set[tuple[str, str]]]]:
    """Within, what is given says which functions of these modules have run since it was last asked."""
    seen, tool, places = set[tuple[str, str]](), sys.monitoring.PROFILER_ID, dict[CodeType, tuple[str, str]]()
    files = {str(sys.modules[module].__file__): module for module in modules}

    def begins(code: CodeType, _: int) -> object:
        seen.add(places[code])
        return sys.monitoring.DISABLE

    def since() -> set[tuple[str, str]]:
        found = set(seen)
        seen.clear()
        sys.monitoring.restart_events()
        return found

    sys.monitoring.use_tool_id(tool, "mutants")
    sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, begins)
    held = [one for module in modules for one in _held(sys.modules[module])]
    for code in {code for one in held for code in _codes(one.__code__) if code.co_filename in files}:
        places[code] = files[code.co_filename], code.co_qualname.partition(".<locals>")[0]
        sys.monitoring.set_local_events(tool, code, sys.monitoring.events.PY_START)
    try:
        yield since
    finally:
        for code in places:
            sys.monitoring.set_local_events(tool, code, 0)
        sys.monitoring.free_tool_id(tool)


@contextmanager
def recorded(modules: Collection[str], prefixes: Sequence[str] = ("",)) -> Iterator[tuple[list[Again], list[Check]]]:
    """Run the cells of faults once, of those whose rules can see a change of `modules` and have one of these prefixes.

    Gives what judges these records again, and the checks, which all pass. Cells of engines are run, by an engine of the
    tests, if a module of theirs is among `modules`.
    """
    from moeref_conformance.selftest.faulty import by_tag

    from tests.kit import test_faults, test_sync_judges, toy_engine
    from tests.kit.shared_world import Shared

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "records").mkdir()
        (folder / "engines").mkdir()
        world = stack.enter_context(ForkedWorld("tests.kit.shared_world:target", entry="tests.kit.shared_world:run"))
        shared = stack.enter_context(Shared(world, "moeref_conformance.selftest.faulty:by_tag", grace=1.0))
        benches = [Again(shared, folder / "records", by_tag, inputs=folder / "inputs")]
        rules = {rule for module in modules for rule in rules_of(module) if rule.startswith(tuple(prefixes))}
        checks = _checks(benches[0], test_faults, rules)
        if any(module.endswith(".sync") for module in modules):
            spec = "tests.kit.toy_engine:target"
            other = stack.enter_context(ForkedWorld(spec, backend=ENGINE, grace=1.0))
            benches.append(Again(other, folder / "engines", toy_engine.target))
            checks += _of_engines(benches[1], test_sync_judges)
        checks += [Check(test, partial(passes, test)) for test in TESTS]
        with reached(modules) as since:
            for number, check in enumerate(checks, 1):
                since()
                check.run()
                check.reached = since()
                print(f"{number}/{len(checks)} checks pass without a change", file=sys.stderr, end="\r", flush=True)
        yield benches, checks


def _checks(bench: Again, tests: ModuleType, rules: Collection[str]) -> list[Check]:
    """Those of these rules, and the good target in their cells."""
    own = {name: fault for name, fault in tests.HERE.items() if {*fault.rules, *fault.also} & {*rules}}
    good = [
        Check(f"good {cell.id}", partial(tests.test_the_good_target_stays_green, bench, cell), RULES)
        for cell in {
            fault.cell.id: tests.GOOD[fault.cell.id] for fault in own.values() if fault.cell.id in tests.GOOD
        }.values()
    ]
    faults = [
        Check(name, partial(tests.test_fault_turns_its_rules_red, bench, fault), {*fault.rules, *fault.also})
        for name, fault in own.items()
    ]
    steps = [
        Check(f"steps {rule}", partial(tests.test_a_step_that_is_not_on_record_is_no_pass, bench, rule), {rule})
        for rule in sorted(tests.MET.keys() & rules)
    ]
    otherwise = [
        Check(
            f"otherwise {said}",
            partial(tests.test_a_record_that_says_otherwise_is_found, bench, said),
            {tests.OTHERWISE[said][0]},
        )
        for said in tests.OTHERWISE
        if tests.OTHERWISE[said][0] in rules
    ]
    lost = [
        Check(f"lost {rule}", partial(tests.test_tensors_that_are_not_on_record_are_findings, bench, rule), {rule})
        for rule in sorted((tests.MET.keys() & rules) - {*tests.VALUES})
    ]
    shapes = [
        Check(
            f"{kind.__name__} {rule}",
            partial(tests.test_tensors_of_another_shape_are_findings, bench, rule, kind),
            {rule},
        )
        for rule in sorted((tests.MET.keys() & rules) - {*tests.VALUES, *tests.OF_ANY_SHAPE})
        for kind in (tests.Cut, tests.Deeper)
    ]
    return [*faults, *good, *steps, *lost, *shapes, *otherwise]


def _of_engines(bench: Again, tests: ModuleType) -> list[Check]:
    good = [
        Check(f"engine {cell.id}", partial(tests.test_a_good_engine_is_green, bench, cell), RULES)
        for cell in (tests.QWEN, tests.GLM)
    ]
    faults = [
        Check(name, partial(tests.test_a_fault_turns_its_rules_red, bench, fault), {*fault.rules, *fault.also})
        for name, fault in tests.ENGINES.items()
    ]
    steps = [
        Check(f"steps {rule}", partial(tests.test_a_record_without_a_step_is_no_pass, bench, rule), {rule})
        for rule in sorted(rule for rule in RULES if rule.startswith("SYN-"))
    ]
    otherwise = [
        Check(f"otherwise {said}", partial(tests.test_a_record_that_says_otherwise_is_found, bench, said), {rule})
        for said, (rule, *_) in tests.OTHERWISE.items()
    ]
    return [*good, *faults, *steps, *otherwise]


def outcome(check: Callable[[], object]) -> str:
    """What becomes of a check: passed, failed, or late."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        check()
    except Late:
        return "late"
    except (Exception, pytest.fail.Exception):
        return "failed"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return "passed"


def passes(test: str) -> None:
    """AssertionError if a file of tests does not pass."""
    assert not run([test]), test


def run(tests: list[str]) -> int:
    """pytest's exit status; its output is dropped."""
    null, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(null, number)
    status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)
    for number in (null, *kept):
        os.close(number)
    return status


def tried(mutant: Mutant, benches: list[Again], checks: list[Check]) -> str:
    """What becomes of the first check that notices the change; those whose rules are of its module come first."""
    own = rules_of(mutant.module)
    for bench in benches:
        bench.afresh = own
    able = sorted((check for check in checks if check.sees(mutant)), key=lambda check: own.isdisjoint(check.rules))
    with applied(mutant):
        return next((result for check in able if (result := outcome(check.run)) != "passed"), "passed")


def limit_memory() -> None:
    """Let allocations fail that go MEMORY beyond what this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, most))


def command(name: str, about: str | None, packages: list[str]) -> argparse.ArgumentParser:
    """The words of a command that tries mutants: `packages` unless others are named, and how many are drawn."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.kit.{name}", description=about)
    parser.add_argument("packages", nargs="*", default=packages)
    parser.add_argument("--sample", type=int, default=0, help="how many mutants; all if it is not said")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    return parser


def drawn(found: list[Mutant], asked: argparse.Namespace) -> list[Mutant]:
    """The mutants of the sample that a command asks for."""
    return random.Random(asked.seed).sample(found, min(asked.sample or len(found), len(found)))


def main(words: list[str]) -> int:
    """Try mutants of packages of the kit, and print those that no test sees."""
    parser = command("mutate", main.__doc__, ["judges", "oracles"])
    parser.add_argument("--rule", action="append", help="only faults of rules with this prefix; repeatable")
    asked = parser.parse_args(words)
    modules = modules_of(KIT, asked.packages)
    found = [mutant for module in modules for mutant in mutants(module)]
    chosen = drawn(found, asked)
    with recorded([module.__name__ for module in modules], asked.rule or [""]) as (benches, checks):
        print(f"{len(chosen)} of {len(found)} mutants, seed {asked.seed}", flush=True)
        limit_memory()
        left, tries = Counter[str](), Counter(mutant.module for mutant in chosen)
        began = time.monotonic()
        for number, mutant in enumerate(chosen, 1):
            if (result := tried(mutant, benches, checks)) != "failed":
                left[mutant.module] += 1
                print(f"{mutant.module.partition('.')[2]}: {mutant.function}: {mutant.text} ({result})", flush=True)
            seconds = time.monotonic() - began
            print(f"{number}/{len(chosen)} tried, {left.total()} left, {seconds:.0f} s", file=sys.stderr, flush=True)
        for bench in benches:
            bench.afresh = JUDGES
        for check in checks:  # a change that was not taken back would make all that came after worthless
            if (unchanged := outcome(check.run)) != "passed":
                print(f"{check.name}: {unchanged} without a change, at the end", file=sys.stderr)
                return 2
    print("\n".join(f"{module.partition('.')[2]}: {left[module]} of {tries[module]} left" for module in sorted(tries)))
    print(f"{left.total()} of {len(chosen)} left")
    return 0


def modules_of(root: str, packages: Collection[str]) -> list[ModuleType]:
    """The modules of packages of `root`; what is named may be one module."""
    found: list[ModuleType] = []
    for package in packages:
        named = importlib.import_module(f"{root}.{package}")
        names = [f"{named.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(named, "__path__", []))]
        found += [importlib.import_module(name) for name in names] or [named]
    return found


if __name__ == "__main__":
    # Under `-m` this file is a second module called __main__; go on in the importable one.
    from tests.kit.mutate import main as change_and_judge

    sys.exit(change_and_judge(sys.argv[1:]))
