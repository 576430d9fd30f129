"""From what `--target` says to a checked `Target`.

`name` is looked up among the built-in targets (moeref and the bridges of `peers`) and the entry points of the group
`moeref.targets`; `faulty:<id>` among the deliberately wrong targets that prove the kit; `dump:DIR` is a folder of
records; `module:attr` is imported. What is found may be a target or a callable without arguments that makes one.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from moeref_conformance.contract.api import API_VERSION, FACETS, Claims, Info, Target
from moeref_conformance.contract.checks import BadInput, nearest
from moeref_conformance.targets.peers import PEERS

GROUP = "moeref.targets"
BUILTIN = {"moeref": "moeref_conformance.targets.moeref:target", **PEERS}
FAULTY = "moeref_conformance.selftest.faulty"


def names() -> dict[str, str]:
    """Every target name and the `module:attr` it stands for; an installed entry point wins over a built-in."""
    return BUILTIN | {point.name: point.value for point in entry_points(group=GROUP)}


def resolve(spec: str) -> Target:
    """The target `spec` names, with its `info`, `claims` and `open` checked.

    Raises `BadInput` for an unknown name (listing the known ones), a module or attribute that cannot be imported, and
    an object that is not a target (saying what is missing or of the wrong type).
    """
    if not spec:
        raise BadInput(f"no target given; known targets: {', '.join(sorted(names()))}; or give module:attr")
    if spec.startswith("faulty:"):
        faulty = _attribute(spec, FAULTY, "targets")
        fault = spec.removeprefix("faulty:")
        if fault not in faulty:
            raise BadInput(f"unknown fault {fault!r}{nearest(fault, faulty)}; all: {', '.join(sorted(faulty))}")
        return _checked(spec, faulty[fault])
    if spec.startswith("dump:"):
        from moeref_conformance.targets.dump import DumpTarget

        return _checked(spec, DumpTarget(Path(spec.removeprefix("dump:"))))
    if spec in names():
        module, _, attribute = names()[spec].partition(":")
    elif ":" in spec:
        module, _, attribute = spec.partition(":")
    else:
        raise BadInput(
            f"unknown target {spec!r}{nearest(spec, names())}; targets: {', '.join(sorted(names()))}, faulty:<id>, "
            "or module:attr"
        )
    return _checked(spec, _attribute(spec, module, attribute))


def _attribute(spec: str, module: str, attribute: str) -> Any:
    if not module or not attribute:
        raise BadInput(f"target {spec!r}: expected module:attr")
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"target {spec!r}: cannot import {module}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise BadInput(f"target {spec!r}: {module} has no {attribute!r}{nearest(part, vars(value))}")
        value = getattr(value, part)
    return value


def _checked(spec: str, found: Any) -> Target:
    if isinstance(found, type) or (callable(found) and not hasattr(found, "open")):
        try:
            found = found()
        except TypeError as error:
            raise BadInput(f"target {spec!r}: {found!r} cannot be called without arguments: {error}") from error
    wrong = []
    for name, kind in (("info", Info), ("claims", Claims)):
        if not hasattr(found, name):
            wrong.append(f"{name!r} is missing")
        elif not isinstance(getattr(found, name), kind):
            wrong.append(f"{name!r} is a {type(getattr(found, name)).__name__}, not an api.{kind.__name__}")
    if not callable(getattr(found, "open", None)):
        wrong.append("'open(cell, world)' is missing")
    if wrong:
        raise BadInput(f"target {spec!r} ({type(found).__name__}) is not a target: {'; '.join(wrong)}")
    if found.info.api != API_VERSION:
        raise BadInput(f"target {spec!r} speaks API {found.info.api}; this kit speaks {API_VERSION}")
    for facet in sorted(found.claims.facets - set(FACETS)):
        raise BadInput(f"target {spec!r} claims an unknown facet {facet!r}{nearest(facet, FACETS)}")
    return cast(Target, found)
