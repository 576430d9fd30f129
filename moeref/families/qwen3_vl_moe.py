"""Qwen3-VL with experts: Qwen3-MoE beside a vision model, which has no part in a Megatron language model.

Published files hold all experts of a layer in one tensor per parameter, as [in, out], gate before up: so vLLM takes
them. transformers 5 has them as [out, in] in memory, under the same names, and saves them so: such a folder is refused.
Loading skips the vision model (`model.visual.*`), and no export has it: an engine keeps the one it loaded. Of text
alone the three axes of positions agree, and rope is Qwen3-MoE's.
Sources: transformers' Qwen3VLMoeTextTopKRouter, and its conversion of qwen3_vl_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import qwen3_moe
from moeref.families.mapping import HFPattern, ParamMapping, beside_vision
from moeref.families.model import FamilyError, Model
from moeref.families.reading import check_switches

NAME = "qwen3_vl_moe"
_EXPERTS = "model.layers.{layer}.mlp.experts."
#: By the ends of Megatron's names.
_OF_ALL_EXPERTS = {
    "{expert}.linear_fc1.weight": HFPattern(
        _EXPERTS + "gate_up_proj", ("experts", "hidden", "2moe_ffn"), transposed=True
    ),
    "{expert}.linear_fc2.weight": HFPattern(_EXPERTS + "down_proj", ("experts", "moe_ffn", "hidden"), transposed=True),
}


def _of_this(mapping: ParamMapping) -> ParamMapping:
    """A line of Qwen3-MoE's table as it is here."""
    of_all = next((of for end, of in _OF_ALL_EXPERTS.items() if mapping.megatron.endswith(end)), None)
    return replace(mapping, hf=(of_all,), fused=None) if of_all else mapping


#: Qwen3-MoE's table with fused experts, under `model.language_model`.
MAPPINGS = beside_vision(map(_of_this, qwen3_moe.MAPPINGS))


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A published `config.json` as a `Model`, the keys of its `text_config` among its own.

    The weights of the chosen experts are always normalised.
    """
    if "text_config" not in hf:
        raise FamilyError(f"{NAME}: config.json has no text_config")
    check_switches(hf, NAME, {"norm_topk_prob": True})
    model = qwen3_moe.read_as(hf, NAME, dtype)
    return replace(model, norm_topk_prob=True, ignored=(*model.ignored, "model.visual."))
