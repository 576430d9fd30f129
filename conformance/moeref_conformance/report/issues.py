"""The addresses of issues that rules and faults name, such as `verl#7470`."""

from __future__ import annotations

import re
from collections.abc import Iterator

#: Of projects whose owner is known; another's issue is plain text.
_OWNERS = {
    "Accio-Lab": ("Dressage",),
    "alibaba": ("ROLL",),
    "allenai": ("OLMo-core", "open-instruct"),
    "AI-Hypercomputer": ("maxtext",),
    "AMD-AGI": ("Primus",),
    "axonn-ai": ("yalis",),
    "apple": ("ml-cross-entropy",),
    "areal-project": ("AReaL",),
    "deepseek-ai": ("DeepEP", "DeepSeek-V3"),
    "ecmwf": ("WeatherGenerator",),
    "EleutherAI": ("gpt-neox",),
    "flashinfer-ai": ("flashinfer",),
    "fzyzcjy": ("torch_memory_saver",),
    "gittensor-ai-lab": ("sparkinfer",),
    "GMISWE": ("tinker-cloud",),
    "hiyouga": ("LlamaFactory",),
    "huggingface": ("TRL", "diffusers", "transformers"),
    "inclusionAI": ("AReno",),
    "Infini-AI-Lab": ("astraflow",),
    "ISEEKYAN": ("mbridge",),
    "karpathy": ("nanochat",),
    "kekzl": ("imp",),
    "lightseekorg": ("tokenspeed",),
    "meta-pytorch": ("MSLK", "torchforge"),
    "microsoft": ("dion",),
    "ml-explore": ("mlx-examples", "mlx-lm"),
    "ModelCloud": ("GPTQModel",),
    "modal-projects": ("training-gym",),
    "ModelTC": ("LightLLM",),
    "modelscope": ("mcore-bridge", "ms-swift"),
    "NovaSky-AI": ("SkyRL",),
    "NVIDIA": (
        "Megatron-LM",
        "Model-Optimizer",
        "TensorRT-Model-Connect",
        "TransformerEngine",
        "nvidia-resiliency-ext",
    ),
    "NVIDIA-NeMo": ("Automodel", "Megatron-Bridge", "NeMo-RL"),
    "OpenRLHF": ("OpenRLHF",),
    "PaddlePaddle": ("PaddleNLP",),
    "PrimeIntellect-ai": ("prime-rl",),
    "pytorch": ("torchtitan",),
    "radixark": ("miles",),
    "redai-studio": ("Relax",),
    "RLinf": ("RLinf",),
    "ROCm": ("ATOM",),
    "sgl-project": ("sglang", "sglang-jax"),
    "thinking-machines-lab": ("tinker-cookbook",),
    "THUDM": ("slime",),
    "tinygrad": ("tinygrad",),
    "turboderp-org": ("exllamav3",),
    "unslothai": ("unsloth", "unsloth-zoo"),
    "verl-project": ("verl",),
    "vllm-project": (
        *("compressed-tensors", "speculators", "vLLM", "vime", "vllm-ascend", "vllm-gaudi", "vllm-metal"),
    ),
}
#: Repositories that have another name than the one that engineers use.
_CALLED = {"NeMo-RL": "RL", "TRL": "trl", "vLLM": "vllm"}
#: Short name -> owner and repository.
REPOSITORIES = {name: f"{owner}/{_CALLED.get(name, name)}" for owner, names in _OWNERS.items() for name in names}
_ISSUE = re.compile(r"(?<![\w/.-])([\w.-]+(?:/[\w.-]+)?)#(\d+)")


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """The text in pieces, each with the address of the issue that it names; "" if it names none that is known here."""
    at = 0
    for found in _ISSUE.finditer(text):
        repository = found[1] if "/" in found[1] else REPOSITORIES.get(found[1])
        if repository:
            yield text[at : found.start()], ""
            yield found[0], f"https://github.com/{repository}/issues/{found[2]}"  # which leads to a pull request too
            at = found.end()
    yield text[at:], ""
