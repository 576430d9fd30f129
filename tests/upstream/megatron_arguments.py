"""Megatron-LM's own parser, checks and config class on a CPU, for argument lists of any number of ranks.

For processes of their own: stand-ins for Transformer Engine and CUDA stay in it. `python -m
tests.upstream.megatron_arguments` prints what `moeref/check/readers/megatron_arguments.json` holds.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import json
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from moeref.check.readers.arguments import destination
from tests.upstream.own_groups import own_groups


def stand_in() -> None:
    """Let the packages count as installed that only a machine with GPUs has."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # as launchers set it
    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core  # noqa: F401

    cpu.install("cpu", "megatron")
    from moeref.megatron import construct

    construct.stand_in()


def parser() -> argparse.ArgumentParser:
    """The parser of Megatron-LM."""
    from megatron.training import arguments

    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))


def config(words: Sequence[str], world: int, changes: Mapping[str, Any]) -> Any:
    """The config that Megatron-LM makes of an argument list on `world` ranks. Raises what it raises.

    changes: what a framework sets in the parsed arguments before they are validated; `variable_seq_lengths` after it.
    """
    import torch
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    args = parser().parse_args(list(words))
    args.rank, args.world_size = 0, world
    # What a trainer needs besides a model.
    for name, value in {"micro_batch_size": 1, "seq_length": 4096, "max_position_embeddings": 4096, **changes}.items():
        if getattr(args, name, None) is None or name in changes:
            setattr(args, name, value)
    hopper = {"get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: mock.Mock(major=9)}
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.multiple(torch.cuda, **hopper):
        validate_args(args)
        args.variable_seq_lengths = changes.get("variable_seq_lengths", args.variable_seq_lengths)
        made = core_transformer_config_from_args(args)
    groups(made, world)
    return made


def groups(config: Any, world: int) -> None:
    """Make megatron-core's process groups of rank 0 for a config. Raises what megatron-core raises."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with own_groups(0):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tensor_model_parallel_size,
                pipeline_model_parallel_size=config.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
                context_parallel_size=config.context_parallel_size,
                expert_model_parallel_size=config.expert_model_parallel_size,
                expert_tensor_parallel_size=config.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
            )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def table() -> str:
    """The parser as JSON: flag -> kind, default and the destination where it is not the flag's own; a flag a line."""
    found = {
        flag: [_kind(action), _plain(action.default), action.dest][: 2 + (action.dest != destination(flag))]
        for action in parser()._actions
        for flag in action.option_strings
        if action.dest != "help"
    }
    entries = (f"{json.dumps(flag)}:{json.dumps(found[flag], separators=(',', ':'))}" for flag in sorted(found))
    lines = ",\n".join(entries)
    return f"{{\n{lines}\n}}\n"


def _kind(action: argparse.Action) -> str:
    switches = {"BooleanOptionalAction": "either", "_StoreTrueAction": "true", "_StoreFalseAction": "false"}
    if (kind := switches.get(type(action).__name__)) is not None:
        return kind
    name = getattr(action.type, "__name__", "str")
    if name not in ("int", "float", "str"):
        name = "literal" if name.endswith(("freq_type", "tuple_type")) else "str"
    return name if action.nargs in (None, "?") else f"{name} list"


def _plain(default: Any) -> Any:
    value = default.name if isinstance(default, enum.Enum) else default
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    stand_in()
    print(table(), end="")
