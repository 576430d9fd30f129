"""Asks megatron-core itself: its config class is constructed with the effective settings, in a process of its own.

The process imports torch and megatron-core, which takes seconds. So a check starts it only where no rule speaks of a
setting, or where it is asked to.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from moeref.config import EffectiveSettings
from moeref.config.settings import ATTRIBUTES
from moeref.dispatcher.setup import minor_version
from moeref.families import Model

#: Seconds after which the process is given up.
LIMIT = 120
_PROGRAM = Path(__file__).parents[1] / "megatron" / "construct.py"


@dataclass(frozen=True)
class Answer:
    """What megatron-core says. `unavailable` is why it could not be asked; then the rest is empty."""

    core: str = ""
    refusal: str = ""
    stand_ins: tuple[str, ...] = ()
    unavailable: str = ""


def ask(model: Model, settings: EffectiveSettings, core: str) -> Answer:
    """Construct the config of `model` with these settings in the installed megatron-core, if it is a `core`."""
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return Answer(unavailable="megatron-core is not installed")
    if minor_version(installed) != minor_version(core):
        return Answer(unavailable=f"the installed megatron-core is {installed}, not {minor_version(core)}")
    given = {name: s.value for name, s in settings.by_name.items() if s.origin != "provider default"}
    try:
        request = json.dumps(
            {
                "kind": "MLATransformerConfig" if model.mla else "TransformerConfig",
                "values": {name: value for name, value in given.items() if name not in ATTRIBUTES},
                "activation": "quick_gelu" if model.clamp else "silu",
                "dtype": model.param_dtype,
            }
        )
    except (TypeError, ValueError) as error:
        return Answer(unavailable=f"a setting is no plain value ({error})")
    return _asked(request)


def _asked(request: str) -> Answer:
    # -P: modules beside the program must not be found in place of installed ones.
    command = [sys.executable, "-P", str(_PROGRAM)]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=LIMIT, check=False)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Answer(unavailable=f"megatron-core took more than {LIMIT} s")
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Answer(unavailable=f"megatron-core could not be imported ({said})")
    return Answer(answer["core"], answer["refusal"], tuple(answer["stand_ins"]))
