"""Reads verl's Hydra trees: `ppo_megatron_trainer` with overrides, in YAML files or in a script that calls `main_ppo`.

verl builds the policy's config from the model's own with mbridge or Megatron-Bridge and adds its override. MTP layers
are left out unless `model.mtp.enable` is set. Names and defaults: verl at b178a3cd56f5, mbridge at 10cb17f59dd0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeref.check.readers import provider
from moeref.check.readers.reading import OPTIMIZER, SIZES, STAGES, Reading, under
from moeref.check.readers.tree import (
    Names,
    Tree,
    batch,
    engine_returns_routes,
    only_megatron,
    ranks,
    read_all,
    sequence_parallel,
)
from moeref.check.report import CheckError, Problem
from moeref.check.value import Value
from moeref.families import Model

NAME = "verl"
PROGRAM = r"verl\.(?:trainer|experimental|recipe)\S*|recipe\.\S+|(?:.*/)?main_ppo\w*\.py"
_ACTOR = "actor_rollout_ref.actor."
_MEGATRON = f"{_ACTOR}megatron."
_OVERRIDE = f"{_MEGATRON}override_transformer_config."
_REPLAY, _MTP = f"{_ACTOR}router_replay.mode", "actor_rollout_ref.model.mtp.enable"
_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BRIDGE = (f"{_MEGATRON}use_mbridge", f"{_MEGATRON}vanilla_mbridge")
_DYNAMIC = f"{_ACTOR}use_dynamic_bsz"
_WORKER = "trainer.use_legacy_worker_impl"
_MODES = ("disabled", "R2", "R3")
#: `utils/config.py validate_config` divides all samples of a step over replicas and microbatches.
_BATCH = (f"{_ACTOR}ppo_micro_batch_size_per_gpu", "data.train_batch_size", "actor_rollout_ref.rollout.n")
#: `megatron_workers.py` makes the microbatches of these samples, a step of the optimizer.
_STEP = (f"{_ACTOR}ppo_mini_batch_size", "actor_rollout_ref.rollout.n")
_RANKS = ("trainer.nnodes", "trainer.n_gpus_per_node")

DEFAULTS: dict[str, Any] = {
    f"{_MEGATRON}tensor_model_parallel_size": 1,
    f"{_MEGATRON}pipeline_model_parallel_size": 1,
    f"{_MEGATRON}virtual_pipeline_model_parallel_size": None,
    f"{_MEGATRON}context_parallel_size": 1,
    f"{_MEGATRON}expert_model_parallel_size": 1,
    f"{_MEGATRON}expert_tensor_parallel_size": None,
    f"{_MEGATRON}sequence_parallel": True,
    f"{_MEGATRON}seed": 42,
    f"{_MEGATRON}dtype": "bfloat16",
    f"{_MEGATRON}use_mbridge": True,
    f"{_MEGATRON}vanilla_mbridge": True,
    f"{_OVERRIDE}recompute_granularity": None,
    f"{_OVERRIDE}recompute_modules": ["core_attn"],
    f"{_OVERRIDE}recompute_method": None,
    f"{_OVERRIDE}recompute_num_layers": None,
    f"{_OVERRIDE}attention_backend": "flash",
    _REPLAY: "disabled",
    _MTP: False,
    _DYNAMIC: False,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.rollout.n": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
NAMES = Names(
    layout=under(_MEGATRON, SIZES) | under(_OVERRIDE, STAGES),
    options={f"{_MEGATRON}seed": "seed"},
    settings=(_OVERRIDE,),
    fields={},
    model="actor_rollout_ref.model.path",
    unmapped={
        "actor_rollout_ref.model.lora_rank": "adapters",
        "actor_rollout_ref.model.lora.rank": "adapters",
        f"{_MEGATRON}override_mcore_model_config": "a config of its own",
        "actor_rollout_ref.model.external_lib": "code of its own",
    },
    read=frozenset(
        {
            *(_REPLAY, _MTP, _DYNAMIC, *_BATCH, *_STEP, *_BRIDGE, *_RANKS),
            *(f"{_MEGATRON}dtype", f"{_MEGATRON}sequence_parallel", f"{_ACTOR}strategy"),
        }
    ),
    training={
        **{f"{_ACTOR}optim.override_optimizer_config.{name}": name for name in OPTIMIZER},
        f"{_MEGATRON}use_distributed_optimizer": "use_distributed_optimizer",
        f"{_MEGATRON}override_ddp_config.grad_reduce_in_fp32": "grad_reduce_in_fp32",
    },
    elsewhere=(
        *("data.", "algorithm.", "critic.", "reward_model.", "reward_manager.", "custom_reward_function.", "trainer."),
        *("actor_rollout_ref.rollout.", "actor_rollout_ref.ref.", "actor_rollout_ref.model.", "global_profiler."),
        *("actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout", "ray_kwargs.", "transfer_queue."),
        *("defaults", "hydra", "async_training.", "rollout.", "reward."),
        # Of the actor, all but the part of Megatron; and of that, how it is kept and optimized.
        *(f"{_ACTOR}{name}" for name in ("ppo_", "use_", "clip_", "kl_", "entropy_", "loss_", "optim.", "checkpoint.")),
        *(f"{_ACTOR}{name}" for name in ("policy_loss.", "profiler.", "shuffle", "data_loader_seed", "load_weight")),
        *(f"{_ACTOR}{name}" for name in ("grad_clip", "router_replay.", "tis_", "rollout_n", "calculate_", "freeze_")),
        *(f"{_ACTOR}{name}" for name in ("_target_", "engine.", "model_config.", "fsdp_config.", "global_batch_info")),
        *(f"{_MEGATRON}{name}" for name in ("param_offload", "grad_offload", "optimizer_offload", "use_distributed")),
        *(f"{_MEGATRON}{name}" for name in ("use_dist_checkpointing", "dist_checkpointing", "override_ddp_config")),
        *(f"{_MEGATRON}{name}" for name in ("use_remove_padding", "forward_only", "load_weight", "_target_", "extra")),
    ),
)


def read(paths: Sequence[Path], given: Mapping[str, str], core: str) -> Reading:
    """The reading of YAML files and scripts, in order; dotted names in `given` are overrides."""
    reading, tree = read_all(NAME, paths, given, program=PROGRAM, defaults=DEFAULTS, names=NAMES)
    return _finished(reading, tree)


def _finished(reading: Reading, tree: Tree) -> Reading:
    """The reading after what verl derives."""
    at = tree.values
    strategy = at.get(f"{_ACTOR}strategy")
    only_megatron(strategy)
    if strategy is None:  # `ppo_megatron_trainer` has no such keys
        only_megatron(next((value for path, value in at.items() if path.startswith(f"{_ACTOR}fsdp_config.")), None))
    ranks(reading, at, *_RANKS)
    use, vanilla = (at[path] for path in _BRIDGE)
    # mbridge derives it from TP; Megatron-Bridge's provider gets what is asked for.
    sequence_parallel(reading, None if vanilla.value else at[f"{_MEGATRON}sequence_parallel"])
    batch(reading, at, *_BATCH, by_tokens=at[_DYNAMIC].value)
    _step(reading, at)
    if "etp" not in reading.layout and "tp" in reading.layout:
        reading.layout["etp"] = Value(
            reading.layout["tp"].name, reading.layout["tp"].value, "derived: as TP, where unset"
        )
    if (dtype := at[f"{_MEGATRON}dtype"]).value != "bfloat16":
        raise CheckError(f"{dtype.source}: {dtype.name}={dtype.value}: moeref knows bfloat16 only")
    reading.options["precision"] = Value(dtype.name, "bf16", dtype.source)
    _replay(reading, at[_REPLAY])
    if not at[_MTP].value:
        reading.settings["mtp_num_layers"] = Value(_MTP, None, at[_MTP].source)
    if not use.value:
        text = f"{use.name} ({use.source}): verl's own converter makes the config"
        reading.problems.append(Problem(NAME, text, refused=False))
    kind = provider.MBRIDGE if vanilla.value else provider.MEGATRON_BRIDGE
    _refusals(reading, at)
    own = {} if vanilla.value else provider.VERL_ON_MEGATRON_BRIDGE
    return provider.build(reading, kind, own, NAME)


def _step(reading: Reading, at: Mapping[str, Value]) -> None:
    """Put in the samples of a step, where they are given and decide something."""
    mini, times = (at.get(path) for path in _STEP)
    if mini is None:
        return
    if "global_batch_size" in reading.training and times and type(mini.value) is int:
        reading.step = Value(" · ".join(_STEP), mini.value * times.value, mini.source)
    else:
        reading.elsewhere.append(mini)


def _replay(reading: Reading, mode: Value) -> None:
    """Put the kind of replay in; verl refuses a kind that it does not know."""
    if not mode.known:
        reading.computed["replay"] = mode
    elif mode.value not in _MODES:
        text = f"{mode.name}={mode.value} ({mode.source}) is none of {', '.join(_MODES)}, and verl raises ValueError"
        fix = f"write {str(mode.value).upper()}" if str(mode.value).upper() in _MODES else f"write one of {_MODES}"
        reading.problems.append(Problem(NAME, text, fix))
    elif mode.value != "disabled":
        reading.options["replay"] = mode


def _refusals(reading: Reading, at: Mapping[str, Value]) -> None:
    """What verl's workers refuse. Its new ones, of `use_legacy_worker_impl=disable`, do not ask for a bridge."""
    mtp, bridge = at[_MTP], next((at[path] for path in _BRIDGE if at[path].value is False), None)
    new = at.get(_WORKER)
    legacy = not (new and new.value == "disable")
    if mtp.value and bridge and legacy:
        text = f"{mtp.name} ({mtp.source}) needs {bridge.name}=true ({bridge.source}): verl asserts it"
        reading.problems.append(Problem(NAME, text, f"set {bridge.name}=true, or leave MTP out"))
    if at[_REPLAY].value == "R3" and legacy:
        engine_returns_routes(reading, at, at[_REPLAY], _ROUTES)
    if mtp.value:
        reading.by_model.append(functools.partial(_without_mtp, mtp, legacy))


def _without_mtp(mtp: Value, legacy: bool, model: Model) -> Problem | None:
    """What is wrong with MTP of a model whose config has no such layers: the older workers assert that it has."""
    if model.mtp_layers:
        return None
    text = f"{mtp.name} ({mtp.source}): the config of {model.family} says no MTP layers, "
    text += "and verl asserts num_nextn_predict_layers above 0" if legacy else "so there are none to train"
    return Problem(NAME, text, "leave it out", refused=legacy)
