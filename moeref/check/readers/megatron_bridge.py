"""Reads Megatron-Bridge's recipes by name, with overrides such as `model.tensor_model_parallel_size=2`.

`megatron_bridge_recipes.json` has what a recipe sets in the provider on H100s; what it computes is written out. Read at
067f987df03b.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref.check.readers import provider
from moeref.check.readers.reading import SIZES, STAGES, Reading, under
from moeref.check.readers.tree import Names, Tree
from moeref.check.report import CheckError
from moeref.check.value import Value
from moeref.config.errors import nearest

NAME = "Megatron-Bridge"
NAMES = Names(
    layout=under("model.", SIZES | STAGES),
    options={"rng.seed": "seed"},
    settings=("model.",),
    fields={},
    model="hf_path",
    unmapped={"peft": "adapters", "model.fine_grained_activation_offloading": "activations are offloaded"},
    read=frozenset({"ranks", "model.seq_length"}),
    elsewhere=(
        *("train.", "validation.", "dataset.", "tokenizer.", "optimizer.", "scheduler.", "checkpoint.", "logger."),
        *("dist.", "ddp.", "comm_overlap.", "profiling.", "mixed_precision", "rerun_state_machine.", "ft."),
    ),
)


@functools.cache
def recipes() -> dict[str, dict[str, Any]]:
    """Name without `_config` -> model, ranks, file and settings."""
    text = files("moeref.check.readers").joinpath("megatron_bridge_recipes.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of one recipe; `given` are overrides, and `ranks=N` another number of ranks than the recipe's."""
    name = str(paths[0]).removesuffix("_config")
    if len(paths) > 1 or name not in recipes():
        raise CheckError(f"{name!r} is no recipe{nearest(name, recipes())}; known are {', '.join(recipes())}")
    recipe = recipes()[name]
    reading, tree = Reading(NAME), Tree()
    source = f"recipe {name}"
    for field, value in recipe["settings"].items():
        tree.values[f"model.{field}"] = Value(f"model.{field}", value, source)
    tree.values["hf_path"] = Value("hf_path", recipe["model"], source)
    tree.values["rng.seed"] = Value("rng.seed", 1234, f"default of {NAME}")
    tree.given(given)
    NAMES.sort(tree, reading)
    reading.layout["world"] = _world(recipe, given, source)
    etp, ep = reading.layout.get("etp"), reading.layout.get("ep")
    if etp is None and ep is not None and type(ep.value) is int and ep.value > 1:
        reading.layout["etp"] = Value("expert_tensor_parallel_size", 1, "derived: 1 where EP is above 1")
    reading.options["precision"] = Value("mixed_precision", "bf16", source)
    return provider.build(reading, provider.MEGATRON_BRIDGE, {}, NAME)


def _world(recipe: Mapping[str, Any], given: Mapping[str, str], source: str) -> Value:
    if "ranks" not in given:
        return Value("ranks", recipe["ranks"], source)
    if not given["ranks"].isdecimal():
        raise CheckError(f"ranks={given['ranks']}: a whole number of ranks")
    return Value("ranks", int(given["ranks"]), "command line")
