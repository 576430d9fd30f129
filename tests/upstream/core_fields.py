"""Fields of the installed megatron-core's TransformerConfig as moeref/config/fields/ holds them.

`python tests/upstream/core_fields.py` writes the file of the installed version; a test compares the two.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import megatron.core
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

FOLDER = Path(__file__).parents[2] / "moeref" / "config" / "fields"


def minor() -> str:
    """The installed version without its patch level."""
    return ".".join(megatron.core.__version__.split(".")[:2])


def fields() -> dict[str, dict[str, Any]]:
    """Class name -> field name -> what is known of it; of MLATransformerConfig what differs from its base."""
    plain, mla = _of(TransformerConfig), _of(MLATransformerConfig)
    for name in checked():
        for known in (plain, mla):
            if name in known:
                known[name]["checked"] = True
    further = {name: known for name, known in mla.items() if plain.get(name) != known}
    assert plain.keys() <= mla.keys()
    return {"TransformerConfig": plain, "MLATransformerConfig": further}


def checked() -> set[str]:
    """Names that `__post_init__` of these classes reads on the way to a refusal or hands to a function."""
    found: set[str] = set()
    for kind in (ModelParallelConfig, TransformerConfig, MLATransformerConfig):
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kind.__post_init__))).body
        assert isinstance(function, ast.FunctionDef)
        _refusals(function.body, set(), _locals(function), found)
    return found


def _locals(function: ast.FunctionDef) -> dict[str, set[str]]:
    """Local variable -> the settings that its assignments read."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, set()).update(_read(node.value, found))
    return found


def _read(node: ast.AST, through: dict[str, set[str]]) -> set[str]:
    found = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
    found |= {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant) and str(n.value).isidentifier()}
    return found.union(*(through.get(n.id, set()) for n in ast.walk(node) if isinstance(n, ast.Name)))


def _refusals(body: list[ast.stmt], path: set[str], through: dict[str, set[str]], found: set[str]) -> None:
    for node in body:
        if isinstance(node, ast.If | ast.For | ast.While | ast.Try | ast.With):
            heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            inner = path.union(*(_read(head, through) for head in heads))
            for part in ("body", "orelse", "finalbody"):
                _refusals(getattr(node, part, []), inner, through, found)
            for handler in getattr(node, "handlers", []):
                _refusals(handler.body, inner, through, found)
        elif isinstance(node, ast.Raise | ast.Assert):
            found |= path | _read(node, through)
        elif not isinstance(node, ast.Expr) or "warn" not in ast.unparse(node):
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            found |= set().union(*(_read(call, through) for call in calls))


def _of(kind: type) -> dict[str, dict[str, Any]]:
    hints = typing.get_type_hints(kind)
    return {field.name: _known(field, hints[field.name]) for field in dataclasses.fields(kind)}


def _known(field: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    """A plain default, and what moeref checks values by: a bool, a number, or a list of choices."""
    known: dict[str, Any] = {}
    made = field.default_factory is not dataclasses.MISSING
    default = field.default_factory() if made else field.default
    if type(default) in (bool, int, float, str, list, type(None)):
        known["default"] = default
    parts = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    if parts in ([bool], [int], [float]):
        known["type"] = parts[0].__name__
    if all(typing.get_origin(part) is typing.Literal for part in parts):
        known["choices"] = [value for part in parts for value in typing.get_args(part)]
    return known


def text() -> str:
    """The file's content: a line a field, so that a new version is a readable diff."""
    blocks = []
    for kind, known in fields().items():
        lines = [f"    {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
        blocks.append(f'  "{kind}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    (FOLDER / f"{minor()}.json").write_text(text(), encoding="utf-8")
