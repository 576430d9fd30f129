"""megatron-bridge (NVIDIA NeMo) as a target. It builds tasks by a collective, so it has neither a table nor a plan."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common

if TYPE_CHECKING:
    import torch


class _Weights:
    """The calls that move weights. Export takes its names from the checkpoint that the bridge has read."""

    def __init__(self, auto_bridge: Any, models: Sequence[Any]) -> None:
        self._auto_bridge, self._models = auto_bridge, list(models)
        self._bridge: Any = None

    def read(self, folder: str) -> None:
        """`AutoBridge.from_hf_pretrained` and `load_hf_weights`."""
        self._bridge = self._auto_bridge.from_hf_pretrained(folder)
        self._bridge.load_hf_weights(self._models)

    def write(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`export_hf_weights`, on every rank."""
        if self._bridge is None:
            raise RuntimeError("megatron-bridge exports by the names of the loaded checkpoint, and none was loaded")
        yield from self._bridge.export_hf_weights(self._models, show_progress=False)


class MegatronBridge:
    """The README's calls: `AutoBridge`, `to_megatron_provider`, `provide_distributed_model`, `*_hf_weights`."""

    info = common.info("megatron-bridge", "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues")
    claims = replace(
        common.CLAIMS,
        facets=frozenset({"export", "forward"}),
        families=frozenset(
            {"qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"}
        ),  # it has no Mixtral
        experts=frozenset({"grouped", "sequential"}),
        mtp=1,
    )

    def preload(self) -> None:
        """Import the bridge and its models."""
        importlib.import_module("megatron.bridge")

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        auto_bridge: Any = importlib.import_module("megatron.bridge").AutoBridge
        hf_config = common.hf_config(world)
        provider = auto_bridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
        dtype, bf16 = common.torch_dtype(cell), cell.dtype == "bfloat16"
        settings = {
            **common.ON_CPU,
            **common.parallel_settings(cell),
            "moe_grouped_gemm": cell.experts == "grouped",
            "moe_permute_fusion": False,  # this and the next need kernels of Transformer Engine
            "cross_entropy_loss_fusion": False,
            # Pads a vocabulary that TP does not divide, and no further: without TP it cannot load a padded one.
            "should_pad_vocab": True,
            "make_vocab_size_divisible_by": 1,
            **dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), dtype),
            "bf16": bf16,
            **common.delta_nets(cell.family),
        }
        for name, value in settings.items():
            setattr(provider, name, value)
        with common.groups(cell):
            provider.finalize()
            # Neither DDP nor Float16Module changes names or weights.
            models = provider.provide_distributed_model(
                wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, bf16=bf16
            )
            weights = _Weights(auto_bridge, models)
            yield common.BridgeSession(
                export=common.BridgeExport(models, read=weights.read, write=weights.write),
                forward=common.BridgeForward(models, cell, hf_config.vocab_size),
            )


#: What `--target megatron-bridge` names.
target = MegatronBridge
