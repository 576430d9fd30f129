"""Kimi-K2.5 and K2.6 as published: DeepSeek-V3's text model beside a vision model, which no Megatron module here holds.

All of the text model is under `language_model.` in files, its head too. Loading skips the vision model and what takes
its outputs to the text model, and no export has them: an engine keeps those it loaded. No file has MTP layers.
Sources: transformers' Kimi_K25Config (#45630); the names that vLLM's kimi_k25.py loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import deepseek_v3
from moeref.families.mapping import ParamMapping
from moeref.families.model import FamilyError, Model, UnmappedModelError
from moeref.families.reading import check_switches

NAME = "kimi_k25"
#: Types of the text model: DeepSeek-V3's, and its other name.
_TEXT = (deepseek_v3.NAME, *deepseek_v3.ALIASES)
_VISION = ("vision_tower.", "mm_projector.")


def _inside(mapping: ParamMapping) -> ParamMapping:
    """A line of DeepSeek-V3's table as it is here, where experts have a tensor each."""
    names = tuple(replace(pattern, name=f"language_model.{pattern.name}") for pattern in mapping.hf)
    return replace(mapping, hf=names, fused=None, alias=None)


#: DeepSeek-V3's table without MTP layers, under `language_model`.
MAPPINGS = tuple(_inside(mapping) for mapping in deepseek_v3.MAPPINGS if mapping.where != "mtp")


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A published `config.json` as a `Model`, the keys of its `text_config` among its own."""
    if "text_config" not in hf:
        raise FamilyError(f"{NAME}: config.json has no text_config; a text model's own is of type deepseek_v3")
    check_switches(hf, NAME, {"num_nextn_predict_layers": 0})
    if (kind := hf["text_config"].get("model_type", deepseek_v3.NAME)) not in _TEXT:
        raise UnmappedModelError(f"{NAME}: a text model of type {kind!r} is not mapped; {' and '.join(_TEXT)} are")
    return replace(deepseek_v3.read_as(hf, NAME, dtype), ignored=_VISION)
