"""Checks the values of a Hugging Face config before a family reads them: the kinds and ranges that any model has."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from moeref.families.model import FamilyError

#: Keys with a whole number that every model has at least 1 of, and those that may be 0. Both may be null.
_POSITIVE = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    *("max_position_embeddings", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "decoder_sparse_step", "full_attention_interval", "sliding_window"),
    *("index_n_heads", "index_head_dim", "index_topk", "rotary_dim"),
)
_COUNTS = (
    *("q_lora_rank", "n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace", "n_group", "topk_group"),
    *("shared_expert_intermediate_size", "mtp_num_hidden_layers", "index_topk_freq", "index_skip_topk_offset"),
)
_LIMIT = 100_000_000
#: Whole numbers with limits of their own: what there is one object each of.
_LIMITS = {"num_hidden_layers": (1, 10_000), "num_experts": (1, 65_536)}
_LIMITS |= dict.fromkeys(("num_nextn_predict_layers", "mtp_num_hidden_layers"), (0, 100))
_LIMITS |= dict.fromkeys(("num_local_experts", "n_routed_experts"), (1, 65_536))
_RANGES = {**dict.fromkeys(_COUNTS, (0, _LIMIT)), **dict.fromkeys(_POSITIVE, (1, _LIMIT)), **_LIMITS}
_NUMBERS = ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "partial_rotary_factor")
_SWITCHES = ("tie_word_embeddings", "norm_topk_prob", "attention_bias", "use_qk_norm", "indexer_rope_interleave")
_MAPPINGS = ("rope_parameters", "rope_scaling", "quantization_config")
_LISTS = ("layer_types", "mlp_layer_types", "mlp_only_layers", "indexer_types", "attn_type_list")
#: What errors about a value of a config begin with.
WRONG = "a value of this config has a wrong type or size"


def check_values(config: Mapping[str, Any], family: str) -> None:
    """Raise FamilyError for the first value of a kind or size that no model has."""
    for name, value in config.items():
        if value is not None and (wanted := _wanted(str(name), value)):
            raise FamilyError(f"{family}: {WRONG}: {name}={reprlib.repr(value)}, and it must be {wanted}")


def _wanted(name: str, value: Any) -> str:
    """What the value must be; "" if it is that, or if nothing reads it."""
    if name in _RANGES:
        least, most = _RANGES[name]
        return "" if type(value) is int and least <= value <= most else f"a whole number from {least} to {most}"
    if name in _NUMBERS:
        fits = type(value) in (int, float) and 0 < value <= sys.float_info.max
        return "" if fits else "a number above 0"
    kinds: tuple[tuple[tuple[str, ...], type, str], ...] = (
        (_SWITCHES, bool, "true or false"),
        (_MAPPINGS, Mapping, "a mapping"),
        (_LISTS, list, "a list"),
    )
    return next((wanted for names, kind, wanted in kinds if name in names and not isinstance(value, kind)), "")
