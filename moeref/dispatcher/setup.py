"""The input of the table of dispatchers: the choices, the settings of a run, and its environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from moeref.dispatcher.backends import BACKENDS, BY_NAME, DEFAULT, Backend
from moeref.layout import Layout

Precision = Literal["bf16", "fp32", "fp8", "fp4"]

#: The supported minor versions of megatron-core, against which the table is tested. `config/fields` has a file of each.
CORES = ("0.16", "0.19")
#: The version that is assumed where none is given or installed.
CORE = "0.19.2"
PACKAGES = (*(backend.package for backend in BACKENDS), "transformer_engine")


def minor_version(version: str) -> str:
    """A version without its patch level: `0.19` of `0.19.2`."""
    return ".".join(version.split(".")[:2])


class Choice(StrEnum):
    """A dispatcher with its backend."""

    _ignore_ = ["backend"]  # noqa: RUF012 -- read by Enum

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
    for backend in BACKENDS:
        vars()[f"FLEX_{backend.name.upper()}"] = backend.choice

    @property
    def dispatcher(self) -> str:
        """megatron-core's `moe_token_dispatcher_type`."""
        return self.value.partition("-")[0]

    @property
    def backend_name(self) -> str | None:
        """megatron-core's `moe_flex_dispatcher_backend`; None without flex."""
        return self.value.partition("-")[2] or None

    @property
    def row(self) -> Backend | None:
        """The row of the backend in `backends`; None without flex."""
        return BY_NAME.get(self.backend_name or "")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that a dispatcher must be compatible with, as megatron-core's values under shorter names.

    `backend` is read with flex only. `equal_rows`: whether all ranks of an expert group dispatch the same number of
    rows, as with a padding plan. Raises ValueError for a value that the table does not know.
    """

    dispatcher: str = "alltoall"
    backend: str | None = DEFAULT
    layout: Layout = field(default_factory=Layout)
    sequence_parallel: bool = False
    experts: int = 8
    topk: int = 2
    precision: Precision = "bf16"
    training: bool = True
    enable_deepep: bool = False
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    drop_policy: str = "probs"
    balancing: str = "aux_loss"
    variable_lengths: bool = False
    equal_rows: bool = True
    pad_uneven_rows: bool = False
    pad_for_quantization: bool = False
    shared_experts: bool = False
    shared_overlap: bool = False
    permute_fusion: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        if self.dispatcher not in ("allgather", "alltoall", "flex"):
            raise ValueError(f"dispatcher={self.dispatcher!r} is none of allgather, alltoall, flex")
        if self.backend is not None and self.backend not in BY_NAME:
            raise ValueError(f"backend={self.backend!r} is none of {', '.join(BY_NAME)}, None")
        if self.precision not in ("bf16", "fp32", "fp8", "fp4"):
            raise ValueError(f"precision={self.precision!r} is none of bf16, fp32, fp8, fp4")
        if self.experts < 1 or not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk={self.topk} of experts={self.experts}: both at least 1, and topk at most experts")

    @property
    def choice(self) -> Choice | None:
        """The dispatcher with its backend; None for flex without one."""
        if self.dispatcher != "flex":
            return Choice(self.dispatcher)
        backend = DEFAULT if self.enable_deepep else self.backend
        return Choice(f"flex-{backend}") if backend else None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a run takes place: megatron-core's version, the importable optional packages, and whether there is a GPU.

    Raises ValueError for a version or package that the table does not know.
    """

    core: str = CORE
    packages: frozenset[str] = frozenset()
    gpu: bool = False

    def __post_init__(self) -> None:
        if self.minor not in CORES:
            raise ValueError(f"megatron-core {self.core}: the table is known to hold for {', '.join(CORES)} only")
        if unknown := self.packages - set(PACKAGES):
            raise ValueError(f"packages {sorted(unknown)} are none of {', '.join(PACKAGES)}")

    @property
    def minor(self) -> str:
        """The version without its patch level."""
        return minor_version(self.core)


class DispatcherError(ValueError):
    """A dispatcher that the table refuses, or input that does not fit; the message has every reason and the fix."""
