"""Who may import whom in the kit: its rooms, names built at run time, no circle of modules, and no assert."""

from __future__ import annotations

import ast
import functools
from pathlib import Path, PurePosixPath

import pytest

from tests.arrows import Arrow, arrows, circles

KIT = "moeref_conformance"
ROOT = Path(__file__).parents[2] / "conformance" / KIT

#: A room, or a module beside the rooms -> the rooms it may import. A new one gets its place here first.
ROOMS: dict[str, set[str]] = {
    "contract": set(),
    "api": {"contract"},
    "strategies": {"contract"},
    "arguments": {"contract"},
    # What adapters and recorded runs may call on a CPU.
    "authors": {"worlds", "targets"},
    "steps": {"contract"},
    "oracles": {"contract"},
    "diagnosis": set(),
    "judges": {"contract", "oracles", "diagnosis"},
    "report": {"contract"},
    # The adapter to start from imports what any author imports.
    "targets": {"contract", "api"},
    "selftest": {"contract", "targets"},
    "resolve": {"contract", "targets", "selftest"},
    "plan": {"contract"},
    "worlds": {"contract", "steps", "resolve", "targets"},
    # `run.shards` compares two targets, rank by rank, by steps of its own.
    "run": {"contract", "plan", "judges", "oracles", "worlds", "steps", "resolve", "targets"},
    "cli": {"arguments", "contract", "plan", "run", "report", "worlds", "oracles", "resolve", "targets"},
    "plugin": {"contract", "plan", "run"},
    "cases": {"contract", "run", "report", "plugin"},
    "__main__": {"cli"},
}
#: (module, expression) -> why the module that is imported there is only known at run time.
DOORS: dict[tuple[str, str], str] = {
    ("judges", "importlib.import_module(f'{__name__}.{module.name}')"): "every module of this room",
    ("steps.facet", "importlib.import_module(f'{__package__}.{name}')"): "the module of every facet in this room",
    ("plan.machine", "importlib.import_module(module)"): "packages that a cell needs, such as deep_ep",
    ("resolve", "importlib.import_module(module)"): "the target that the user names",
    ("targets.moeref", "importlib.import_module(f'moeref.{name}')"): "the bridge to the reference",
    (
        "targets.peers",
        "f'moeref_conformance.targets.peers.{name.replace('-', '_')}:target'",
    ): "adapters of this room",
    ("targets.peers.mcore_bridge", "importlib.import_module(module)"): "the peer's package",
    ("worlds.fork_server", "importlib.import_module(module)"): "packages that ranks find imported",
    ("worlds.fork_server", "pkgutil.resolve_name(entry)"): "what a rank runs, which the world is told",
}


#: (module, name) -> why a room may be passed by.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def located(file: PurePosixPath) -> tuple[tuple[str, ...], bool]:
    """The dotted name of a file below ROOT, and whether it is a package."""
    parts = file.with_suffix("").parts
    return (parts[:-1], True) if parts[-1] == "__init__" else (parts, False)


@functools.cache
def named(file: PurePosixPath, source: str) -> tuple[Arrow, ...]:
    """The arrows of one module of the kit."""
    module, is_package = located(file)
    return tuple(arrows((KIT, *module), is_package, source, (KIT, "moeref")))


def violations(file: PurePosixPath, source: str) -> list[str]:
    """Arrows of one module that no room may have, and names built at run time that no door lists."""
    module, _ = located(file)
    name = ".".join(module)
    room = module[0] if module else ""
    found = [] if room in ROOMS or not module else [f"{file}: {room} has no place among the rooms in this test"]
    for arrow in named(file, source):
        top, *rest = arrow.name.split(".")
        if not arrow.name and (name, arrow.text) not in DOORS:
            found.append(f"{file}:{arrow.line}: names a module at run time, by {arrow.text}")
        elif (name, arrow.name) in EXCEPTIONS:
            continue
        elif top == KIT and rest and rest[0] in ROOMS and rest[0] not in ROOMS.get(room, set()) | {room}:
            allowed = ", ".join(sorted(ROOMS.get(room, ()))) or "no other room"
            found.append(f"{file}:{arrow.line}: names {arrow.name}; {room or KIT} may import {allowed}")
    return found


FILES = sorted(PurePosixPath(path.relative_to(ROOT).as_posix()) for path in ROOT.rglob("*.py"))


def text(file: PurePosixPath) -> str:
    """The source of a module."""
    return (ROOT / file).read_text(encoding="utf-8")


def graph() -> dict[str, set[str]]:
    """Module -> modules of the kit that it imports, also inside functions. A package stands for its `__init__`."""
    modules = {".".join((KIT, *located(file)[0])) for file in FILES}
    found: dict[str, set[str]] = {}
    for file in FILES:
        mine = ".".join((KIT, *located(file)[0]))
        names = {arrow.name for arrow in named(file, text(file)) if not arrow.quoted}
        # `from package.module import name` imports the module, `from package import module` the module too.
        found[mine] = {n if n in modules else n.rpartition(".")[0] for n in names} & modules - {mine}
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_module_keeps_to_the_arrows(file: PurePosixPath) -> None:
    assert violations(file, text(file)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(graph()) == []


def test_rooms_have_no_circle() -> None:
    assert circles(ROOMS) == []


def test_every_arrow_between_rooms_is_used() -> None:
    used: dict[str, set[str]] = {room: set() for room in ROOMS}
    for file in FILES:
        room = "".join(located(file)[0][:1])
        for arrow in named(file, text(file)):
            top, *rest = arrow.name.split(".")
            excepted = (".".join(located(file)[0]), arrow.name) in EXCEPTIONS
            if room and top == KIT and rest and rest[0] in ROOMS.keys() - {room} and not excepted:
                used[room].add(rest[0])
    assert used == ROOMS


def test_no_verdict_hangs_on_an_assert() -> None:
    """`python -O` leaves them out."""
    found = [str(file) for file in FILES if any(isinstance(n, ast.Assert) for n in ast.walk(ast.parse(text(file))))]
    assert found == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]


def test_every_room_and_every_door_is_there() -> None:
    have = {located(file)[0][0] for file in FILES if located(file)[0]}
    built = {
        (".".join(located(file)[0]), arrow.text)
        for file in FILES
        for arrow in named(file, text(file))
        if not arrow.name
    }
    assert set(ROOMS) == have
    assert set(DOORS) == built


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("contract/api.py", "from moeref_conformance.oracles import placement"),
        ("contract/api.py", "from ..judges import Case"),
        ("contract/records.py", "def f():\n    from moeref_conformance.steps import run"),
        ("steps/seeds.py", "from moeref_conformance.oracles.placement import Placement"),
        ("oracles/dispatch.py", "import moeref_conformance.steps.run"),
        ("judges/config.py", "from moeref_conformance.steps import config"),
        ("judges/config.py", "from moeref_conformance import plan"),
        ("plan/plan.py", "import importlib\nimportlib.import_module('moeref_conformance.oracles.checkpoint')"),
        ("plan/plan.py", "import importlib\nimportlib.import_module('moeref_conformance.' + room)"),
        ("plan/plan.py", "import importlib\nimportlib.import_module(f'{package}.oracles')"),
        ("plan/plan.py", "NAME = f'moeref_conformance.{room}'"),
        ("plan/plan.py", "ENTRY = 'moeref_conformance.worlds.rank:main'"),
        ("plan/plan.py", "__import__(name)"),
        ("plan/plan.py", "from importlib import import_module\nload = import_module"),
        ("plan/plan.py", "from importlib import import_module as load"),
        ("plan/plan.py", "import importlib\ngetattr(importlib, 'import_module')(name)"),
        ("plan/plan.py", "exec('import ' + name)"),
        ("report/view.py", "import pkgutil\npkgutil.resolve_name(name)"),
        ("attic.py", ""),
        ("attic/room.py", ""),
    ],
)
def test_violation_is_found(file: str, source: str) -> None:
    assert len(violations(PurePosixPath(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("judges/config.py", "from moeref_conformance.oracles import settings\nfrom . import common"),
        ("worlds/forked.py", "ENTRY = 'moeref_conformance.steps.run:run_rank'"),
        ("plan/machine.py", "import importlib\nimportlib.import_module('deep_ep')"),
        ("contract/api.py", '"""See moeref_conformance.oracles."""'),
        ("contract/api.py", "PREFIX = 'moeref-conformance-'\nTEXT = f'{PREFIX}.json'"),
    ],
)
def test_legal_import_is_left_alone(file: str, source: str) -> None:
    assert violations(PurePosixPath(file), source) == []
