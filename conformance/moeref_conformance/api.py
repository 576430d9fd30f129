"""What a target implements and what a cell is. Everything here is plain data: no pytest, no Megatron, no moeref.

Shape suffixes used in the kit: `tokens_BS` batch × sequence, `logits_BSV` batch × sequence × vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moeref_conformance.facets import (
    Config,
    Dispatch,
    DispatcherRequest,
    Export,
    Forward,
    Gradients,
    NameRow,
    Names,
    Padding,
    PadRequest,
    Plan,
    Replay,
    Request,
    RoundTrip,
    RoutedRows,
    Seeds,
    TensorMeta,
    Turn,
)

API_VERSION = 1

#: Facets a target may claim; `delta` and `sync` are reserved: the interface leaves room for them.
FACETS = ("names", "plan", "export", "forward", "gradients", "config", "delta", "replay", "dispatch", "seeds", "sync")


class Unsupported(Exception):
    """Raised by a target for something it cannot do. In a claimed cell this is a failure, never a skip."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout as the matrix names it. The kit does no arithmetic on it: that is the oracles' work.

    `vpp` counts virtual stages per pipeline rank (1 = none). `etp` defaults to `tp` as in megatron-core. `first` and
    `last` are `num_layers_in_first/last_pipeline_stage`; `embedding` and `loss` are
    `account_for_{embedding,loss}_in_pipeline_split`; `layout` is megatron-core's `pipeline_model_parallel_layout`.
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
    layout: str | None = None

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
        """The text form, `tp=2,pp=2,vpp=2,ep=2,etp=1,cp=1,world=8`, then what is not default; `layout=` last."""
        parts = [f"{k}={getattr(self, k)}" for k in ("tp", "pp", "vpp", "ep", "etp", "cp", "world")]
        parts += [f"{k}={getattr(self, k)}" for k in ("first", "last") if getattr(self, k) is not None]
        parts += [f"{k}=1" for k in ("embedding", "loss") if getattr(self, k)]
        if self.layout is not None:
            parts.append(f"layout={self.layout}")
        return ",".join(parts)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination to judge: what the matrix selects and what a report row names."""

    family: str  # Hugging Face model_type, e.g. "qwen3_moe"
    layout_name: str
    layout: Layout
    world: str = "gloo"  # static | gloo | gloo-cuda | nccl
    size: str = "tiny"  # or a published model (`sizes`), which decides the family and the axes down to `mtp`
    layers: int = 8  # decoder layers of the tiny model; uneven layouts need another number
    dtype: str = "float32"  # of the checkpoint and of the Megatron parameters
    tied: bool = False  # tie_word_embeddings
    mtp: int = 0  # multi-token prediction layers
    spelling: str = "per_expert"  # of the HF checkpoint: per_expert | fused (transformers 5 in memory)
    norms: str = "apart"  # Megatron's norms: apart (local spec) | fused into linears (Transformer Engine's names)
    experts: str = "sequential"  # Megatron's expert modules: sequential | grouped
    dispatcher: str = "alltoall"
    replay: str = "off"
    kernels: str = "torch"  # of the layers: torch (plain modules, under any names) | te (Transformer Engine's)
    precision: str = ""  # what `dtype` says, or an FP8 recipe: delayed | tensorwise | blockwise | mxfp8
    gradients: bool = field(default=True, compare=False)  # take a training step, if the target claims it
    needs: tuple[str, ...] = field(default=(), compare=False)  # of `machine.NEEDS`, beyond what the axes imply
    gpus: int = field(default=0, compare=False)  # least number of GPUs
    tags: tuple[str, ...] = field(default=(), compare=False)

    @property
    def variant(self) -> str:
        """All that is not layout or world: cells of one variant share a checkpoint and must export the same bytes."""
        extra: list[str] = []
        if self.size == "tiny":
            extra += [f"L{self.layers}"] if self.layers != 8 else []
            extra += [self.dtype] if self.dtype != "float32" else []
            extra += ["tied"] if self.tied else []
            extra += [f"mtp{self.mtp}"] if self.mtp else []
        extra += [self.spelling] if self.spelling != "per_expert" else []
        extra += [f"{self.norms}-norms"] if self.norms != "apart" else []
        extra += [self.experts] if self.experts != "sequential" else []
        extra += [v for v, d in ((self.kernels, "torch"), (self.precision, "")) if v != d]
        extra += [v for v, d in ((self.dispatcher, "alltoall"), (self.replay, "off")) if v != d]
        return "+".join([self.family if self.size == "tiny" else self.size, *extra])

    @property
    def id(self) -> str:
        """Stable and greppable: `qwen3_moe+tied/tp2-pp2/gloo`."""
        return f"{self.variant}/{self.layout_name}/{self.world}"


@dataclass(frozen=True, kw_only=True)
class Info:
    """Who is judged."""

    name: str
    version: str
    issues: str = ""  # where to report
    api: int = API_VERSION


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What the target says it can do, read before anything is built. A claim that does not hold is a failure."""

    facets: frozenset[str]
    families: frozenset[str]
    worlds: frozenset[str]
    dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    spellings: frozenset[str] = frozenset({"per_expert"})
    norms: frozenset[str] = frozenset({"apart"})
    experts: frozenset[str] = frozenset({"sequential"})
    dispatchers: frozenset[str] = frozenset({"alltoall"})
    replay: frozenset[str] = frozenset({"off"})
    kernels: frozenset[str] = frozenset({"torch"})
    precisions: frozenset[str] = frozenset({""})
    tied: bool = True
    mtp: int = 0  # most multi-token prediction layers
    announces: bool = True  # `Export.plan` says what will come; without it only the streams themselves are compared
    limits: Mapping[str, int] = field(default_factory=dict)  # e.g. {"vpp": 1, "ep": 64}

    def why_not(self, cell: Cell) -> str | None:
        """None if the cell is claimed, else the reason it is not, for the report's `unclaimed` row."""
        for name, value, claimed in (
            ("family", cell.family, self.families),
            ("world", cell.world, self.worlds),
            ("dtype", cell.dtype, self.dtypes),
            ("spelling", cell.spelling, self.spellings),
            ("norms", cell.norms, self.norms),
            ("experts", cell.experts, self.experts),
            ("dispatcher", cell.dispatcher, self.dispatchers),
            ("replay", cell.replay, self.replay),
            ("kernels", cell.kernels, self.kernels),
            ("precision", cell.precision, self.precisions),
        ):
            if value not in claimed:
                return f"{name}={value} is not claimed (claimed: {', '.join(sorted(filter(None, claimed))) or 'none'})"
        if cell.tied and not self.tied:
            return "tied embeddings are not claimed"
        if cell.mtp > self.mtp:
            return f"mtp={cell.mtp} is not claimed (at most {self.mtp} multi-token prediction layers are)"
        for axis, most in self.limits.items():
            have = getattr(cell.layout, axis)
            if have is not None and have > most:
                return f"{axis}={have} is over the claimed limit {most}"
        return None


@dataclass(frozen=True, kw_only=True)
class World:
    """Where one rank finds itself. Under `static` there are no processes and `rank` is -1."""

    kind: str
    rank: int
    size: int
    device: str  # "cpu" or "cuda:0"
    workdir: Path  # private scratch space of this rank
    hf_config: Path  # folder with the config.json of the model to build (no weights are promised here)


class Session(Protocol):
    """One opened cell on one rank. A facet that is not claimed is None."""

    @property
    def names(self) -> Names | None: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def export(self) -> Export | None: ...
    @property
    def forward(self) -> Forward | None: ...
    @property
    def gradients(self) -> Gradients | None: ...
    @property
    def config(self) -> Config | None: ...
    @property
    def seeds(self) -> Seeds | None: ...
    @property
    def replay(self) -> Replay | None: ...
    @property
    def dispatch(self) -> Dispatch | None: ...


class Target(Protocol):
    """What `--target name | module:attr` resolves to. It never sees an expected value."""

    @property
    def info(self) -> Info: ...
    @property
    def claims(self) -> Claims: ...
    def open(self, cell: Cell, world: World) -> AbstractContextManager[Session]: ...


def to_plain(value: Any) -> Any:
    """A dataclass of this module as JSON-ready plain values (tuples become lists, paths strings)."""
    if hasattr(value, "__dataclass_fields__"):
        return {k: to_plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return str(value) if isinstance(value, Path) else value


__all__ = [
    "API_VERSION",
    "FACETS",
    "Cell",
    "Claims",
    "Config",
    "Dispatch",
    "DispatcherRequest",
    "Export",
    "Forward",
    "Gradients",
    "Info",
    "Layout",
    "NameRow",
    "Names",
    "PadRequest",
    "Padding",
    "Plan",
    "Replay",
    "Request",
    "RoundTrip",
    "RoutedRows",
    "Seeds",
    "Session",
    "Target",
    "TensorMeta",
    "Turn",
    "Unsupported",
    "World",
    "to_plain",
]
