"""What moeref knows of a model: sizes and switches read from a Hugging Face config, and the mappings of its table.

Everything here is data, without torch. A family file (`qwen3_moe.py`, `glm4_moe.py`, …) fills it in; `bridge` reads it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

Sharding = Literal["replicate", "vocab", "column", "row", "qkv", "gate_up", "gated_qkv", "gdn_in_proj", "gdn_conv1d"]
ExpertFormat = Literal["per_expert", "fused"]


class FamilyError(ValueError):
    """A config that a family cannot take, or a model type that no family has."""


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
    """Sliding-window attention: a query sees itself and the `size` - 1 tokens before it, in the layers marked."""

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
class GatedDeltaNet:
    """Gated delta nets in place of attention: their layers, heads, sizes per head, and the convolution's kernel."""

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
        """The sizes that `Tensor.dims` names."""
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
    sinks: bool = False  # each head's softmax has one more, learnt, score, whose share of attention goes nowhere
    window: Window | None = None
    clamp: float = 0.0  # gate·σ(1.702·gate)·(up + 1), gate clamped above, up on both sides; 0: plain SwiGLU
    qk_norm: bool = False
    expert_bias: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    rotary_percent: float = 1.0
    yarn: Yarn | None = None  # of grouped-query attention; MLA has its own
    mla: MLA | None = None  # None: grouped-query attention
    gated_delta_net: GatedDeltaNet | None = None  # None: attention in every layer
    output_gate: bool = False  # attention's output is gated by a half of the query projection
    shared_gate: bool = False  # the shared experts' output is gated by one number a token
    zero_centered: bool = False  # norms scale by 1 + weight, but for a gated delta net's own
    mtp_layers: int = 0  # multi-token prediction; in files they follow the decoder's layers
    ignored: tuple[str, ...] = ()  # tensors of published files that loading leaves out, by the start of their names

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
        }

    @functools.cached_property
    def dims(self) -> dict[str, int]:
        """The sizes that `Tensor.dims` names."""
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


@dataclass(frozen=True)
class Tensor:
    """One Hugging Face tensor of a mapping: its name pattern (`{layer}`, `{expert}`) and its dimensions by name.

    An expert's tensor whose name has no `{expert}` holds all experts, the expert first.
    """

    name: str
    dims: tuple[str, ...]
    transposed: bool = False  # the matrix is [in, out] here; Megatron's are [out, in]
    interleaved: bool = False  # gate and up alternate along the outputs; otherwise all of gate comes first


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """One line of a family's table: a Megatron parameter and the Hugging Face tensors whose elements it holds.

    sharding: `replicate` whole on every TP rank · `vocab` dim 0 over TP, padded with zeros · `column` dim 0 over TP ·
    `row` dim 1 over TP · `qkv` per KV group [its q heads | k | v], contiguous groups over TP · `gate_up` TP rank r
    holds cat(gate chunk r, up chunk r) · `gated_qkv`, `gdn_in_proj`, `gdn_conv1d`: see `bridge.gated_delta_net`.
    A parameter with `{expert}` is split over ETP and EP instead of TP.
    """

    megatron: str  # name in the local layer spec, below the chunk; {layer} and {expert}
    hf: tuple[Tensor, ...]
    sharding: Sharding = "replicate"
    te_name: str = ""  # name in the Transformer Engine layer spec where it differs
    grouped_name: str = ""  # name in grouped expert modules
    fused: Tensor | None = None  # transformers 5's in-memory tensor where it differs; all experts in one, expert first
    alias: Tensor | None = None  # the same tensor once more in each multi-token prediction layer of the file
    where: Literal["first", "last", "layer", "dense", "moe", "attention", "gated_delta_net", "mtp"] = "layer"
    only_if: str = ""  # a switch of `Model` that must be true
    dtype: str = ""  # kept in this dtype whatever the model's is

    def __hash__(self) -> int:
        """Of what tells mappings of one family apart; a hash of every field would cost too much per parameter."""
        return hash((self.megatron, self.where))

    def present(self, model: Model, layer: int | None) -> bool:
        """Whether `model` has it at `layer` (None: outside the layers; MTP layers follow the decoder's)."""
        if self.only_if and not getattr(model, self.only_if):
            return False
        if layer is None:
            return self.where in ("first", "last")
        if self.where == "mtp":
            return layer >= model.num_layers
        if self.where in ("dense", "moe"):
            # An MTP layer is of the kind of the last decoder layer, both in megatron-core and in the files.
            return model.moe_layers[min(layer, model.num_layers - 1)] == (self.where == "moe")
        if self.where in ("attention", "gated_delta_net"):
            net = model.gated_delta_net
            is_net = net is not None and layer < model.num_layers and net.layers[layer]
            return is_net == (self.where == "gated_delta_net")
        return self.where == "layer"


@dataclass(frozen=True)
class SpecNames:
    """Names that Megatron gives to parameters, by the layer spec and the version in use.

    norms: `separate` modules in the local layer spec, `fused` into the linears in the Transformer Engine spec.
    experts: `sequential` or `grouped` modules. mtp: the transformer layer inside an MTP layer, which is
    `transformer_layer` in megatron-core 0.16.
    """

    norms: Literal["separate", "fused"] = "separate"
    experts: Literal["sequential", "grouped"] = "sequential"
    mtp: Literal["mtp_model_layer", "transformer_layer"] = "mtp_model_layer"

    def of(self, mapping: ParamMapping, *, mtp: bool = False) -> str:
        """The name pattern of `mapping`; with `mtp`, of a decoder parameter inside an MTP layer."""
        name = mapping.te_name if self.norms == "fused" and mapping.te_name else mapping.megatron
        if self.experts == "grouped" and mapping.grouped_name:
            name = mapping.grouped_name
        return name.replace("decoder.layers.{layer}.", f"mtp.layers.{{layer}}.{self.mtp}.") if mtp else name
