"""What moeref knows of a model: the sizes and switches that its family reads from a Hugging Face config."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal


class FamilyError(ValueError):
    """A config that cannot be read: a key is missing, or a value makes no sense."""


class UnmappedModelError(FamilyError):
    """A model that moeref does not map, whether or not megatron-core can build it."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN's scaling of rotary frequencies, in the terms of transformers' `rope_parameters`."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool = True  # round the range of corrected frequencies outwards to whole ones


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: in the marked layers a query sees itself and the `size` - 1 tokens before it."""

    size: int
    layers: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-latent attention: ranks of the latents, then sizes per head."""

    q_rank: int  # 0: queries come from the hidden state itself
    kv_rank: int
    nope: int  # of queries and keys, without rope
    rope: int  # of queries and keys, with rope
    v: int  # of values
    yarn: Yarn | None


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """DeepSeek sparse attention (DSA): attention to the keys that an indexer, a small attention of its own, ranks best.

    No gradient reaches it, so it is frozen in training. Sizes are its heads, their width, and the keys of a query.
    """

    layers: tuple[bool, ...]  # by global layer; False attends to the keys that the last layer with an indexer chose
    heads: int
    head_dim: int
    top_k: int
    interleaved: bool  # rope turns neighbouring channels, not a channel of each half

    @functools.cached_property
    def shared(self) -> tuple[int, int] | None:
        """(how often a layer has an indexer, after which layer, counted from 1); None for layers without a period.

        megatron-core's numbers: the layers up to that one have an indexer, and of those after it every so many-th.
        """
        if all(self.layers):
            return 1, 1
        number, first = len(self.layers), self.layers.index(False)
        every = next((i + 1 - first for i in range(first, number) if self.layers[i]), number + 1 - first)
        periodic = tuple(max(i + 1 - first, 0) % every == 0 for i in range(number))
        return (every, first) if periodic == self.layers else None

    @property
    def dims(self) -> dict[str, int]:
        """The sizes that `HFPattern.dims` names."""
        return {"index_q": self.heads * self.head_dim, "index_k": self.head_dim, "index_heads": self.heads}


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Gated delta nets in place of attention: layers, heads, sizes per head, kernel size of the convolution."""

    layers: tuple[bool, ...]  # by global layer; False is a layer with attention
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def per_key(self) -> int:
        """Value heads of one key head."""
        return self.value_heads // self.key_heads

    @property
    def dims(self) -> dict[str, int]:
        """The sizes that `HFPattern.dims` names."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {
            "gdn_v": values,
            "gdn_qkv": 2 * keys + values,
            "gdn_qkvz": 2 * keys + 2 * values,
            "gdn_ba": 2 * self.value_heads,
            "value_heads": self.value_heads,
            "value_dim": self.value_dim,
            "kernel": self.kernel,
        }


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model as its family reads it. Sizes are counts of elements; `ffn`s count gate (= up) rows."""

    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    vocab: int
    ffn: int
    moe_ffn: int
    experts: int
    top_k: int
    moe_layers: tuple[bool, ...]  # by global layer; False is a dense layer
    tied: bool
    score_function: Literal["softmax", "sigmoid"]
    norm_topk_prob: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    param_dtype: str  # of the checkpoint: "bfloat16", "float32"
    shared_ffn: int = 0  # 0: no shared experts
    qkv_bias: bool = False
    linear_bias: bool = False  # of all linears, router and experts too
    sinks: bool = False  # each head's softmax has one learnt score more, which takes attention but has no value
    window: Window | None = None
    clamp: float = 0.0  # gate·σ(1.702·gate)·(up + 1), gate clamped above, up on both sides; 0: plain SwiGLU
    qk_norm: bool = False
    one_qk_norm: bool = False  # one norm over all heads of queries and one over all of keys, not one for each head
    expert_bias: bool = False
    fp32_router: bool = False  # the router computes its logits in fp32, whatever the parameters are
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    rotary_percent: float = 1.0
    yarn: Yarn | None = None  # of grouped-query attention; MLA has its own
    mla: MLA | None = None  # None: grouped-query attention
    indexer: Indexer | None = None  # None: every query attends to all keys before it
    gated_delta_net: GatedDeltaNet | None = None  # None: attention in every layer
    output_gate: bool = False  # half of the query projection gates the output of attention
    shared_gate: bool = False  # one number a token gates the output of the shared experts
    zero_centered: bool = False  # norms scale by 1 + weight, except those inside gated delta nets
    mtp_layers: int = 0  # multi-token prediction; in files they follow the decoder layers
    mtp_apart: bool = False  # files have one such layer, apart under `mtp.`, whether or not the config says so
    fp8_block: tuple[int, int] | None = None  # (rows, columns) of a block of FP8 weights in files, with a scale each
    int4_group: int | None = None  # columns of a group of INT4 weights in files, with a scale each
    mxfp4: bool = False  # experts' weights in files are MXFP4, each block of 32 inputs with a scale
    ignored: tuple[str, ...] = ()  # prefixes of tensor names in published files that loading skips

    def with_mtp(self, layers: int) -> Model:
        """The model with the first `layers` of its MTP layers. Loading skips the tensors of the others.

        Raises UnmappedModelError for more layers than its files have.
        """
        if not 0 <= layers <= self.most_mtp_layers:
            most = f"its files have {self.most_mtp_layers} such layers{' with a tied head' if self.tied else ''}"
            raise UnmappedModelError(f"{self.family}: mtp_num_layers={layers}: {most}")
        if self.mtp_apart:
            others = tuple(prefix for prefix in self.ignored if prefix != "mtp.")
            return replace(self, mtp_layers=layers, ignored=others if layers else ("mtp.", *others))
        left_out = range(self.num_layers + layers, self.num_layers + self.mtp_layers)
        ignored = (*self.ignored, *(f"model.layers.{layer}." for layer in left_out))
        return replace(self, mtp_layers=layers, ignored=ignored)

    @property
    def most_mtp_layers(self) -> int:
        """How many MTP layers a run can have: those that the config says, or the one of files that have it apart."""
        return int(not self.tied) if self.mtp_apart else self.mtp_layers

    @property
    def latent_q(self) -> bool:
        """MLA whose queries go through a latent."""
        return self.mla is not None and self.mla.q_rank > 0

    @property
    def direct_q(self) -> bool:
        """MLA whose queries come from the hidden state itself."""
        return self.mla is not None and not self.latent_q

    @property
    def _attention_dims(self) -> dict[str, int]:
        if self.mla is None:
            q, kv = self.heads * self.head_dim, self.kv_groups * self.head_dim
            net = self.gated_delta_net.dims if self.gated_delta_net else {}
            return {"q": q, "2q": 2 * q, "kv": kv, "head_dim": self.head_dim, "one": 1, **net}
        return {
            "q": self.heads * (self.mla.nope + self.mla.rope),
            "kv": self.heads * (self.mla.nope + self.mla.v),
            "v": self.heads * self.mla.v,
            "q_rank": self.mla.q_rank,
            "kv_rank": self.mla.kv_rank,
            "kv_rank+rope": self.mla.kv_rank + self.mla.rope,
            **(self.indexer.dims if self.indexer else {}),
        }

    @functools.cached_property
    def dims(self) -> dict[str, int]:
        """The sizes that `HFPattern.dims` names."""
        return {
            **self._attention_dims,
            "hidden": self.hidden,
            "2hidden": 2 * self.hidden,
            "vocab": self.vocab,
            "heads": self.heads,
            "ffn": self.ffn,
            "moe_ffn": self.moe_ffn,
            "2moe_ffn": 2 * self.moe_ffn,
            "shared_ffn": self.shared_ffn,
            "experts": self.experts,
        }
