"""The backends of megatron-core's flex dispatcher, one row each.

To add a backend, add a row here. A rule for it alone goes into `table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend.

    name: megatron-core's `moe_flex_dispatcher_backend`.
    package: the package it needs, by its name in `Environment.packages`; `needs` is the same in words.
    imports: (module, name) pairs of that package that megatron-core's class `manager` uses.
    takes_one_rank: whether it accepts a group of etp·ep = 1, from megatron-core 0.19.
    pads_to_capacity: whether it pads expert inputs to capacity.
    equal_rows: whether all ranks of a group must dispatch the same number of rows, a multiple of `rows_multiple`;
    `rows_why` is the reason.
    settings: from a field of `Setup` to the setting of megatron-core that only this backend reads.
    """

    name: str
    package: str
    needs: str
    imports: tuple[tuple[str, str], ...]
    manager: str
    takes_one_rank: bool = False
    pads_to_capacity: bool = False
    equal_rows: bool = False
    rows_multiple: int = 1
    rows_why: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def choice(self) -> str:
        """The value of `Choice` with this backend: `flex-deepep`."""
        return f"flex-{self.name}"


BACKENDS: tuple[Backend, ...] = (
    Backend(
        name="deepep",
        package="deep_ep",
        needs="the package deep_ep",
        imports=(("deep_ep", "Buffer"), ("deep_ep.utils", "EventHandle"), ("deep_ep.utils", "EventOverlap")),
        manager="_DeepepManager",
        settings={"enable_deepep": "moe_enable_deepep"},
    ),
    Backend(
        name="hybridep",
        package="hybrid_ep",
        needs="deep_ep's hybrid-ep branch",
        imports=(("deep_ep", "HybridEPBuffer"),),
        manager="_HybridEPManager",
        takes_one_rank=True,
        pads_to_capacity=True,
        equal_rows=True,
        rows_multiple=64,  # megatron-core's HYBRIDEP_TOKEN_ALIGNMENT
        rows_why="hybridep exchanges equal pieces of 64-row chunks",
        settings={"pad_uneven_rows": "moe_hybridep_pad_uneven_dispatch_inputs"},
    ),
)
BY_NAME = {backend.name: backend for backend in BACKENDS}
#: megatron-core's default of `moe_flex_dispatcher_backend`.
DEFAULT = "deepep"
