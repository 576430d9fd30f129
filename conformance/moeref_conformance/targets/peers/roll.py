"""ROLL's mcore_adapter as a target: it builds the model and loads it. ROLL's own weight updates send it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from moeref_conformance.contract.api import Cell, World
from moeref_conformance.targets.peers import common, plain_model, stand_ins

#: The one module of ROLL that is read, and what neither it nor mcore_adapter's models need.
READ = ("roll.third_party.megatron.model_update",)
ABSENT = ("ray", "mcore_adapter.trainer")


class Roll:
    """`AutoModel` of mcore_adapter, and `gather_all_hf_weights`, which ROLL's weight updates are made of.

    mcore_adapter pads no vocabulary: it is given one that TP divides, so that cells with TP can be judged at all.
    """

    info = common.source_info("roll", "https://github.com/alibaba/ROLL/issues")
    claims = replace(
        common.CLAIMS,
        facets=frozenset({"export", "forward"}),
        families=frozenset({"qwen3_moe", "glm4_moe", "deepseek_v3", "mixtral"}),
        mtp=1,
        dispatchers=frozenset({"alltoall", "allgather"}),
    )

    def preload(self) -> None:
        """Import mcore_adapter, and the one module of ROLL."""
        stand_ins.read_alone("roll", READ, ABSENT)
        importlib.import_module("mcore_adapter.models")
        platforms: Any = importlib.import_module("mcore_adapter.platforms")  # ROLL has the same of its own
        vars(importlib.import_module("roll.third_party.megatron.model_update"))["current_platform"] = (
            platforms.current_platform
        )

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[common.BridgeSession]:
        """Build the model of one rank."""
        rows = common.hf_config(world).vocab_size
        with common.groups(cell):
            models = model(str(world.hf_config), arguments(cell))
            chunks = list(models)
            read = plain_model.padding(lambda folder: load(models, folder), rows, cell.layout.tp)
            yield common.BridgeSession(
                export=common.BridgeExport(chunks, read=read, write=lambda: sent(chunks, rows)),
                forward=common.BridgeForward(chunks, cell, rows),
            )


def arguments(cell: Cell, **more: Any) -> Any:
    """The arguments that decide the model: the layout, the dtype, what a CPU needs, and more settings by name."""
    home: Any = importlib.import_module("mcore_adapter.training_args")
    settings = {**common.ON_CPU, **common.parallel_settings(cell), "mtp_num_layers": cell.mtp or 0, **more}
    settings |= {"params_dtype": common.torch_dtype(cell), "moe_grouped_gemm": True}
    known = home.DistributingParallelArguments.__dataclass_fields__
    asked = home.DistributingParallelArguments(
        **{name: value for name, value in settings.items() if name in known},
        additional_configs={name: value for name, value in settings.items() if name not in known},
    )
    asked.seed, asked.bf16 = 1, cell.dtype == "bfloat16"
    return asked


def model(folder: str, asked: Any) -> Any:
    """The model of one rank, with random weights; its vocabulary is padded to a multiple of TP."""
    home: Any = importlib.import_module("mcore_adapter.models")
    config = home.AutoConfig.from_pretrained(folder, asked)
    config.padded_vocab_size += -config.padded_vocab_size % config.tensor_model_parallel_size
    return home.AutoModel.from_config(config)


def load(models: Any, folder: str) -> None:
    """`from_pretrained` into the model that is there, in place of one that it would build."""
    factory: Any = importlib.import_module("mcore_adapter.models.model_factory")
    kind, config = type(models[0]), models.config
    with (
        mock.patch.object(factory, "VirtualModels", return_value=models),
        mock.patch.object(kind.config_class, "from_pretrained", return_value=config),
    ):
        kind.from_pretrained(folder, use_cpu_initialization=config.use_cpu_initialization)


def sent(models: list[Any], rows: int | None = None) -> Iterator[tuple[str, Any]]:
    """Names and tensors, as every rank has them before it hands them to engines, less the rows that `read` added."""
    updates: Any = importlib.import_module("roll.third_party.megatron.model_update")
    every = updates.gather_weights_meta_cross_pp(models)
    for bucket in updates.gather_all_hf_weights(models, common.BUCKET, weights_meta=every):
        for name, tensor in bucket:
            yield name, tensor[:rows] if name in plain_model.VOCABULARY else tensor


#: What `--target roll` names.
target = Roll
