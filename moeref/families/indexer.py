"""DeepSeek sparse attention (DSA): the table of its indexers, and reading them from a config.

Sources: megatron-core's DSAttention and DSAIndexer; the saved names of transformers' DeepseekV32 and GlmMoeDsa.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from moeref.families import constructors
from moeref.families.mapping import ParamMapping
from moeref.families.mla import listed_layers, read_mla
from moeref.families.model import FamilyError, Indexer, Model, UnmappedModelError
from moeref.families.reading import require

_of_indexer = partial(constructors.replicated, where="indexer")
L, H = "decoder.layers.{layer}.self_attention.core_attention.indexer.", "model.layers.{layer}.self_attn.indexer."
#: Whole on every TP rank. Keys have a LayerNorm, which has a bias.
MAPPINGS_OF_INDEXER = (
    _of_indexer(megatron=L + "linear_wq_b.weight", hf=H + "wq_b.weight", dims=("index_q", "q_rank")),
    _of_indexer(megatron=L + "linear_wk.weight", hf=H + "wk.weight", dims=("index_k", "hidden")),
    _of_indexer(megatron=L + "k_norm.weight", hf=H + "k_norm.weight", dims=("index_k",)),
    _of_indexer(megatron=L + "k_norm.bias", hf=H + "k_norm.bias", dims=("index_k",)),
    _of_indexer(
        megatron=L + "linear_weights_proj.weight", hf=H + "weights_proj.weight", dims=("index_heads", "hidden")
    ),
)


def with_indexers(latent: Sequence[ParamMapping]) -> tuple[ParamMapping, ...]:
    """A table of latent attention with an indexer after attention's last linear.

    Indexers read normalised latents, so megatron-core keeps their norms apart from the linears in every spec.
    """
    apart = [replace(one, te_name="") if "self_attention" in one.te_name else one for one in latent]
    after = 1 + next(at for at, one in enumerate(apart) if one.megatron.endswith("self_attention.linear_proj.weight"))
    return (*apart[:after], *MAPPINGS_OF_INDEXER, *apart[after:])


def read_sparse(hf: Mapping[str, Any], name: str, dtype: str) -> Model:
    """A config with DeepSeek-V3.2's keys as a `Model`; it has three dense layers if it does not say how many."""
    moe_layers = listed_layers(hf, name, require(hf, name, "first_k_dense_replace", default=3))
    return replace(read_mla(hf, name, dtype, moe_layers), indexer=_read_indexer(hf, name))


def _read_indexer(hf: Mapping[str, Any], name: str) -> Indexer:
    """The indexers of a config.

    Without `indexer_rope_interleave` rope turns halves, as in vLLM. transformers 5.12 never reads it
    (transformers#46842).
    """
    if not hf.get("q_lora_rank"):
        raise UnmappedModelError(f"{name}: an indexer reads latent queries, and q_lora_rank={hf.get('q_lora_rank')!r}")
    indexer = Indexer(
        layers=_layers(hf, name, require(hf, name, "num_hidden_layers")),
        heads=require(hf, name, "index_n_heads"),
        head_dim=require(hf, name, "index_head_dim"),
        top_k=require(hf, name, "index_topk"),
        interleaved=bool(hf.get("indexer_rope_interleave")),
    )
    if indexer.shared is None:
        raise UnmappedModelError(f"{name}: indexers of layers without a period are not mapped: {indexer.layers}")
    return indexer


def _layers(hf: Mapping[str, Any], name: str, layers: int) -> tuple[bool, ...]:
    """Whether each layer has an indexer, from the keys that transformers' GlmMoeDsaConfig reads, in its order."""
    kinds = hf.get("indexer_types") or hf.get("index_topk_pattern")
    if kinds is None:
        every, offset = max(int(hf.get("index_topk_freq") or 1), 1), hf.get("index_skip_topk_offset")
        offset = 2 if offset is None else int(offset)
        return tuple(max(i - offset + 1, 0) % every == 0 for i in range(layers))
    full, shared = ("F", "S") if isinstance(kinds, str) else ("full", "shared")
    if len(kinds) != layers or set(kinds) - {full, shared} or kinds[0] != full:
        raise FamilyError(f"{name}: {full} or {shared} for each of {layers} layers, the first {full}, not {kinds}")
    return tuple(kind == full for kind in kinds)
