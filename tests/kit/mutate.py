"""Changes judges and oracles bit by bit, and lists the changes that no test sees.

mutmut leaves decorated functions alone, and every judge is one. Tools that start a process for a change would import
torch, transformers and megatron-core for each. Here everything is imported once; a forked process gives one function
other code, in place, and those that it has made: whoever holds one runs it. It judges again what the ranks of every
fault, and of the good target, have left on record, by the tests of faults, and runs the tests that need no ranks.
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
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

#: What tests judges and oracles without rank processes.
_WITHOUT_RANKS = ("delta_judges", "placement", "judges", "compare", "dispatch", "settings")
TESTS = [f"tests/kit/test_{name}.py" for name in _WITHOUT_RANKS]
#: Oracles that make what ranks are given: what is on record was made of other inputs than theirs.
_OF_INPUTS = ("checkpoint", "dialect", "published", "recipes", "spoiled")
_QUIETLY = ("-x", "-q", "--durations=0", "--durations-min=60", "-p", "no:cacheprovider")
SECONDS = 300
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
        case ast.Expr(value=ast.YieldFrom() | ast.Yield()):
            # Without the finding; the function stays a generator.
            node.value = ast.YieldFrom(ast.Tuple([], ast.Load()))
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


def apply(mutant: Mutant) -> None:
    """Give the function, and those that it has made inside, the changed code in this process.

    Raises LookupError if there is none.
    """
    module = importlib.import_module(mutant.module)
    tree = ast.parse(inspect.getsource(module))
    change(_nodes(dict(functions(tree))[mutant.function])[mutant.node])
    whole = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    inside = f"{mutant.function}."
    changed = {code.co_qualname: code for code in _codes(whole) if f"{code.co_qualname}.".startswith(inside)}
    held = [one for one in gc.get_objects() if isinstance(one, FunctionType) and one.__module__ == mutant.module]
    mine = [one for one in held if one.__code__.co_qualname in changed]
    if not mine:
        raise LookupError(f"{inside[:-1]} of {mutant.module} is no function")
    for one in mine:
        one.__code__ = changed[one.__code__.co_qualname]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def recorded(folder: Path) -> Callable[[Mutant], None]:
    """Run the cells of all faults once. Returns what judges these records again; it raises where a test would.

    Of a judge's module the faults of its rules are judged, of other modules all.
    """
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.selftest.faulty import by_tag
    from moeref_conformance.worlds.forked import ForkedWorld

    from tests.kit import test_faults as of_faults
    from tests.kit.bench import Bench
    from tests.kit.shared_world import Shared

    def judge(rules: set[str]) -> None:
        for fault in of_faults.HERE.values():
            if not rules or rules & {*fault.rules, *fault.also}:
                of_faults.test_fault_turns_its_rules_red(bench, fault)
        for cell in of_faults.GOOD.values():
            of_faults.test_the_good_target_stays_green(bench, cell)

    with (
        ForkedWorld("tests.kit.shared_world:target", entry="tests.kit.shared_world:run") as world,
        Shared(world, "moeref_conformance.selftest.faulty:by_tag", grace=1.0) as shared,
    ):
        (folder / "records").mkdir()
        bench = Bench(shared, folder / "records", by_tag, inputs=folder / "inputs")
        judge(set())

    def again(mutant: Mutant) -> None:
        if mutant.module.rpartition(".")[2] not in _OF_INPUTS:
            judge({rule for rule, one in JUDGES.items() if one.__module__ == mutant.module})

    return again


def outcome(prepare: Callable[[], None], tests: list[str]) -> str:
    """What a forked process says of `prepare` and the tests after it: passed, failed, or late."""
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {0: "passed", -signal.SIGALRM: "late"}.get(status, "failed")
    signal.alarm(SECONDS)
    try:
        prepare()
        status = run(tests)
    except BaseException:
        status = 1
    os._exit(status)


def forget(mutant: Mutant) -> None:
    """Empty the caches of the kit's functions where an oracle is changed: what an unchanged one gave is no answer."""
    for name, module in list(sys.modules.items()) if ".oracles" in mutant.module else ():
        for held in vars(module).values() if name.startswith("moeref_conformance") else ():
            if callable(clear := getattr(held, "cache_clear", None)):
                clear()


def run(tests: list[str]) -> int:
    """pytest's exit status; its output is dropped."""
    null, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(null, number)
    status = int(pytest.main([*_QUIETLY, *tests]))
    for number, before in enumerate(kept, 1):
        os.dup2(before, number)
    return status


def main(words: list[str]) -> int:
    """Try a sample of the mutants of packages of the kit, and print those that no test sees."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.mutate", description=main.__doc__)
    parser.add_argument("packages", nargs="*", default=["judges", "oracles"])
    parser.add_argument("--sample", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    asked = parser.parse_args(words)
    found = [mutant for package in asked.packages for module in _modules(package) for mutant in mutants(module)]
    chosen = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    if pytest.main([*_QUIETLY, *TESTS]):  # here, so that what is imported for them is there in every fork
        print("the tests fail without a change", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        again = recorded(Path(folder))
        if (unchanged := outcome(lambda: again(chosen[0]), TESTS)) != "passed":
            print(f"in a forked process the tests are {unchanged} without a change", file=sys.stderr)
            return 2
        print(f"{len(chosen)} of {len(found)} mutants, seed {asked.seed}", flush=True)
        left = 0
        for number, mutant in enumerate(chosen, 1):
            left += _is_left(mutant, again)
            print(f"{number}/{len(chosen)} tried, {left} left", file=sys.stderr, flush=True)
    print(f"{left} of {len(chosen)} left")
    return 0


def _is_left(mutant: Mutant, again: Callable[[Mutant], None]) -> bool:
    """Whether no test fails with a mutant, which is printed at once."""

    def prepare() -> None:
        apply(mutant)
        forget(mutant)
        again(mutant)

    left = outcome(prepare, TESTS) != "failed"
    if left:
        print(f"{mutant.module.partition('.')[2]}: {mutant.function}: {mutant.text}", flush=True)
    return left


def _modules(package: str) -> list[ModuleType]:
    """The modules of a package of the kit, or the one module that is named."""
    root = importlib.import_module(f"moeref_conformance.{package}")
    names = [f"{root.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(root, "__path__", []))]
    return [importlib.import_module(name) for name in names] or [root]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
