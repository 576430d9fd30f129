"""The dialects of transformers 4 and 5: a config.json as published models have it, and tensors as their files do.

transformers 5 writes a dialect of its own: `num_local_experts` for Qwen's `num_experts`, `rope_parameters` for
`rope_theta` and `rope_scaling`, `dtype` for `torch_dtype`, and values that it works out itself. Code that reads
published files need not know it. transformers reads the same from both, which a test compares.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

#: Keys that no published config of any family has: transformers 5 works them out, or names itself.
_WORKED_OUT = ("mlp_layer_types", "qk_head_dim", "rope_interleave", "transformers_version")
#: Families that were published when transformers 5 was.
_SINCE_5 = ("glm4_moe_lite", "glm_moe_dsa", "qwen3_5_moe_text")
#: Those whose published configs have the `rope_parameters` of transformers 5.
_ROPE_OF_5 = ("glm_moe_dsa", "qwen3_5_moe_text")


def of_5() -> bool:
    """Whether the transformers here is 5 or newer; 4.57 reads and writes published keys alone."""
    import transformers

    return int(transformers.__version__.partition(".")[0]) >= 5


def in_files(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a module, by the names of its files: transformers 5 fuses experts in memory, 4.57 does not."""
    if not of_5():
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def as_named(model: Any, tensors: Mapping[str, torch.Tensor], names: Container[str]) -> dict[str, torch.Tensor]:
    """Tensors of a module by its own names where a checkpoint has these among its `names`, the others as `in_files`."""
    others = {name: tensor for name, tensor in tensors.items() if name not in names}
    return {name: tensor for name, tensor in tensors.items() if name in names} | in_files(model, others)


def read_config(folder: str | Path) -> Any:
    """transformers' config object of a folder."""
    from transformers import AutoConfig

    return completed(AutoConfig.from_pretrained(folder, local_files_only=True))


def completed(config: Any) -> Any:
    """The config object with what transformers 5.12 leaves unread of its file: `rotary_dim` (transformers#48241)."""
    if turned := getattr(config, "rotary_dim", None):
        config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": turned / config.head_dim}
    return config


def as_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model in the keys of published files, in the order of their names."""
    made = {key: value for key, value in config.items() if key not in _WORKED_OUT}
    if "dtype" in made and made["model_type"] not in _SINCE_5:
        made["torch_dtype"] = made.pop("dtype")
    if "rope_parameters" in made and made["model_type"] not in _ROPE_OF_5:
        made |= _rope(made["model_type"], made.pop("rope_parameters"))
    if made["model_type"] == "qwen3_moe" and "num_local_experts" in made:
        made["num_experts"] = made.pop("num_local_experts")
    if made["model_type"] == "qwen3_next" and "layer_types" in made:
        made["full_attention_interval"] = made.pop("layer_types").index("full_attention") + 1
    if "index_topk" in made:  # all layers are alike
        made = {key: value for key, value in made.items() if key not in ("layer_types", "mlp_bias")}
    if "kv_lora_rank" in made:  # latent heads have two widths, and a key for each
        made.pop("head_dim", None)
    if made["model_type"] == "glm_moe_dsa":  # GLM-5.2's file has the width without rope there
        made["head_dim"] = made["qk_nope_head_dim"]
    if "rotary_dim" in made:  # MiniMax-M2's files have the part of a head that turns under this name alone
        made.pop("partial_rotary_factor", None)
    return dict(sorted(made.items()))


def _rope(family: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor` where a part of each head is rotated, and `rope_scaling` or null."""
    rest = dict(parameters)
    top = ("rope_theta", "partial_rotary_factor")
    made: dict[str, Any] = {name: rest.pop(name) for name in top if name in rest}
    if rest["rope_type"] == "default":
        return {**made, "rope_scaling": None}
    if family in ("deepseek_v3", "deepseek_v32"):
        rest["type"] = rest.pop("rope_type")
    return {**made, "rope_scaling": rest}
