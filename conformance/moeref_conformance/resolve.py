"""From `--target` to a checked target.

The built-in names are those of `BUILTIN`; installed packages add theirs as entry points of the group `moeref.targets`.
`faulty:<id>` is a deliberately wrong target that proves the kit, `benign:<id>` a correct one of another design,
`dump:DIR` a folder of records, and anything else `module:attr`: a target, or a callable without arguments that makes
one.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from moeref_conformance.contract.api import API_VERSION, FACETS, Claims, Info, Target
from moeref_conformance.contract.cells import ADAPTER_MODULES, DESIGNS, LIMITED
from moeref_conformance.contract.checks import BadInput, check_known, check_name, nearest, similar
from moeref_conformance.contract.rules import judged_facets
from moeref_conformance.targets.peers import PEERS

GROUP = "moeref.targets"
#: What the name of a dump begins with; its folder follows.
DUMP = "dump:"
#: Target name -> `module:attr`.
BUILTIN = {"moeref": "moeref_conformance.targets.moeref:target", **PEERS}
#: Targets of the kit's own proof, by what comes before the colon: a module with `targets` by id.
SELFTEST = {"faulty": "moeref_conformance.selftest.faulty", "benign": "moeref_conformance.selftest.benign"}


def names() -> dict[str, str]:
    """Every target name with its `module:attr`. An installed entry point wins over a built-in name."""
    return BUILTIN | {point.name: point.value for point in entry_points(group=GROUP)}


def resolve(spec: str) -> Target:
    """The target that `spec` names, with its `info`, `claims` and `open` checked.

    Raises `BadInput` for an unknown name, a module or attribute that cannot be imported, and an object that is not a
    target, saying what it lacks.
    """
    if spec.startswith(DUMP):
        from moeref_conformance.targets.dump import DumpTarget

        return _checked(spec, DumpTarget(Path(spec.removeprefix(DUMP))))
    place = located(spec)
    if spec.partition(":")[0] in SELFTEST:
        return _checked(spec, _of_the_selftest(spec))
    module, _, attribute = place.partition(":")
    return _checked(spec, _attribute(spec, module, attribute))


def located(spec: str) -> str:
    """The `module:attr` that `spec` names, or `spec` itself. Imports nothing. Raises `BadInput` for an unknown name."""
    if not spec:
        raise BadInput(f"no target given; known targets: {', '.join(sorted(names()))}; or give module:attr")
    place = names().get(spec, spec)
    if ":" not in place:
        is_module = Path(*spec.split(".")).with_suffix(".py").is_file()
        meant = f"; did you mean '{spec}:target'?" if is_module else nearest(spec, names()).partition("; known")[0]
        every = ", ".join([*sorted(names()), "faulty:<id>", "benign:<id> or module:attr"])
        raise BadInput(f"unknown target {spec!r}{meant}; targets: {every}")
    return place


def adapter(spec: str) -> str:
    """The module of a user's target; empty for the kit's own and where `spec` names none."""
    place = names().get(spec, spec)
    module, colon, _ = place.partition(":")
    own = place in BUILTIN.values() or module in (*SELFTEST, DUMP.rstrip(":"))
    return module if colon and not own else ""


def _of_the_selftest(spec: str) -> Any:
    kind, _, name = spec.partition(":")
    targets = _attribute(spec, SELFTEST[kind], "targets")
    if kind == "benign" and name not in targets:
        raise BadInput(
            f"unknown benign target {name!r}{similar(name, targets)}; selftest/benign.py has all {len(targets)}"
        )
    return targets[name]  # of an unknown fault this raises itself


def _attribute(spec: str, module: str, attribute: str) -> Any:
    if not module or not attribute:
        raise BadInput(f"target {spec!r}: expected module:attr")
    value = imported(spec, module)
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = [name for name in vars(value) if not name.startswith("_")]
            raise BadInput(f"target {spec!r}: {module} has no {attribute!r}{nearest(part, public)}")
        value = getattr(value, part)
    return value


def imported(spec: str, module: str) -> Any:
    """The module of a target. Raises `BadInput` with whatever its import raises, and where."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadInput(f"target {spec!r}: cannot import {module}: {error}") from error
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = "" if isinstance(error, SyntaxError) else f", at {frame.filename}:{frame.lineno}"
        raise BadInput(f"target {spec!r}: importing {module} raises {type(error).__name__}: {error}{at}") from error


def _checked(spec: str, candidate: Any) -> Target:
    """`candidate`, or what it makes if it is a callable, once it has been checked to be a target."""
    if isinstance(candidate, type) or (callable(candidate) and not hasattr(candidate, "open")):
        try:
            candidate = candidate()
        except TypeError as error:
            raise BadInput(f"target {spec!r}: {candidate!r} cannot be called without arguments: {error}") from error
    if wrong := _wrong(candidate):
        raise BadInput(f"target {spec!r} ({type(candidate).__name__}) is not a target: {'; '.join(wrong)}")
    if badly := _badly_typed(candidate.info) + _badly_typed(candidate.claims):
        raise BadInput(f"target {spec!r}: {'; '.join(badly)}")
    if candidate.info.api != API_VERSION:
        raise BadInput(f"target {spec!r} speaks API {candidate.info.api}; this kit speaks {API_VERSION}")
    check_name(f"target {spec!r}: info.name", candidate.info.name)
    _check_claims(f"target {spec!r}", candidate.claims)
    return cast(Target, candidate)


def _check_claims(where: str, claims: Claims) -> None:
    """Raise `BadInput` for a name or a value in `claims` that the kit does not know or that no rule judges."""
    for facet in sorted(claims.facets - set(FACETS)):
        raise BadInput(f"{where} claims an unknown facet {facet!r}{nearest(facet, FACETS)}")
    for facet in sorted(claims.facets - judged_facets()):
        raise BadInput(f"{where} claims the facet {facet!r}, which no rule judges")
    for name, choices in DESIGNS.items():
        if (value := getattr(claims, name)) not in choices:
            raise BadInput(f"{where} claims {name}={value!r}, not one of {', '.join(map(repr, choices))}")
    check_known(f"{where}: claims", "linear in adapter_modules", sorted(claims.adapter_modules), ADAPTER_MODULES)
    for key in sorted(claims.limits):
        family, _, field = key.rpartition(".")
        check_known(f"{where}: claims.limits: {key!r}", "field", [field], LIMITED)
        check_known(f"{where}: claims.limits: {key!r}", "family", [family] if family else [], claims.families)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: What a field of `Info` and `Claims` may hold, by its annotation.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _is_count,
    "frozenset[str]": lambda value: isinstance(value, frozenset | set) and all(isinstance(v, str) for v in value),
    "Mapping[str, int]": lambda value: isinstance(value, Mapping) and all(map(_is_count, value.values())),
}


def _badly_typed(told: Info | Claims) -> list[str]:
    """What is wrong with the types of a target's facts: 1 is no bool, and True and 1.0 are no numbers."""
    pairs = [(field, getattr(told, field.name)) for field in fields(told)]
    where = type(told).__name__.lower()
    return [f"{where}.{f.name} is {value!r}, not {f.type}" for f, value in pairs if not _FITS[str(f.type)](value)]


def _wrong(candidate: Any) -> list[str]:
    """What `candidate` lacks to be a target."""
    wrong = []
    for name, kind in (("info", Info), ("claims", Claims)):
        if not hasattr(candidate, name):
            wrong.append(f"{name!r} is missing")
        elif not isinstance(getattr(candidate, name), kind):
            wrong.append(f"{name!r} is a {type(getattr(candidate, name)).__name__}, not an api.{kind.__name__}")
    if not callable(getattr(candidate, "open", None)):
        wrong.append("'open(cell, world)' is missing")
    return wrong
