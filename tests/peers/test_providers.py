"""What moeref detects in published configs, and what megatron-bridge's providers hold for the same models."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("megatron.bridge", reason="megatron-bridge is installed in the peers' environments only")

from megatron.bridge import AutoBridge
from moeref_conformance.contract.published_models import published
from transformers import AutoConfig

from moeref import families
from moeref.config import plain, transformer_settings
from moeref.layout import Layout
from moeref.megatron.bridge_registration import register_glm4_moe_lite

register_glm4_moe_lite()
#: Fields in which the two may differ, and why the models do not.
SAME_MODEL = {
    "kv_channels": "unused under multi-latent attention",
    "moe_router_pre_softmax": "without effect on scores by sigmoid",
    "rope_type": "YaRN with a factor of 1 is plain rope",
    "add_qkv_bias": "add_bias_linear makes the same bias",
    "yarn_mscale": "None is read as 1",
    "yarn_mscale_all_dim": "None is read as 0",
}
#: Fields in which megatron-bridge's model is another one, by family.
ANOTHER_MODEL = {
    "glm_moe_dsa": {"mtp_num_layers": "it leaves the MTP layer out"},
    "minimax_m2": {"moe_router_dtype": "its routers compute in bf16; published files have them in fp32"},
}
#: What None stands for; a name is that of another field.
UNSET = {"moe_router_topk_scaling_factor": 1.0, "moe_ffn_hidden_size": "ffn_hidden_size"}
CONFIGS = {name: size.config for name, size in published().items()}


def _held(provider: Any, name: str) -> Any:
    value, unset = getattr(provider, name), UNSET.get(name, ...)
    if value is None and isinstance(unset, str):
        return getattr(provider, unset)
    return None if value == unset else value


@pytest.mark.parametrize("name", CONFIGS)
def test_detection_agrees_with_the_provider(name: str) -> None:
    hf = CONFIGS[name]
    if not set(hf["architectures"]) & set(AutoBridge.list_supported_models()):
        pytest.skip(f"this megatron-bridge has no bridge for {hf['architectures']}")
    try:
        config = AutoConfig.for_model(**copy.deepcopy({k: v for k, v in hf.items() if k != "quantization_config"}))
    except ValueError:
        pytest.skip(f"this transformers does not know {hf['model_type']}")
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    model = families.read({k: v for k, v in hf.items() if k != "quantization_config"})
    found = {n: s.value for n, s in transformer_settings(model, Layout()).items() if s.origin == "hf"}
    found |= {"rotary_base": model.rope_theta, "rotary_percent": model.rotary_percent}
    found |= {"share_embeddings_and_output_weights": model.tied}
    differ = {
        name: (plain(value), plain(getattr(provider, name)))
        for name, value in found.items()
        if hasattr(provider, name) and not same(value, _held(provider, name), model.num_layers)
    }
    assert differ.keys() <= SAME_MODEL.keys() | ANOTHER_MODEL.get(model.family, {}).keys(), differ


def same(ours: Any, theirs: Any, layers: int) -> bool:
    """Equal, a frequency being the list that it stands for: in `window_attn_skip_freq` 0 marks full attention."""
    if isinstance(ours, list) and isinstance(theirs, int):
        return ours in (
            [int(i % theirs == 0) for i in range(layers)],
            [int((i + 1) % theirs != 0) for i in range(layers)],
        )
    return bool(plain(ours) == plain(theirs))
