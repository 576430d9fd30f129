"""GLM-5, 5.1 and 5.2: GLM-4.7-Flash's model with DeepSeek sparse attention (DSA), whose indexers have weights.

Sources: megatron-core's DSAttention and DSAIndexer; the saved names of transformers' GlmMoeDsa.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from moeref.families import constructors, glm4_moe_lite
from moeref.families.model import FamilyError, Indexer, Model, UnmappedModelError
from moeref.families.reading import require

NAME = "glm_moe_dsa"
_of_indexer = partial(constructors.replicated, where="indexer")
I, H = "decoder.layers.{layer}.self_attention.core_attention.indexer.", "model.layers.{layer}.self_attn.indexer."
#: Whole on every TP rank. Keys have a LayerNorm, which has a bias.
_INDEXER = (
    _of_indexer(megatron=I + "linear_wq_b.weight", hf=H + "wq_b.weight", dims=("index_q", "q_rank")),
    _of_indexer(megatron=I + "linear_wk.weight", hf=H + "wk.weight", dims=("index_k", "hidden")),
    _of_indexer(megatron=I + "k_norm.weight", hf=H + "k_norm.weight", dims=("index_k",)),
    _of_indexer(megatron=I + "k_norm.bias", hf=H + "k_norm.bias", dims=("index_k",)),
    _of_indexer(megatron=I + "linear_weights_proj.weight", hf=H + "weights_proj.weight", dims=("index_heads", "hidden")),
)
# Indexers read normalised latents, so megatron-core keeps their norms apart from the linears in every spec.
_OTHERS = [replace(one, te_name="") if "self_attention" in one.te_name else one for one in glm4_moe_lite.MAPPINGS]
_AFTER = 1 + next(at for at, one in enumerate(_OTHERS) if one.megatron.endswith("self_attention.linear_proj.weight"))
MAPPINGS = (*_OTHERS[:_AFTER], *_INDEXER, *_OTHERS[_AFTER:])


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-5 `config.json` as a `Model`; it has three dense layers if it does not say how many.

    `indexer_rope_interleave` is true in published configs. Without it rope turns halves, as in vLLM. transformers 5.12
    never reads it (transformers#46842).
    """
    layers = require(hf, NAME, "num_hidden_layers")
    prefix = require(hf, NAME, "first_k_dense_replace", default=3)
    kinds = hf.get("mlp_layer_types") or ["dense" if i < prefix else "sparse" for i in range(layers)]
    indexer = Indexer(
        layers=_layers(hf, layers),
        heads=require(hf, NAME, "index_n_heads"),
        head_dim=require(hf, NAME, "index_head_dim"),
        top_k=require(hf, NAME, "index_topk"),
        interleaved=bool(hf.get("indexer_rope_interleave")),
    )
    if indexer.shared is None:
        raise UnmappedModelError(f"{NAME}: indexers of layers without a period are not mapped: {indexer.layers}")
    return replace(glm4_moe_lite.read({**hf, "mlp_layer_types": kinds}, dtype), family=NAME, indexer=indexer)


def _layers(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Whether each layer has an indexer, from the keys that transformers reads, in its order."""
    kinds = hf.get("indexer_types") or hf.get("index_topk_pattern")
    if kinds is None:
        every, offset = max(int(hf.get("index_topk_freq") or 1), 1), hf.get("index_skip_topk_offset")
        offset = 2 if offset is None else int(offset)
        return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    full, shared = ("F", "S") if isinstance(kinds, str) else ("full", "shared")
    if len(kinds) != layers or set(kinds) - {full, shared} or kinds[0] != full:
        raise FamilyError(f"{NAME}: {full} or {shared} for each of {layers} layers, the first {full}, not {kinds}")
    return tuple(kind == full for kind in kinds)
