"""slime's converters as a target: weights of Hugging Face into Megatron's modules, and its iterator over what it sends.

slime builds its model from command line arguments; here it is megatron-core's own, and only the converters are judged.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from moeref_conformance.contract.api import Cell, Claims, World
from moeref_conformance.targets.peers import common, plain_model

#: What slime's converters import of sglang, and never call without an engine.
SGLANG = {
    "sglang": (),
    "sglang.srt": (),
    "sglang.srt.utils": ("MultiprocessingSerializer",),
    "sglang.srt.utils.patch_torch": ("monkey_patch_torch_reductions",),
    "sglang.srt.weight_sync": (),
    "sglang.srt.weight_sync.tensor_bucket": ("FlattenedTensorBucket",),
}


class Slime:
    """`load_hf_weights`, and `HfWeightIteratorDirect` as actors call it."""

    info = common.source_info("slime", "https://github.com/THUDM/slime/issues")
    claims = Claims(
        facets=frozenset({"export"}),
        families=frozenset({"qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"}),
        backends=frozenset({"gloo"}),
        norms=frozenset({"fused"}),
        experts=frozenset({"grouped"}),
        has_plan=False,
        lends=True,
        receivers="all",
        mtp=1,
    )

    def preload(self) -> None:
        """Import the converters, with names in place of sglang's."""
        for name, held in SGLANG.items():
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(dict.fromkeys(held, lambda *_: None), __path__=[])
        accelerator: Any = importlib.import_module("slime.utils.accelerator")
        on_cpu = {name: lambda self, *_: "cpu" for name in accelerator.Accelerator.__abstractmethods__}
        accelerator.set_accelerator(type("OnCpu", (accelerator.Accelerator,), {**on_cpu, "name": "cpu"})())
        importlib.import_module("slime.backends.megatron_utils.hf_to_megatron")
        importlib.import_module("slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        hf_config = common.hf_config(world)
        with common.groups(cell):
            importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
            chunks = plain_model.build(hf_config, cell)
            models, args = [plain_model.Wrapped(chunk) for chunk in chunks], arguments(hf_config, cell)
            loader: Any = importlib.import_module("slime.backends.megatron_utils.hf_to_megatron")
            yield common.BridgeSession(
                export=common.BridgeExport(
                    chunks,
                    read=lambda folder: loader.load_hf_weights(args, models, folder),
                    write=lambda: sent(args, models, type(hf_config).__name__.lower()),
                )
            )


def arguments(hf_config: Any, cell: Cell) -> Namespace:
    """What the converters read of slime's command line."""
    shapes = {"kv_channels": None, "q_lora_rank": None, **plain_model.shapes(hf_config, cell)}
    return Namespace(
        **{**shapes, "num_query_groups": hf_config.num_key_value_heads},
        num_experts=shapes["num_moe_experts"],
        vocab_size=hf_config.vocab_size,
        padded_vocab_size=plain_model.padded_vocabulary(hf_config, cell),
        update_weight_buffer_size=512 * 2**20,  # its default
    )


def sent(args: Namespace, models: list[plain_model.Wrapped], model_name: str) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as an actor hands them to engines."""
    direct: Any = importlib.import_module("slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct")
    held = dict(direct.named_params_and_buffers(args, models))
    for chunk in direct.HfWeightIteratorDirect(args, models, model_name, None).get_hf_weight_chunks(held):
        yield from chunk


#: What `--target slime` names.
target = Slime
