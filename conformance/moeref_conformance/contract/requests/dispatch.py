"""Padding plans and dispatchers that the facet `dispatch` is asked for."""

from __future__ import annotations

from dataclasses import replace

from moeref_conformance.contract.api import DispatcherRequest, Layout, PadRequest

#: Sample lengths of up to four ranks: short and uneven ones, long ones, and ranks without samples, also all.
LENGTHS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,), (3, 2), (700,), (64, 1, 5)),
    ((1000,), (1001, 30), (17, 19), (2,)),
    ((130,), (), (33, 20), (16,)),
    ((), (), (5,), ()),
)
PRECISIONS = ("bf16", "tensorwise", "delayed", "mxfp8", "blockwise", "nvfp4")
DISPATCHERS = ("alltoall", "allgather", "flex-deepep", "flex-hybridep")
#: Precision and dispatcher of the requests for padding.
ASKED = (
    *((precision, "alltoall") for precision in PRECISIONS),
    *((precision, dispatcher) for dispatcher in DISPATCHERS[1:] for precision in ("bf16", "mxfp8")),
)
_KERNELS = frozenset({"deep_ep", "hybrid_ep", "transformer_engine"})
_WHERE = {
    "on a GPU with its packages": DispatcherRequest(dispatcher="", gpu=True, packages=_KERNELS),
    "without packages": DispatcherRequest(dispatcher="", gpu=True),
    "without a GPU": DispatcherRequest(dispatcher="", packages=_KERNELS),
    "in fp32": DispatcherRequest(dispatcher="", gpu=True, packages=_KERNELS, precision="fp32"),
    "with unequal rows": DispatcherRequest(dispatcher="", gpu=True, packages=_KERNELS, equal_rows=False),
}
CHOICES: dict[str, DispatcherRequest] = {
    f"{name} {where}": replace(request, dispatcher=name) for name in DISPATCHERS for where, request in _WHERE.items()
}
CHOICES["a dispatcher that does not exist"] = DispatcherRequest(dispatcher="pigeon")


def requests(layout: Layout) -> list[PadRequest]:
    """The requests for padding under `layout`, with as many ranks as an etp·ep group has, at most four."""
    ranks = min(4, layout.expert_tp * layout.ep)
    return [
        PadRequest(lengths=lengths[:ranks], precision=precision, dispatcher=dispatcher)
        for lengths in LENGTHS
        for precision, dispatcher in ASKED
    ]
