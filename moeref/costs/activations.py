"""Bytes that a forward keeps for its backward, by part of a layer, under recompute and pipelining.

After Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4, written anew
for grouped-query and latent attention, SwiGLU and experts: what each module of megatron-core saves. A norm keeps its
input, a linear its input, SwiGLU its two halves; flash attention keeps queries, keys, values, its output and a number a
head. Experts are taken to be balanced. What is left out: dropout, biases, FP8 (its inputs are smaller), fragmentation.

Legend: R rows of the residual stream on a rank, after context and sequence parallelism; F rows inside tensor-parallel
regions, where the sequence is gathered; P rows that the experts of a rank get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moeref.dtypes import DTYPES
from moeref.families import Model
from moeref.layout import Layout, Stages

#: What recomputing a module, as `recompute_modules` names it, does not keep.
_DROPS: dict[str, tuple[str, ...]] = {
    "core_attn": ("attention statistics",),
    "layernorm": ("attention input", "mlp input"),
    "mla_up_proj": ("latents up",),
    "moe_act": ("expert activation",),
    "shared_experts": ("shared",),
    "mlp": ("dense",),
    "moe": ("router", "dispatched", "experts", "expert activation", "shared"),
}


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """megatron-core's settings of recomputation, by the ends of their names."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Recompute:
        """The recomputation of effective settings."""
        found = {name: values.get(f"recompute_{name}") for name in ("granularity", "method", "num_layers")}
        return cls(**found, modules=tuple(values.get("recompute_modules") or ("core_attn",)))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One microbatch on a rank. fused: norms, SwiGLU and router as Transformer Engine's; else as torch's modules."""

    model: Model
    layout: Layout
    tokens: int  # of all context-parallel ranks, padding included
    fused: bool = True
    width: int = field(init=False)
    R: int = field(init=False)
    F: int = field(init=False)
    P: int = field(init=False)

    def __post_init__(self) -> None:
        layout = self.layout
        gathered = -(-self.tokens // layout.cp)
        rows = -(-gathered // layout.tp)  # with tp > 1 megatron-core trains experts with sequence parallelism only
        values = {
            "width": DTYPES[self.model.param_dtype].bytes,
            "R": rows,
            "F": gathered,
            "P": rows * self.model.top_k * layout.etp,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def norm(self, features: int, rows: int) -> int:
        """Its input; torch's norm keeps two fp32 copies and a number a row."""
        return self.width * features * rows if self.fused else (8 * features + 4) * rows

    def swiglu(self, features: int, rows: int) -> int:
        """Its two halves; in torch also what is multiplied, and the half to which an offset is added."""
        return self.width * features * rows * (2 if self.fused else 4)


def layer(shape: Shape, number: int) -> dict[str, int]:
    """Bytes by part of one decoder layer, or of the layer inside an MTP layer."""
    model, width = shape.model, shape.width
    hidden = width * model.hidden * shape.R
    found = {
        "attention norm": shape.norm(model.hidden, shape.R),
        "attention input": hidden,
        **(_grouped_query(shape) if model.mla is None else _latent(shape)),
        "mlp norm": shape.norm(model.hidden, shape.R),
        "mlp input": hidden,
    }
    if model.moe_layers[min(number, model.num_layers - 1)]:
        return found | _experts(shape)
    ffn = model.ffn // shape.layout.tp
    return found | {"dense": shape.swiglu(ffn, shape.F) + width * ffn * shape.F}


def _grouped_query(shape: Shape) -> dict[str, int]:
    """The joint projection, of which values are a view; rotated queries and keys; the output."""
    model, layout = shape.model, shape.layout
    q, kv = model.heads * model.head_dim // layout.tp, max(model.kv_groups // layout.tp, 1) * model.head_dim
    norms = 8 * (q + kv) * shape.F if model.qk_norm and not shape.fused else 0
    return {
        "attention": shape.width * ((q + 2 * kv) + (q + kv) + q) * shape.F + norms,
        "attention statistics": 4 * model.heads // layout.tp * shape.F,
    }


def _latent(shape: Shape) -> dict[str, int]:
    """Latents of queries and keys, of R rows; then queries, keys, the projection that holds values, the output."""
    model, layout, width = shape.model, shape.layout, shape.width
    mla = model.mla
    assert mla is not None
    heads, latents = model.heads // layout.tp, (mla.q_rank, mla.kv_rank)
    down = sum(shape.norm(rank, shape.R) + width * rank * shape.R for rank in latents if rank)
    up = heads * (2 * (mla.nope + mla.rope) + (mla.nope + mla.v))
    return {
        "latents": down,
        "latents up": width * up * shape.F,
        "attention": width * heads * mla.v * shape.F,
        "attention statistics": 4 * heads * shape.F,
    }


def _experts(shape: Shape) -> dict[str, int]:
    model, layout, width = shape.model, shape.layout, shape.width
    ffn, shared = model.moe_ffn // layout.etp, model.shared_ffn // layout.tp
    weighted = 0 if shape.fused else width * ffn * shape.P  # routed weights multiply what SwiGLU gives
    return {
        # Scores, and for every row and expert an index of the permutation.
        "router": (8 if shape.fused else 12) * model.experts * shape.R,
        "dispatched": width * model.hidden * shape.P,
        "experts": shape.swiglu(ffn, shape.P) + weighted,
        "expert activation": width * ffn * shape.P,
        "shared": shape.swiglu(shared, shape.F) + width * shared * shape.F,
    }


def head(shape: Shape) -> int:
    """The final norm, the input of the output layer, logits in the dtype of the weights, and in fp32 for the loss."""
    model = shape.model
    ends = shape.norm(model.hidden, shape.R) + shape.width * model.hidden * shape.R
    return ends + (shape.width + 4) * model.vocab // shape.layout.tp * shape.F


def chunk(shape: Shape, layers: Sequence[int], recompute: Recompute) -> tuple[int, int]:
    """(bytes kept by one microbatch in these layers of one virtual stage, bytes more while a part is recomputed)."""
    own = [layer(shape, number) for number in layers]
    entry = shape.width * shape.model.hidden * shape.R
    if recompute.granularity != "full":
        drops = {part for name in recompute.modules for part in _DROPS.get(name, ())}
        drops = drops if recompute.granularity == "selective" else set()
        kept = sum(size for one in own for part, size in one.items() if part not in drops)
        return kept, max((sum(one.get(part, 0) for part in drops) for one in own), default=0)
    whole, number = [sum(one.values()) for one in own], recompute.num_layers or 1
    if recompute.method == "block":
        return sum(whole[number:]) + entry * len(whole[:number]), max(whole[:number], default=0)
    groups = [sum(whole[start : start + number]) for start in range(0, len(whole), number)]
    return entry * len(groups), max(groups, default=0)


def in_flight(layout: Layout, pp: int, microbatches: int | None = None) -> float:
    """How many microbatches a pipeline rank keeps at once, of all its virtual stages: 1F1B, or interleaved."""
    if layout.vpp == 1:
        most: float = layout.pp - pp
    else:
        most = ((layout.pp - pp - 1) * 2 + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
    return most if microbatches is None else min(most, microbatches)


def activations(
    shape: Shape, stages: Stages, recompute: Recompute, microbatches: int | None = None
) -> dict[int, int] | None:
    """The most bytes of activations on a rank of each pipeline rank. None for gated delta nets and for sparse
    attention, which are not counted.

    microbatches: of one step, which is at most what a rank keeps.
    """
    if shape.model.gated_delta_net is not None or shape.model.indexer is not None:
        return None
    found = {}
    for pp in range(shape.layout.pp):
        kept = more = last = 0
        for vp in range(shape.layout.vpp):
            layers = list(stages.layers[pp, vp])
            if stages.mtp == (pp, vp):
                layers += range(shape.model.num_layers, shape.model.num_layers + shape.model.mtp_layers)
                last += shape.model.mtp_layers * _mtp_ends(shape)
            own = chunk(shape, layers, recompute)
            kept, more = kept + own[0], max(more, own[1])
            last += head(shape) if shape.layout.has_head(pp, vp) else 0
        # The backward of the head is over when the first layer is recomputed.
        found[pp] = round(kept * in_flight(shape.layout, pp, microbatches)) + max(more, last)
    return found


def _mtp_ends(shape: Shape) -> int:
    """Of an MTP layer besides its transformer layer: two norms, their joint projection, and logits of its own."""
    model = shape.model
    joint = 2 * shape.norm(model.hidden, shape.R) + 2 * shape.width * model.hidden * shape.R
    return joint + head(shape)
