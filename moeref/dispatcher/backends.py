"""The backends of megatron-core's flex dispatcher: one row each, with everything that is special about it.

To add a backend, add a row here; a rule that holds for it alone goes into `table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend.

    name: megatron-core's `moe_flex_dispatcher_backend`. package: what it needs, as `Environment.packages` names it, and
    in words as `needs`; `imports` are the (module, name) pairs that megatron-core imports of it, in the class
    `manager`. takes_one_rank: from megatron-core 0.19, a group of etp·ep = 1 too. pads_to_capacity: whether it pads
    expert inputs to capacity. equal_rows: all ranks of a group dispatch the same number of rows, a multiple of
    `rows_multiple`, for the reason `rows_why`. settings: settings of megatron-core that only it reads, by the field of
    `Setup` that holds them.
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
        """The dispatcher with this backend, as users write it."""
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
#: What `moe_flex_dispatcher_backend` is unless set.
DEFAULT = "deepep"
