"""What a bench needs and this machine may lack, and the facts of the machine that go with its figures."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from datetime import date

from moeref_conformance.contract.results import version_of
from moeref_conformance.plan.machine import Machine

#: Beside a GPU: packages, by the module they are imported as and by name.
PACKAGES = {"layers": ("transformer_engine", "Transformer Engine"), "exchange": ("deep_ep", "deep_ep")}
#: The least number of GPUs, where it is not one.
GPUS = {"exchange": 2}


def lacking(bench: str, here: Machine) -> str:
    """What `bench` needs and the machine lacks, as a reason; empty if nothing."""
    module, package = PACKAGES.get(bench, ("", ""))
    least = GPUS.get(bench, 1)
    missing = [package] if module and importlib.util.find_spec(module) is None else []
    if here.count < least:
        missing.append(f"{least} GPUs" if least > 1 else "a CUDA device")
    if missing:
        why = f": {here.why_not.get('gpu', 'no GPU for no known reason')}" if not here.count else ""
        return f"needs {' and '.join(missing)}{why}"
    if module and module not in here.has:
        return f"needs {package}, {here.why_not.get(module, 'which cannot be imported here')}"
    return ""


def about(here: Machine) -> dict[str, str]:
    """Device, versions, date and command, for the head of the table."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {name: version_of(name) or "not installed" for name in ("torch", "megatron-core", "transformers")}
    command = shlex.join(["pytest", *sys.argv[1:]])
    return {**here.versions, "Python": python, **versions, "date": date.today().isoformat(), "command": f"`{command}`"}
