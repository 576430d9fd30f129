"""A cell, the layout it has, and the claims that say whether a target covers it. Plain data without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from moeref_conformance.contract.axes import axis, read_axes
from moeref_conformance.contract.backends import ANY_GPU, BACKENDS
from moeref_conformance.contract.published_models import TINY, published

#: No routing replay, replay of Megatron's own routes (R2), of the inference engine's (R3).
REPLAY_MODES = ("off", "R2", "R3")
#: Orders in which megatron-core's RankGenerator lays ranks out: the default, and that of `--use-tp-pp-dp-mapping`.
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
#: Designs of a target by field of `Claims`, and what each may be, the default first. One is as correct as the other.
DESIGNS: Mapping[str, tuple[Any, ...]] = {
    "adapter_base": (False, True),
    "adapter_saves": (False, True),
    "begins": ("random", "unset"),
    "cp_cut": ("zigzag", "runs"),
    "engine_logprobs": ("raw", "processed"),
    "engine_routes": (False, True),
    "entropies": (True, False),
    "lasts": ("stream", "next"),
    "lends": (False, True),
    "memory": ("now", "built"),
    "missing_rows": (True, False),
    "mtp_detached": (False, True),
    "mtp_in_policy": (False, True),
    "mtp_mask": ("target", "path"),
    "mtp_mean": ("step", "microbatch", "per_token"),
    "non_writers": ("names", "nothing"),
    "optimizer_offloads": (False, True),
    "optimizer_reference": (False, True),
    "optimizer_saves": (False, True),
    "optimizer_schedules": (False, True),
    "optimizer_settings": (False, True),
    "optimizer_skips": (False, True),
    "order": ORDERS,
    "receivers": ("writer", "all", "share"),
    "sends_int4": (False, True),
    "unmapped": ("exported", "built"),
}
#: What a microbatch is: one row of the tokens, two rows side by side [S, B], or three of unequal lengths packed (THD).
BATCHES = ("single", "pairs", "packed")
_ROWS = {"single": 1, "pairs": 2, "packed": 3}
#: Losses of routers that a step may have besides the language model's: megatron-core's kinds of load balancing, and
#: its z-loss; and the coefficient of each.
ROUTER_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
ROUTER_LOSS_COEFFICIENT = 0.01
#: megatron-core's default of `moe_router_bias_update_rate`.
BIAS_UPDATE_RATE = 1e-3
#: The learning rate of steps that move weights: some digits of most weights in bf16, not half of one of those over 1.
OPTIMIZER_RATE = 0.0038
#: Linears of gated delta nets that may have adapters, of Qwen3-Next and of Qwen3.5.
DELTA_NET_MODULES = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
#: Linears of a layer that may have adapters, by the ends of their names in Hugging Face's files.
ADAPTER_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj"),
    *DELTA_NET_MODULES,
)
#: How many multi-token prediction layers the checkpoint has where the model is built without them, by family; else 1.
LEFT_OUT = {"glm4_moe": 2}
#: FP8 recipes by Megatron-Core's names.
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout as the matrix names it. The kit computes nothing from it here; the oracles do.

    `vpp` counts virtual stages per pipeline rank (1 = none). `etp` defaults to `tp` as in megatron-core. `first` and
    `last` are `num_layers_in_first/last_pipeline_stage`; `embedding` and `loss` are
    `account_for_{embedding,loss}_in_pipeline_split`; `pipeline_layout` is `pipeline_model_parallel_layout`. `order` is
    what the target claims; no matrix names it.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    world: int = 0
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    pipeline_layout: str | None = None
    order: str = ORDERS[0]

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout: {name}={getattr(self, name)} must be at least 1")
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if not self.world:
            dense, expert = self.tp * self.pp * self.cp, self.expert_tp * self.ep * self.pp
            object.__setattr__(self, "world", math.lcm(dense, expert))

    @property
    def expert_tp(self) -> int:
        """ETP with its default filled in."""
        return self.tp if self.etp is None else self.etp

    @property
    def text(self) -> str:
        """The text form `tp=2,pp=2,vpp=2,ep=2,etp=1,cp=1,world=8`, then what is set, `pipeline_layout=` last."""
        parts = [f"{k}={getattr(self, k)}" for k in ("tp", "pp", "vpp", "ep", "etp", "cp", "world")]
        parts += [f"{k}={getattr(self, k)}" for k in ("first", "last") if getattr(self, k) is not None]
        parts += [f"{k}=1" for k in ("embedding", "loss") if getattr(self, k)]
        if self.order != ORDERS[0]:
            parts.append(f"order={self.order}")
        if self.pipeline_layout is not None:
            parts.append(f"pipeline_layout={self.pipeline_layout}")
        return ",".join(parts)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination to judge, which is one row of a report. `AXES` are its axes."""

    #: Hugging Face's model_type, such as "qwen3_moe".
    family: str = axis(claim="families", about="a `model_type`", shown="", of_size=True, required=True)
    layout_name: str = axis(name="layout", required=True, about="a name under `[layouts]`", shown="")
    layout: Layout
    backend: str = axis("gloo", choices=(*BACKENDS, ANY_GPU), claim="backends", shown="", required=True)
    #: A tiny model with random weights, or a published one, of which only the config is used.
    size: str = axis(TINY, choices=tuple(published()), shown="")
    #: Decoder layers. Layouts of many or uneven stages ask for another number than the default.
    layers: int = axis(4, shown="L{}", of_size=True, in_grid=False)
    #: Dtype of the checkpoint and of the Megatron parameters.
    dtype: str = axis("float32", choices=("float32", "bfloat16"), claim="dtypes", of_size=True)
    #: Hugging Face's tie_word_embeddings.
    tied: bool = axis(False, claim="tied", noun="tied embeddings", shown="tied", of_size=True)
    #: Two KV groups, which more TP ranks share.
    shared_groups: bool = axis(
        False,
        claim="shared_groups",
        noun="more TP ranks than KV groups",
        shown="groups2",
        of_size=True,
        hashed_if_set=True,
    )
    #: Multi-token prediction layers.
    mtp: int = axis(
        0, about="a number of layers", claim="mtp", noun="multi-token prediction layers", shown="mtp{}", of_size=True
    )
    #: The checkpoint has one multi-token prediction layer, and the model none: loading skips its tensors, and no export
    #: has them.
    mtp_left_out: bool = axis(
        False,
        claim="leaves_mtp_out",
        noun="models without the multi-token prediction layers of their checkpoint",
        shown="mtp-left-out",
        of_size=True,
        hashed_if_set=True,
    )
    #: Linears of the checkpoint in FP8, each block with a scale, as DeepSeek-V3 is published; see `api.Export`.
    fp8_checkpoint: bool = axis(
        False,
        claim="reads_fp8",
        noun="checkpoints with weights in FP8 blocks",
        shown="fp8-checkpoint",
        of_size=True,
        hashed_if_set=True,
    )
    #: Routed experts of the checkpoint in INT4, each group of a row's columns with a scale, as Kimi-K2.5 is published;
    #: see `api.Export`.
    int4_checkpoint: bool = axis(
        False,
        claim="reads_int4",
        noun="checkpoints with experts in INT4",
        shown="int4-checkpoint",
        of_size=True,
        hashed_if_set=True,
    )
    #: Experts of the checkpoint in MXFP4, each block of 32 inputs with a scale, as gpt-oss is published; see
    #: `api.Export`.
    mxfp4_checkpoint: bool = axis(
        False,
        claim="reads_mxfp4",
        noun="checkpoints with experts in MXFP4",
        shown="mxfp4-checkpoint",
        of_size=True,
        hashed_if_set=True,
    )
    #: Experts of the Hugging Face checkpoint: tensors of each, or one of all, as in the modules of transformers 5, or
    #: this of the decoder's layers alone, beside multi-token prediction layers that have tensors of each (Qwen3.5).
    expert_format: str = axis("per_expert", choices=("per_expert", "fused", "fused_decoder"), claim="expert_formats")
    #: Norms of the Megatron modules: separate (local spec), or fused into linears (Transformer Engine's names).
    norms: str = axis("separate", choices=("separate", "fused"), claim="norms", shown="{}-norms")
    #: Expert modules of Megatron.
    experts: str = axis("sequential", choices=("sequential", "grouped"), claim="experts")
    dispatcher: str = axis("alltoall", claim="dispatchers", shown_last=True)
    replay: str = axis("off", choices=REPLAY_MODES, claim="replay", shown_last=True)
    #: Modules of the layers: plain torch ones under any names, or Transformer Engine's.
    kernels: str = axis("torch", choices=("torch", "te"), claim="kernels", hashed_if_set=True)
    #: An FP8 recipe; empty: products are computed in `dtype`.
    precision: str = axis("", choices=("", *FP8_RECIPES), claim="precisions", hashed_if_set=True)
    #: What a microbatch is made of; see `api.Forward`.
    batch: str = axis("single", choices=BATCHES, claim="batches", shown_last=True, hashed_if_set=True)
    #: A loss of the routers in the training step; see `api.Gradients`.
    router_loss: str = axis(
        "", choices=("", *ROUTER_LOSSES), claim="router_losses", shown_last=True, hashed_if_set=True
    )
    #: A training step updates the experts' bias; see `api.Gradients`.
    bias_update: bool = axis(
        False,
        claim="bias_updates",
        noun="updates of the experts' bias",
        shown="bias-update",
        shown_last=True,
        hashed_if_set=True,
    )
    #: A training step trains on some of the tokens; see `api.Gradients`.
    loss_mask: bool = axis(
        False,
        claim="loss_masks",
        noun="loss masks",
        shown="loss-mask",
        shown_last=True,
        hashed_if_set=True,
    )
    #: An optimizer takes steps, in place of the training step without one; see `api.Optimizer`.
    optimizer_step: bool = axis(
        False,
        claim="optimizer_steps",
        noun="steps of an optimizer",
        shown="optimizer-step",
        shown_last=True,
        hashed_if_set=True,
    )
    gradients: bool = field(default=True, compare=False)  # take a training step, if the target claims it
    needs: tuple[str, ...] = field(default=(), compare=False)  # of `machine.NEEDS`, beyond what the axes imply
    gpus: int = field(default=0, compare=False)  # least number of GPUs
    tags: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def variant(self) -> str:
        """Family or size, and all axes but layout and backend: cells of a variant share a checkpoint and its export."""
        tiny = self.size == TINY
        axes = [a for a in AXES.values() if a.shown and a.of(self) != a.default and (tiny or not a.of_size)]
        parts = [a.text(a.of(self)) for a in sorted(axes, key=lambda a: a.shown_last)]
        return "+".join([self.family if tiny else self.size, *parts])

    @property
    def checkpoint_mtp(self) -> int:
        """Multi-token prediction layers of the checkpoint: the model's, or those that it leaves out."""
        return self.mtp + (LEFT_OUT.get(self.family, 1) if self.mtp_left_out else 0)

    @property
    def quantised_checkpoint(self) -> bool:
        """Whether weights of the checkpoint are quantised, of which the model loads others than files have."""
        return self.fp8_checkpoint or self.int4_checkpoint or self.mxfp4_checkpoint

    @property
    def rows(self) -> int:
        """Rows of the tokens in a microbatch."""
        return _ROWS[self.batch]

    @property
    def processes(self) -> int:
        """How many processes run the cell: one a rank, or one that answers for all ranks of a static cell."""
        return 1 if self.backend == "static" else self.layout.world

    @cached_property
    def id(self) -> str:
        """Stable and greppable: `qwen3_moe+tied/tp2-pp2/gloo`."""
        return f"{self.variant}/{self.layout_name}/{self.backend}"


#: The axes of a cell by name.
AXES = read_axes(fields(Cell))
#: What `Claims.limits` may name: numbers and flags of a layout and of a cell, and `rows`, those of a microbatch.
LIMITED = (*(f.name for of in (Layout, Cell) for f in fields(of) if f.type in ("int", "int | None", "bool")), "rows")


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the target says it can do, read before anything is built. A claim that does not hold is a failure."""

    facets: frozenset[str]
    families: frozenset[str]
    backends: frozenset[str]
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    expert_formats: frozenset[str] = frozenset({"per_expert"})
    norms: frozenset[str] = frozenset({"separate"})
    experts: frozenset[str] = frozenset({"sequential"})
    dispatchers: frozenset[str] = frozenset({"alltoall"})
    replay: frozenset[str] = frozenset({"off"})
    kernels: frozenset[str] = frozenset({"torch"})
    precisions: frozenset[str] = frozenset({""})
    batches: frozenset[str] = frozenset({"single"})
    router_losses: frozenset[str] = frozenset({""})
    bias_updates: bool = False
    loss_masks: bool = False
    optimizer_steps: bool = False
    tied: bool = True
    shared_groups: bool = True  # more TP ranks than KV groups
    mtp: int = 0  # most multi-token prediction layers
    leaves_mtp_out: bool = False  # of a checkpoint that has them, for a model that has none
    reads_int4: bool = False  # a checkpoint's experts in INT4, into a model in bf16
    reads_mxfp4: bool = False  # a checkpoint's experts in MXFP4, into a model in bf16
    reads_fp8: bool = False  # a checkpoint's weights in FP8 blocks, into a model in bf16
    #: Linears of ADAPTER_MODULES that `Adapters` gives adapters; those of gated delta nets if they are said.
    adapter_modules: frozenset[str] = frozenset(ADAPTER_MODULES) - frozenset(DELTA_NET_MODULES)
    adapter_base: bool = False  # `Adapters` has `base`: engines are sent the base, and adapters beside it
    adapter_saves: bool = False  # `Adapters` has `save` and `restore`
    has_plan: bool = True  # `Export.plan` has the metadata of the stream; without it only streams are compared
    begins: str = "random"  # what weights hold before loading: what Megatron draws for them, or anything
    cp_cut: str = "zigzag"  # what CP rank r computes of a sequence: chunks r and 2·CP-1-r of 2·CP, or run r of CP
    entropies: bool = True  # `Logprobs.logprobs` gives entropies too
    engine_logprobs: str = "raw"  # logprobs of samples: of the model's logits, or `processed` by the temperature
    engine_routes: bool = False  # samples of an engine carry its routes
    lasts: str = "stream"  # what a stream gives keeps its values: until the stream ends, or the next comes
    lends: bool = False  # what `Export.stream` gives may be the model's own parameters, to be read and never written
    memory: str = "now"  # parameters are read where they are now, or in the memory they were `built` in
    missing_rows: bool = True  # an engine's routes may have rows of -1, which are left to the router
    mtp_detached: bool = False  # the loss of multi-token prediction layers trains these alone: no embedding, no head
    mtp_in_policy: bool = False  # with a policy's loss these layers have theirs too
    #: With a loss mask, the loss of these layers counts predictions of tokens that are trained on (`target`), or only
    #: those where all tokens from the next to the predicted one are (`path`).
    mtp_mask: str = "target"
    #: It is a mean over all tokens of a step, or of means over those of a rank in a `microbatch`, which count alike, or
    #: `per_token` that the decoder trains on there, as under megatron-core's calculate_per_token_loss.
    mtp_mean: str = "step"
    non_writers: str = "names"  # what `Export.stream` yields for tensors that go to others: names and None, or nothing
    optimizer_offloads: bool = False  # `Optimizer` has `offload` and `onload`
    optimizer_reference: bool = False  # `Optimizer` has `reference`
    optimizer_saves: bool = False  # `Optimizer` has `save` and `restore`
    optimizer_schedules: bool = False  # `Optimizer.make` takes a schedule of learning rates
    optimizer_settings: bool = False  # `Optimizer.make` takes settings
    optimizer_skips: bool = False  # `Optimizer.step` skips or refuses steps whose gradients are not finite
    order: str = ORDERS[0]  # of ranks in process groups; `Cell.layout.order` has it
    receivers: str = "writer"  # who `Export.stream` gives tensors to: the writer, all ranks, or each rank a share
    sends_int4: bool = False  # `Quantised` gives experts in INT4 of families that are published so
    unmapped: str = "exported"  # a parameter that no table knows is refused on export, or as the model is `built`
    #: The most of a number or flag of the layout or the cell, for all families or one of those claimed:
    #: {"vpp": 1, "qwen3_next.cp": 1, "mixtral.tied": 0}. LIMITED has the names; with `rows` of 2 no samples are packed.
    limits: Mapping[str, int] = field(default_factory=dict)

    def why_not(self, cell: Cell) -> str | None:
        """None if the cell is claimed, else the reason it is not, for the report's `unclaimed` row."""
        for axis_ in AXES.values():
            if reason := axis_.uncovered(cell, self):
                return reason
        for key, most in self.limits.items():
            family, _, of = key.rpartition(".")
            at = cell.layout if hasattr(cell.layout, of) else cell
            have = getattr(at, of) if family in ("", cell.family) else None
            if have is not None and have > most:
                return f"{of}={have} is over the claimed limit {most}" + (f" of {family}" if family else "")
        return None
