"""What vLLM needs on a GPU to agree with a trainer in fp32, besides its settings."""

from __future__ import annotations

import os

from moeref.families import Model

#: Set before vllm is imported. By default Triton multiplies fp32 as TF32 in vLLM's experts and attention: of 23 bits
#: of mantissa 10 are left. One process: the engine is the controller's own, and an update needs no other process. No
#: flight recorder: gloo's has a table without a lock, and an update has a thread at each end (pytorch#179313; 2.11).
ENVIRONMENT = {
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}


def prepare() -> None:
    """Set ENVIRONMENT. Call it before vllm is imported; what the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def refusal(model: Model) -> str:
    """Why an engine on a GPU cannot serve the model in this process's environment, or ""."""
    if model.mla and model.param_dtype == "float32" and os.environ.get("VLLM_MLA_DISABLE", "0") == "0":
        return "vLLM's latent attention takes 16 bits on a GPU; VLLM_MLA_DISABLE=1 has it computed as plain attention"
    return ""
