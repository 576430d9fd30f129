"""Qwen3.5 as published: the text model beside a vision model, which has no part in a Megatron language model.

Loading skips the vision model (`model.visual.*`), and no export has it: an engine keeps the one it loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import qwen3_5_moe_text
from moeref.families.mapping import beside_vision
from moeref.families.model import FamilyError, Model

NAME = "qwen3_5_moe"
#: The text model's table under `model.language_model`.
MAPPINGS = beside_vision(qwen3_5_moe_text.MAPPINGS)


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A published `config.json` as a `Model`, the keys of its `text_config` among its own."""
    if "text_config" not in hf:
        raise FamilyError(f"{NAME}: config.json has no text_config; a text model's own is of type qwen3_5_moe_text")
    model = qwen3_5_moe_text.read(hf, dtype)
    return replace(model, family=NAME, ignored=(*model.ignored, "model.visual."))
