"""Reads verl's Hydra trees: `ppo_trainer` with overrides, in YAML files or in a script that calls `main_ppo`.

verl builds the policy's config from the model's own with Megatron-Bridge or mbridge and adds its override. MTP layers
are left out unless `model.mtp.enable` is set. Names and defaults: verl at 1dda039b9c63, mbridge at 10cb17f59dd0.
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
    chosen_backend,
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
_REPLAY, _MTP = f"{_MEGATRON}router_replay.mode", "actor_rollout_ref.model.mtp.enable"
#: What workers before those of engines read in its place.
_OLD_REPLAY = f"{_ACTOR}router_replay.mode"
_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BRIDGE = (f"{_MEGATRON}use_mbridge", f"{_MEGATRON}vanilla_mbridge")
_DYNAMIC = f"{_ACTOR}use_dynamic_bsz"
_ENGINE = "model_engine"
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
    f"{_MEGATRON}vanilla_mbridge": False,
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
        f"{_MEGATRON}use_megatron_fsdp": "Megatron-FSDP",
        f"{_MEGATRON}dynamic_context_parallel": "groups of context parallelism change with the batch",
        f"{_MEGATRON}qat.enable": "weights are rounded in training",
        f"{_ACTOR}qat.enable": "weights are rounded in training",
        f"{_MEGATRON}pad_to_length": "packed sequences are padded to a bucket",
    },
    read=frozenset(
        {
            *(_REPLAY, _OLD_REPLAY, _MTP, _DYNAMIC, _ENGINE, *_BATCH, *_STEP, *_BRIDGE, *_RANKS),
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
        *("defaults", "hydra", "async_training.", "rollout.", "reward.", "distillation."),
        # Of the actor, all but the part of Megatron; and of that, how it is kept and optimized.
        *(f"{_ACTOR}{name}" for name in ("ppo_", "use_", "clip_", "kl_", "entropy_", "loss_", "optim.", "checkpoint.")),
        *(f"{_ACTOR}{name}" for name in ("policy_loss.", "profiler.", "shuffle", "data_loader_seed", "load_weight")),
        *(f"{_ACTOR}{name}" for name in ("grad_clip", "router_replay.", "tis_", "rollout_n", "calculate_", "freeze_")),
        *(f"{_ACTOR}{name}" for name in ("_target_", "engine.", "model_config.", "fsdp_config.", "global_batch_info")),
        *(f"{_ACTOR}{name}" for name in ("qat.", "entropy_from_logits")),
        *(f"{_MEGATRON}{name}" for name in ("param_offload", "grad_offload", "optimizer_offload", "use_distributed")),
        *(f"{_MEGATRON}{name}" for name in ("use_dist_checkpointing", "dist_checkpointing", "override_ddp_config")),
        *(f"{_MEGATRON}{name}" for name in ("use_remove_padding", "forward_only", "load_weight", "_target_", "extra")),
        *(
            f"{_MEGATRON}{name}"
            for name in ("entropy_from_logits", "dist_ckpt_", "distrib_optim_", "pad_bshd_", "qat.")
        ),
        *(
            f"{_MEGATRON}{name}"
            for name in ("router_replay.", "max_seqlen_per_", "pad_to_length_", "use_fused_kernels")
        ),
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
    only_megatron(at.get(_ENGINE))
    chosen_backend(reading, tree, _ENGINE, "dp")
    if strategy is None:  # `ppo_megatron_trainer` has no such keys
        only_megatron(next((value for path, value in at.items() if path.startswith(f"{_ACTOR}fsdp_config.")), None))
    ranks(reading, at, *_RANKS)
    vanilla = at[_BRIDGE[1]]
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
    _refusals(reading, at)
    if vanilla.value:
        return provider.build(reading, provider.MBRIDGE, {}, NAME)
    vpp = reading.layout.get("vpp")
    own = {
        **provider.VERL_ON_MEGATRON_BRIDGE,
        "overlap_p2p_comm": bool(vpp and type(vpp.value) is int and vpp.value > 1),
    }
    return provider.build(reading, provider.MEGATRON_BRIDGE, own, NAME)


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
    """What verl's workers refuse, and what they do not read."""
    use, mtp, replay, old = (at.get(path) for path in (_BRIDGE[0], _MTP, _REPLAY, _OLD_REPLAY))
    if use and not use.value:
        text = f"{use.name} ({use.source}) is off: verl asserts that a bridge makes the model"
        reading.problems.append(Problem(NAME, text, f"leave {use.name} out"))
    if replay and replay.value == "R3":
        engine_returns_routes(reading, at, replay, _ROUTES, says="finds none in the batch, and fails")
    routes = at.get(_ROUTES)
    if replay and replay.value == "R2" and routes and routes.known and routes.value:
        text = f"{routes.name} ({routes.source}) is of R3, and {replay.name} is R2 ({replay.source})"
        reading.problems.append(Problem(NAME, f"{text}: verl raises ValueError", "drop one of them"))
    if old and old.value != "disabled" and not (replay and replay.given):
        text = f"{old.name} ({old.source}) is not read: verl's workers replay as {_REPLAY} says"
        reading.problems.append(Problem(NAME, text, f"give {_REPLAY}", refused=False))
    if mtp and mtp.value:
        reading.by_model.append(functools.partial(_without_mtp, mtp))


def _without_mtp(mtp: Value, model: Model) -> Problem | None:
    """What is wrong with MTP of a model whose config has no such layers."""
    if model.mtp_layers:
        return None
    text = f"{mtp.name} ({mtp.source}): the config of {model.family} says no MTP layers, and verl raises ValueError"
    return Problem(NAME, text, "leave it out")
