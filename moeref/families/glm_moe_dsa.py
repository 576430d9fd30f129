"""GLM-5 and GLM-5.1: GLM-4.7-Flash's model with DeepSeek sparse attention (DSA), whose indexer has weights of its own.

Sources: megatron-core's DSAttention and DSAIndexer; the saved names of transformers' GlmMoeDsa.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeref.families import glm4_moe_lite
from moeref.families.constructors import replicated
from moeref.families.model import Indexer, Model
from moeref.families.reading import check_switches, require

NAME = "glm_moe_dsa"
I, H = "decoder.layers.{layer}.self_attention.core_attention.indexer.", "model.layers.{layer}.self_attn.indexer."
#: The indexer, whole on every TP rank. Its keys have a LayerNorm, with a bias.
_INDEXER = (
    replicated(megatron=I + "linear_wq_b.weight", hf=H + "wq_b.weight", dims=("index_q", "q_rank")),
    replicated(megatron=I + "linear_wk.weight", hf=H + "wk.weight", dims=("index_k", "hidden")),
    replicated(megatron=I + "k_norm.weight", hf=H + "k_norm.weight", dims=("index_k",)),
    replicated(megatron=I + "k_norm.bias", hf=H + "k_norm.bias", dims=("index_k",)),
    replicated(megatron=I + "linear_weights_proj.weight", hf=H + "weights_proj.weight", dims=("index_heads", "hidden")),
)
# The indexer reads normalised latents, so megatron-core keeps their norms apart from the linears in every spec.
_OTHERS = [replace(one, te_name="") if "self_attention" in one.te_name else one for one in glm4_moe_lite.MAPPINGS]
_AFTER = 1 + next(at for at, one in enumerate(_OTHERS) if one.megatron.endswith("self_attention.linear_proj.weight"))
MAPPINGS = (*_OTHERS[:_AFTER], *_INDEXER, *_OTHERS[_AFTER:])

#: Layers that take the keys which a layer before them has chosen, as GLM-5.2's, have no indexer.
_SHARED = {"index_topk_freq": 1, "index_topk_pattern": None}


def read(hf: Mapping[str, Any], dtype: str) -> Model:
    """A GLM-5 `config.json` as a `Model`; it has three dense layers if it does not say how many.

    `indexer_rope_interleave` is true in published configs and without it false, as in vLLM. transformers 5.12 never
    interleaves (transformers#46842).
    """
    layers = require(hf, NAME, "num_hidden_layers")
    prefix = require(hf, NAME, "first_k_dense_replace", default=3)
    kinds = hf.get("mlp_layer_types") or ["dense" if i < prefix else "sparse" for i in range(layers)]
    check_switches(hf, NAME, {**_SHARED, "indexer_types": ["full"] * layers})
    indexer = Indexer(
        heads=require(hf, NAME, "index_n_heads"),
        head_dim=require(hf, NAME, "index_head_dim"),
        top_k=require(hf, NAME, "index_topk"),
        interleaved=bool(hf.get("indexer_rope_interleave")),
    )
    return replace(glm4_moe_lite.read({**hf, "mlp_layer_types": kinds}, dtype), family=NAME, indexer=indexer)
