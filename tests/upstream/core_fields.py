"""Fields of the installed megatron-core's TransformerConfig as moeref/config/fields/ holds them.

`python tests/upstream/core_fields.py` writes the file of the installed version; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import megatron.core
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

FOLDER = Path(__file__).parents[2] / "moeref" / "config" / "fields"


def minor() -> str:
    """The installed version without its patch level."""
    return ".".join(megatron.core.__version__.split(".")[:2])


def fields() -> dict[str, dict[str, Any]]:
    """Class name -> field name -> what is known of it; of MLATransformerConfig what differs from its base."""
    plain, mla = _of(TransformerConfig), _of(MLATransformerConfig)
    further = {name: known for name, known in mla.items() if plain.get(name) != known}
    assert plain.keys() <= mla.keys()
    return {"TransformerConfig": plain, "MLATransformerConfig": further}


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
