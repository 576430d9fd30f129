"""Every way in which the text of a module can name another module: imports, names built at run time, and strings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: What imports by a name that is a value. Each use needs a constant name, or a listed door.
LOADERS = frozenset(
    {"import_module", "__import__", "resolve_name", "run_module", "run_path", "spec_from_file_location"}
)
#: Builtins that run text.
RUNNERS = frozenset({"exec", "eval"})
#: Modules whose functions are LOADERS: taken under another name, they could not be recognised.
HOMES = frozenset({"importlib", "importlib.util", "pkgutil", "runpy", "builtins"})


@dataclass(frozen=True)
class Arrow:
    """One module named by another. `name` is dotted; empty where it is built at run time by the expression `text`.

    `quoted`: it is a string, which may or may not be imported.
    """

    line: int
    name: str
    text: str = ""
    quoted: bool = False


def arrows(module: tuple[str, ...], is_package: bool, source: str, packages: tuple[str, ...] = ()) -> Iterator[Arrow]:
    """All arrows of `source`, the text of `module`, also inside functions.

    A string or f-string in which a module of one of `packages` is named counts as an import of it.
    """
    tree = ast.parse(source)
    package = module if is_package else module[:-1]
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(packages)})(?:\.\w+)*\.[a-z_]\w*") if packages else None
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    loaders = [call for call in calls.values() if _identifier(call.func) in LOADERS]
    loads = [call for call in loaders if call.args and isinstance(call.args[0], ast.Constant)]
    # The argument of a loader is reported with the loader.
    skipped = _docstrings(tree) | {id(argument) for call in loaders for argument in call.args}
    skipped |= {id(call.func) for call in loads}
    yield from (Arrow(call.lineno, str(ast.literal_eval(call.args[0]))) for call in loads)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Arrow(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imported_from(node, package)
        elif id(node) in skipped:
            continue
        elif _identifier(node) in LOADERS or (isinstance(node, ast.Name) and node.id in RUNNERS):
            yield Arrow(node.lineno, "", ast.unparse(calls.get(id(node), node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in LOADERS | RUNNERS:
                yield Arrow(node.lineno, "", repr(node.value))
            if pattern:
                yield from (Arrow(node.lineno, name, quoted=True) for name in pattern.findall(node.value))
        elif isinstance(node, ast.JoinedStr) and any(_begins_a_name(part, packages) for part in node.values):
            yield Arrow(node.lineno, "", ast.unparse(node))


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Every circle that a walk through the graph closes, as the modules on it."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                walk(other, [*path, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def _imported_from(node: ast.ImportFrom, package: tuple[str, ...]) -> Iterator[Arrow]:
    base = package[: len(package) - node.level + 1] if node.level else ()
    home = ".".join((*base, *(node.module or "").split("."))).strip(".")
    for alias in node.names:
        # `from moeref import bridge` imports a room by its alias, so aliases count as modules.
        yield Arrow(node.lineno, f"{home}.{alias.name}")
        if home in HOMES and alias.name in LOADERS and alias.asname:
            yield Arrow(node.lineno, "", ast.unparse(node))


def _identifier(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _begins_a_name(part: ast.expr, packages: tuple[str, ...]) -> bool:
    """`moeref.` at the end of the text before a value: the value completes the name of a module."""
    text = part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else ""
    return any(re.search(rf"(?<![\w.]){package}(?:\.\w+)*\.$", text) for package in packages)


def _docstrings(tree: ast.AST) -> set[int]:
    """Strings that are statements of their own."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
