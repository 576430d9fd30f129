"""verl's converters as a target: the model is mbridge's, as verl has it by default, and the export its own.

`per_tensor_generator` is what its asynchronous trainers send: `one_step_off_policy` and `fully_async_policy` below
`verl/experimental`. Its other trainers send what mbridge exports, which is judged as `mbridge`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common, mbridge_calls, stand_ins

#: Packages whose `__init__` imports what a trainer needs (ray, tensordict), and a converter does not.
PACKAGES = ("verl", "verl.utils", "verl.models", "verl.models.mcore")
#: What the modules of the converters import and do not call. transformers 5 has no AutoModelForVision2Seq any more.
UNUSED = {"tensordict": (), "tensordict.tensorclass": ("NonTensorData",), "transformers": ("AutoModelForVision2Seq",)}
#: verl's own choice by architecture (`models/mcore/registry.py`).
CONVERTERS = {"qwen3_moe": "McoreToHFWeightConverterQwen3Moe", "mixtral": "McoreToHFWeightConverterMixtral"}
#: As its asynchronous trainers call it.
LAYER_NAMES = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1."}


class Verl(mbridge_calls.MbridgeCalls):
    """mbridge's `load_weights`, and `per_tensor_generator` as an actor calls it.

    verl has no option that pads a vocabulary. mbridge is asked to, so that cells with TP can be judged at all.
    """

    info = common.source_info("verl", "https://github.com/volcengine/verl/issues")
    claims = replace(
        common.CLAIMS,
        # Its converter of DeepSeek-V3 needs a model that mbridge cannot build with this megatron-core.
        families=frozenset(CONVERTERS),
    )

    def preload(self) -> None:
        """Import mbridge and the converters, without the packages around them."""
        super().preload()
        stand_ins.without_init("verl", PACKAGES)
        for name, held in UNUSED.items():
            module = sys.modules.setdefault(name, ModuleType(name))
            vars(module).update(dict.fromkeys(held, object))
        importlib.import_module("verl.utils.megatron_utils")
        importlib.import_module("verl.models.mcore.weight_converter")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        hf_config = common.hf_config(world)
        with super().open(cell, world) as session:
            chunks = session.export.models
            session.export.write = lambda: sent(hf_config, chunks)
            yield common.BridgeSession(export=session.export)


def sent(hf_config: Any, chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as an actor hands them to engines."""
    kinds: Any = importlib.import_module("verl.models.mcore.weight_converter")
    utils: Any = importlib.import_module("verl.utils.megatron_utils")
    converter = getattr(kinds, CONVERTERS[hf_config.model_type])(hf_config, chunks[0].config)
    stream: Iterator[tuple[str, Any]] = utils.per_tensor_generator(
        list(chunks), hf_config, converter, chunks[0].config, LAYER_NAMES
    )
    return stream


#: What `--target verl` names.
target = Verl
