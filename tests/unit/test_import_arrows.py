"""Who may import whom: the rooms of moeref from left to right, and the kit apart from the reference.

The rooms of the kit have a test of their own, `tests/kit/test_kit_arrows.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tests.arrows import arrows

ROOT = Path(__file__).parents[2]
KIT = "conformance/moeref_conformance"
#: The only module of the kit that imports the reference.
BRIDGE = PurePosixPath(KIT, "targets/moeref.py")

#: A room -> the rooms it may import. A new room gets its place here first.
ROOMS: dict[str, set[str]] = {
    "layout": set(),
    "seeds": {"layout"},
    "config": {"layout", "families", "dispatcher"},
    "dispatcher": {"layout"},
    "replay": {"layout", "dtypes", "dispatcher"},
    "families": {"layout"},
    "dtypes": set(),
    "torch_dtypes": {"dtypes"},
    "bridge": {"layout", "families", "dtypes", "torch_dtypes"},
    "exporter": {"layout", "families", "bridge", "dtypes", "torch_dtypes"},
    # How a model is built: made by the preflight, taken by the builder.
    "record": {"layout", "seeds", "families", "config", "dispatcher", "bridge", "dtypes"},
    "audit": {"bridge", "torch_dtypes"},
    # Of the rooms on its left it takes the type of a described tensor.
    "delta": {"bridge", "torch_dtypes"},
    "shards": {"layout", "families", "bridge", "torch_dtypes"},
    "sync": {"layout", "families", "bridge", "exporter"},
    "provenance": set(),
    "costs": {"layout", "families", "config", "dispatcher", "bridge", "dtypes"},
    "arguments": {"config"},
    # The preflight asks every room that is arithmetic.
    "check": {"layout", "seeds", "families", "config", "dispatcher", "bridge", "dtypes", "record", "costs"},
}
#: Rooms at the border import any room, and no room above imports one of them.
BORDERS = {"megatron", "vllm", "cli", "__main__"}
#: Distributions with one door into moeref.
DOORS = {"megatron": "megatron", "vllm": "vllm"}
#: Rooms that are arithmetic and data.
WITHOUT_TORCH = {"layout", "families", "provenance"}
#: (module, expression) -> why the module that is imported there is only known at run time.
RUN_TIME: dict[tuple[str, str], str] = {
    ("moeref.families", "import_module(f'.{found.name}', __name__)"): "every module of this room",
    ("moeref.dispatcher.select", "importlib.import_module(module)"): "packages of dispatcher backends, such as deep_ep",
}


def refusal(file: PurePosixPath, module: tuple[str, ...], name: str) -> str | None:
    """Why `module`, found at `file`, must not import `name`; None if it may."""
    top, *rest = name.split(".")
    if module[0] == "moeref_conformance":
        allowed = top != "moeref" or file == BRIDGE
        return None if allowed else "the kit imports the reference only in targets/moeref.py"
    room = module[1] if len(module) > 1 else ""
    if top == "moeref_conformance":
        return "the reference never imports the kit"
    if top in DOORS and room != DOORS[top]:
        return f"only moeref/{DOORS[top]} imports {top}"
    if top == "torch" and room in WITHOUT_TORCH:
        return f"moeref/{room} is arithmetic and data, without torch"
    if top != "moeref" or room in BORDERS or not rest:
        return None
    if rest[0] in BORDERS or (room in ROOMS and rest[0] in ROOMS and rest[0] not in ROOMS[room] | {room}):
        return f"moeref/{room} may import {', '.join(sorted(ROOMS.get(room, ()))) or 'no other room'}"
    return None


def violations(file: PurePosixPath, source: str) -> list[str]:
    """Broken arrows of one module; `file` is relative to the repository root.

    In moeref a name that is built at run time needs an entry of RUN_TIME; the kit's test has such a list of its own.
    """
    parts = file.with_suffix("").parts
    module = parts[parts.index("moeref_conformance") :] if str(file).startswith(KIT) else parts
    is_package = module[-1] == "__init__"
    module = module[:-1] if is_package else module
    found = []
    for arrow in arrows(module, is_package, source, ("moeref", "moeref_conformance")):
        if arrow.quoted and arrow.name.split(".")[1] not in ROOMS.keys() | BORDERS:
            continue  # a name of something else, such as the group of entry points `moeref.targets`
        if arrow.name and (why := refusal(file, module, arrow.name)):
            found.append(f"{file}:{arrow.line}: names {arrow.name}: {why}")
        elif not arrow.name and not _may_be_built(file, module, arrow.text):
            found.append(f"{file}:{arrow.line}: names a module at run time, by {arrow.text}")
    if module[0] == "moeref" and len(module) > 1 and module[1] not in ROOMS.keys() | BORDERS:
        found.append(f"{file}: moeref/{module[1]} has no place among the rooms in this test")
    return found


def _may_be_built(file: PurePosixPath, module: tuple[str, ...], text: str) -> bool:
    """Whether a module may be named by this expression at run time."""
    if module[0] == "moeref":
        return (".".join(module), text) in RUN_TIME
    return "moeref." not in text.replace("moeref_conformance.", "") or file == BRIDGE


MODULES = sorted(
    PurePosixPath(path.relative_to(ROOT).as_posix()) for top in ("moeref", KIT) for path in (ROOT / top).rglob("*.py")
)


@pytest.mark.parametrize("file", MODULES, ids=str)
def test_module_keeps_to_the_arrows(file: PurePosixPath) -> None:
    assert violations(file, (ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("moeref/layout.py", "import torch"),
        ("moeref/families/model.py", "def f():\n    from torch import nn"),
        ("moeref/layout.py", "from moeref import families"),
        ("moeref/layout/__init__.py", "from ..seeds import SEEDS"),
        ("moeref/families/common.py", "from moeref.bridge.units import Unit"),
        ("moeref/bridge/units.py", "from .. import exporter"),
        ("moeref/exporter/plan.py", "import moeref.sync"),
        ("moeref/replay/rows.py", "from moeref.bridge import units"),
        ("moeref/bridge/units.py", "import megatron.core"),
        ("moeref/exporter/plan.py", "from megatron.core import parallel_state"),
        ("moeref/exporter/plan.py", "import importlib\nimportlib.import_module('megatron.core')"),
        ("moeref/bridge/units.py", "from moeref.megatron import build"),
        ("moeref/megatron/build.py", "import vllm"),
        ("moeref/megatron/build.py", "from moeref_conformance import api"),
        ("moeref/__init__.py", "from moeref import megatron"),
        ("moeref/attic.py", ""),
        ("moeref/exporter/plan.py", "import importlib\nimportlib.import_module(f'megatron.{name}')"),
        ("moeref/exporter/plan.py", "import importlib\nimportlib.import_module(name)"),
        ("moeref/exporter/plan.py", "__import__(name)"),
        ("moeref/exporter/plan.py", "from importlib import import_module\nload = import_module"),
        ("moeref/exporter/plan.py", "NAME = f'moeref_conformance.{room}'"),
        ("moeref/exporter/plan.py", "NAME = 'moeref.sync.order'"),
        (f"{KIT}/contract/api.py", "from moeref.layout import Layout"),
        (f"{KIT}/oracles/placement.py", "from moeref import bridge"),
        (f"{KIT}/oracles/placement.py", "import importlib\nimportlib.import_module(f'moeref.{name}')"),
        (f"{KIT}/oracles/placement.py", "NAME = 'moeref.bridge.units'"),
        (f"{KIT}/targets/faulty.py", "import moeref.bridge.units as units"),
    ],
)
def test_violation_is_found(file: str, source: str) -> None:
    assert len(violations(PurePosixPath(file), source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("moeref/bridge/units.py", "import torch\nfrom moeref import families\nfrom .blocks import Block"),
        ("moeref/megatron/build.py", "from megatron.core import parallel_state\nfrom moeref.exporter import plan"),
        (f"{KIT}/targets/moeref.py", "from moeref.megatron import build\nfrom ..api import Cell"),
        (f"{KIT}/targets/faulty.py", "from moeref_conformance.resolve import moeref\nfrom . import moeref as good"),
        (f"{KIT}/contract/topology.py", "from megatron.core.parallel_state import RankGenerator"),
    ],
)
def test_legal_import_is_left_alone(file: str, source: str) -> None:
    assert violations(PurePosixPath(file), source) == []


def test_import_moeref_loads_no_framework() -> None:
    heavy = ["megatron", "vllm", "transformers", "moeref_conformance"]
    program = f"import sys, moeref; print(*[m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
