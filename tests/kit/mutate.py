"""Changes judges and oracles bit by bit, and lists the changes that no fast test sees.

mutmut leaves decorated functions alone, and every judge is one. Tools that start a process for a change would import
torch, transformers and megatron-core for each. Here everything is imported once; a forked process gives one function
other code, in place, so that whoever holds the function runs it, and then runs the tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import os
import pkgutil
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

#: What tests judges and oracles without rank processes.
TESTS = [f"tests/kit/test_{name}.py" for name in ("delta_judges", "placement", "judges", "compare", "dispatch")]
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
    """Give the function the changed code, in this process. Raises LookupError if it cannot be found."""
    module = importlib.import_module(mutant.module)
    tree = ast.parse(inspect.getsource(module))
    change(_nodes(dict(functions(tree))[mutant.function])[mutant.node])
    whole = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec", dont_inherit=True)
    function = _plain(module, mutant.function)
    function.__code__ = next(code for code in _codes(whole) if code.co_qualname == mutant.function)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


def _plain(module: ModuleType, name: str) -> FunctionType:
    """The function itself, below decorators and properties."""
    found: Any = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    found = getattr(found, "func", None) or getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise LookupError(f"{module.__name__}.{name} is no function")
    return found


def outcome(prepare: Callable[[], None], tests: list[str]) -> str:
    """What a forked process says of the tests after `prepare`: passed, failed, or late."""
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {0: "passed", -signal.SIGALRM: "late"}.get(status, "failed")
    signal.alarm(SECONDS)
    prepare()
    forget()
    os._exit(run(tests))


def forget() -> None:
    """Empty the caches of the kit's functions: what an unchanged function gave is no answer."""
    for name, module in list(sys.modules.items()):
        for held in vars(module).values() if name.startswith("moeref_conformance") else ():
            if callable(clear := getattr(held, "cache_clear", None)):
                clear()


def run(tests: list[str]) -> int:
    """pytest's exit status; its output is dropped."""
    null, kept = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    for number in (1, 2):
        os.dup2(null, number)
    status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
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
    if run(TESTS):  # here, so that what is imported for them is there in every fork
        print("the tests fail without a change", file=sys.stderr)
        return 2
    print(f"{len(chosen)} of {len(found)} mutants, seed {asked.seed}", flush=True)
    left = 0
    for mutant in chosen:
        if outcome(lambda mutant=mutant: apply(mutant), TESTS) == "passed":  # type: ignore[misc]
            left += 1
            print(f"{mutant.module.partition('.')[2]}: {mutant.function}: {mutant.text}", flush=True)
    print(f"{left} of {len(chosen)} left")
    return 0


def _modules(package: str) -> list[ModuleType]:
    """The modules of a package of the kit, or the one module that is named."""
    root = importlib.import_module(f"moeref_conformance.{package}")
    names = [f"{root.__name__}.{info.name}" for info in pkgutil.iter_modules(getattr(root, "__path__", []))]
    return [importlib.import_module(name) for name in names] or [root]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
