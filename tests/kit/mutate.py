"""Changes judges and oracles bit by bit, and lists the changes that no test sees.

mutmut leaves decorated functions alone, and every judge is one. Tools that start a process for a change would import
torch, transformers and megatron-core for each. Here one process gives one function other code, in place, so that
whoever holds the function runs it, judges again what the ranks of every fault have left on record, runs the tests that
need no ranks, and gives the function its own code again.
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

#: What tests judges and oracles without rank processes.
_OF_JUDGES = ("judges", "delta_judges", "quantised_judges", "settings", "placement", "compare", "dispatch")
_OF_ORACLES = ("checkpoint", *(f"{name}_oracle" for name in ("gradient", "mtp", "packed", "balancing", "quantised")))
TESTS = [f"tests/kit/test_{name}.py" for name in (*_OF_JUDGES, *_OF_ORACLES)]
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
        case ast.Expr(value=ast.YieldFrom() | ast.Yield() as value):
            # Without the finding. Its names stay, so that the code has the variables of the function that gets it.
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
    gc.unfreeze()  # what is frozen is not listed
    # `isinstance` would wake what is imported lazily.
    held = [one for one in gc.get_objects() if type(one) is FunctionType and one.__module__ == mutant.module]
    before = [(one, one.__code__) for one in held if _place(one.__code__) in changed]
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


def _place(code: CodeType) -> tuple[object, ...]:
    return code.co_qualname, code.co_firstlineno, next(code.co_positions(), None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def forget(mutant: Mutant) -> None:
    """Empty the caches where an oracle is changed: what it gave with other code is no answer. Judges keep nothing."""
    for name, module in list(sys.modules.items()) if ".judges" not in mutant.module else ():
        for key, held in list(vars(module).items()) if name.startswith("moeref_conformance.") else ():
            # `_DONE` is what oracles name the answers that they keep by themselves.
            clear = held.clear if key == "_DONE" else getattr(held, "cache_clear", None)
            if callable(clear):
                clear()


@contextmanager
def recorded() -> Iterator[Callable[[Mutant | None], None]]:
    """Run the cells of all faults once. Gives what judges these records again, and fails where a test of faults would.

    Of a judge's module the faults of its rules are judged, of other modules all.
    """
    from moeref_conformance.judges import JUDGES
    from moeref_conformance.selftest.faulty import by_tag
    from moeref_conformance.worlds.forked import ForkedWorld

    from tests.kit import test_faults as of_faults
    from tests.kit.bench import Bench
    from tests.kit.shared_world import Shared

    def judge(mutant: Mutant | None) -> None:
        own = {rule for rule, one in JUDGES.items() if mutant and one.__module__ == mutant.module} or JUDGES.keys()
        for fault in of_faults.HERE.values():
            if own & {*fault.rules, *fault.also}:
                of_faults.test_fault_turns_its_rules_red(bench, fault)
        for cell in of_faults.GOOD.values():
            of_faults.test_the_good_target_stays_green(bench, cell)
        for rule in own & of_faults.MET.keys():
            of_faults.test_a_step_that_is_not_on_record_is_no_pass(bench, rule)
        for rule in own & {*of_faults.LISTED}:
            of_faults.test_tensors_that_are_not_on_record_are_findings(bench, rule)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "records").mkdir()
        with (
            ForkedWorld("tests.kit.shared_world:target", entry="tests.kit.shared_world:run") as world,
            Shared(world, "moeref_conformance.selftest.faulty:by_tag", grace=1.0) as shared,
        ):
            bench = Bench(shared, folder / "records", by_tag, inputs=folder / "inputs")
            judge(None)
        yield judge


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


def main(words: list[str]) -> int:
    """Try a sample of the mutants of packages of the kit, and print those that no test sees."""
    parser = argparse.ArgumentParser(prog="python -m tests.kit.mutate", description=main.__doc__)
    parser.add_argument("packages", nargs="*", default=["judges", "oracles"])
    parser.add_argument("--sample", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    asked = parser.parse_args(words)
    found = [mutant for package in asked.packages for module in _modules(package) for mutant in mutants(module)]
    chosen = random.Random(asked.seed).sample(found, min(asked.sample, len(found)))
    with recorded() as again:

        def tried(mutant: Mutant | None) -> str:
            def check() -> None:
                again(mutant)
                assert not run(TESTS)

            return outcome(check)

        if (unchanged := tried(None)) != "passed":
            print(f"the tests are {unchanged} without a change", file=sys.stderr)
            return 2
        print(f"{len(chosen)} of {len(found)} mutants, seed {asked.seed}", flush=True)
        left = 0
        for number, mutant in enumerate(chosen, 1):
            with applied(mutant):
                result = tried(mutant)
            if result != "failed":
                left += 1
                print(f"{mutant.module.partition('.')[2]}: {mutant.function}: {mutant.text} ({result})", flush=True)
            print(f"{number}/{len(chosen)} tried, {left} left", file=sys.stderr, flush=True)
        if (unchanged := tried(None)) != "passed":
            print(f"the tests are {unchanged} without a change, at the end", file=sys.stderr)
            return 2
    print(f"{left} of {len(chosen)} left")
    return 0


def _modules(package: str) -> list[ModuleType]:
    """The modules of a package of the kit, or the one module that is named."""
    root = importlib.import_module(f"moeref_conformance.{package}")
    names = [f"{root.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(root, "__path__", []))]
    return [importlib.import_module(name) for name in names] or [root]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
