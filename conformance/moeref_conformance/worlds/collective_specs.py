"""Each collective in one form: how many units a member sends to, and expects from, each other member.

`SPECS` maps a name in torch.distributed to the function that describes a call of it from its bound arguments. Whether
the descriptions of all members fit together is checked in `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Spec:
    """What one member declares. `send[j]` units go to member j, `expect[j]` units come from it; None is all zero."""

    dtype: torch.dtype | None = None
    shape: Sequence[int] = ()  # must be equal on all members (what may differ is left out)
    send: Sequence[int] | None = None
    expect: Sequence[int] | None = None
    root: int = -1  # global rank
    reduce: str = ""
    unit: str = "elements"
    inputs: Sequence[torch.Tensor] = field(default_factory=list)
    outputs: Sequence[torch.Tensor] = field(default_factory=list)


Describe = Callable[[dict[str, Any], Any, int, int], Spec]  # (bound arguments, group, group size, group rank) -> Spec


def _all_reduce(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x = a["tensor"]
    count = [x.numel()] * n
    return Spec(x.dtype, x.shape, count, count, reduce=_reduction(a["op"]), inputs=[x])


def _coalesced(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    xs = [a["tensors"]] if isinstance(a["tensors"], torch.Tensor) else list(a["tensors"])
    count = [sum(x.numel() for x in xs)] * n
    shape = [d for x in xs for d in (*x.shape, -1)]
    return Spec(xs[0].dtype if xs else None, shape, count, count, reduce=_reduction(a["op"]), inputs=xs)


def _reduce(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, root = a["tensor"], _root(a, group, "dst")
    send, expect = _to_root(x.numel(), group, n, root), [x.numel()] * n if _is_me(group, me, root) else None
    return Spec(x.dtype, x.shape, send, expect, root=root, reduce=_reduction(a["op"]), inputs=[x])


def _broadcast(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, root = a["tensor"], _root(a, group, "src")
    mine = _is_me(group, me, root)
    send, expect = [x.numel()] * n if mine else None, _to_root(x.numel(), group, n, root)
    return Spec(x.dtype, x.shape, send, expect, root=root, inputs=[x] if mine else [], outputs=[] if mine else [x])


def _all_gather(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, out = a["tensor"], list(a["tensor_list"])
    return Spec(x.dtype, (), [x.numel()] * n, _sized(out, n), inputs=[x], outputs=out)


def _all_gather_single(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, out = a["input_tensor"], a["output_tensor"]
    return Spec(x.dtype, x.shape, [x.numel()] * n, _split(out.numel(), n), inputs=[x], outputs=[out])


def _reduce_scatter(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    xs, out = list(a["input_list"]), a["output"]
    return Spec(out.dtype, (), _sized(xs, n), [out.numel()] * n, reduce=_reduction(a["op"]), inputs=xs, outputs=[out])


def _reduce_scatter_single(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, out = a["input"], a["output"]
    send, expect = _split(x.numel(), n), [out.numel()] * n
    return Spec(x.dtype, x.shape, send, expect, reduce=_reduction(a["op"]), inputs=[x], outputs=[out])


def _all_to_all_single(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, out = a["input"], a["output"]
    send, expect = _splits(a["input_split_sizes"], x, n), _splits(a["output_split_sizes"], out, n)
    return Spec(x.dtype, x.shape[1:], send, expect, unit="rows", inputs=[x], outputs=[out])


def _all_to_all(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    xs, out = list(a["input_tensor_list"]), list(a["output_tensor_list"])
    return Spec(xs[0].dtype if xs else None, (), _sized(xs, n), _sized(out, n), inputs=xs, outputs=out)


def _scatter(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    out, root = a["tensor"], _root(a, group, "src")
    xs = list(a["scatter_list"] or []) if _is_me(group, me, root) else []
    send = _sized(xs, n) if _is_me(group, me, root) else None
    expect = _to_root(out.numel(), group, n, root)
    return Spec(out.dtype, (), send, expect, root=root, inputs=xs, outputs=[out])


def _gather(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    x, root = a["tensor"], _root(a, group, "dst")
    out = list(a["gather_list"] or []) if _is_me(group, me, root) else []
    expect = _sized(out, n) if _is_me(group, me, root) else None
    return Spec(x.dtype, (), _to_root(x.numel(), group, n, root), expect, root=root, inputs=[x], outputs=out)


def _barrier(a: dict[str, Any], group: Any, n: int, me: int) -> Spec:
    return Spec()


def _root(a: dict[str, Any], group: Any, key: str) -> int:
    if a.get(f"group_{key}") is not None:
        return dist.get_global_rank(group, a[f"group_{key}"])
    return 0 if a[key] is None else int(a[key])


def _reduction(op: Any) -> str:
    """`SUM` for ReduceOp.SUM and for ReduceOp(ReduceOp.SUM)."""
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _is_me(group: Any, me: int, root: int) -> bool:
    return bool(dist.get_global_rank(group, me) == root)


def _to_root(count: int, group: Any, n: int, root: int) -> list[int]:
    return [count if dist.get_global_rank(group, j) == root else 0 for j in range(n)]


def _sized(pieces: Sequence[torch.Tensor], n: int) -> list[int]:
    """Elements per member; -1, which matches nothing, for a missing piece, or for all if there are too many."""
    return [pieces[j].numel() if j < len(pieces) else -1 for j in range(n)] if len(pieces) <= n else [-1] * n


def _split(numel: int, n: int) -> list[int]:
    return [numel // n] * n if numel % n == 0 else [-1] * n


def _splits(sizes: Any, x: torch.Tensor, n: int) -> list[int]:
    rows = x.shape[0] if x.dim() else 1
    given = [int(s) for s in sizes] if sizes is not None and len(sizes) else _split(rows, n)
    return given if len(given) == n and sum(given) == rows else [-1] * n


SPECS: dict[str, Describe] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "_all_gather_base": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "scatter": _scatter,
    "gather": _gather,
    "barrier": _barrier,
}
#: One name for the aliases of a collective: members that use different aliases still agree.
ALIASES = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
