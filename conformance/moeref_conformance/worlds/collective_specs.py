"""Each collective in one form: how many units a member sends to, and expects from, each other member.

`FORMS` maps a name in torch.distributed to what `describe` needs to know about its arguments. Whether the descriptions
of all members fit together is checked in `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]


@dataclass
class Spec:
    """What one member declares. `send[j]` units go to member j, `expect[j]` units come from it.

    A count of -1 matches nothing: the tensors or the splits of the call do not fit the group.
    """

    dtype: torch.dtype | None = None
    #: Must be equal on all members that do not pass a `flat` tensor (what may differ is left out). -1 ends each tensor.
    shape: Sequence[int] = ()
    send: Sequence[int] = ()
    expect: Sequence[int] = ()
    root: int = -1  # global rank
    reduce: str = ""
    unit: str = "elements"
    inputs: Tensors = ()
    outputs: Tensors = ()

    @property
    def flat(self) -> bool:
        """Whether one tensor of one dimension is passed, of which elements are counted."""
        return self.unit == "elements" and len(self.shape) == 2


def _whole(tensors: Tensors, n: int, sizes: Any) -> list[int]:
    """Every member gets all elements."""
    return [sum(x.numel() for x in tensors)] * n


def _split(tensors: Tensors, n: int, sizes: Any) -> list[int]:
    """Every member gets an equal share of the elements."""
    return _shares(tensors[0].numel(), n)


def _pieces(tensors: Tensors, n: int, sizes: Any) -> list[int]:
    """A tensor a member."""
    return [tensors[j].numel() if j < len(tensors) else -1 for j in range(n)] if len(tensors) <= n else [-1] * n


def _rows(tensors: Tensors, n: int, sizes: Any) -> list[int]:
    """The split sizes of the call; without them every member gets an equal share of the rows."""
    rows = tensors[0].shape[0] if tensors[0].dim() else 1
    given = [int(s) for s in sizes] if sizes is not None and len(sizes) else _shares(rows, n)
    return given if len(given) == n and sum(given) == rows else [-1] * n


def _shares(count: int, n: int) -> list[int]:
    return [count // n if count % n == 0 else -1] * n


@dataclass(frozen=True)
class Form:
    """The arguments of a collective that hold its input and output, and how these are shared out.

    `root`: the argument with the one rank that sends ("src") or receives ("dst"), where there is one.
    """

    input: str = ""
    output: str = ""
    send: Callable[[Tensors, int, Any], list[int]] = _whole
    expect: Callable[[Tensors, int, Any], list[int]] = _whole
    root: str = ""


FORMS: dict[str, Form] = {
    "all_reduce": Form("tensor", "tensor"),
    "all_reduce_coalesced": Form("tensors", "tensors"),
    "reduce": Form("tensor", "tensor", root="dst"),
    "broadcast": Form("tensor", "tensor", root="src"),
    "all_gather": Form("tensor", "tensor_list", expect=_pieces),
    "all_gather_into_tensor": Form("input_tensor", "output_tensor", expect=_split),
    "reduce_scatter": Form("input_list", "output", send=_pieces),
    "reduce_scatter_tensor": Form("input", "output", send=_split),
    "all_to_all_single": Form("input", "output", send=_rows, expect=_rows),
    "all_to_all": Form("input_tensor_list", "output_tensor_list", send=_pieces, expect=_pieces),
    "scatter": Form("scatter_list", "tensor", send=_pieces, root="src"),
    "gather": Form("tensor", "gather_list", expect=_pieces, root="dst"),
    "barrier": Form(),
}
#: Other names of torch for some of these: members that use different ones still agree.
ALIASES = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}


def describe(form: Form, arguments: Mapping[str, Any], group: Any, n: int, me: int) -> Spec:
    """What member `me` of `n` declares by a call with these arguments."""
    inputs, outputs = _tensors(arguments.get(form.input)), _tensors(arguments.get(form.output))
    send = form.send(inputs, n, arguments.get(f"{form.input}_split_sizes"))
    expect = form.expect(outputs, n, arguments.get(f"{form.output}_split_sizes"))
    skipped = 1 if form.send is _rows else 0
    alike = () if _pieces in (form.send, form.expect) else inputs
    shape = [d for x in alike for d in (*x.shape[skipped:], -1)]
    dtype = next((x.dtype for x in (*inputs, *outputs)), None)
    root, zero = -1, [0] * n
    if form.root:
        ranks = dist.get_process_group_ranks(group)
        root = _root(arguments, ranks, form.root)
        at_root = [int(rank == root) for rank in ranks]
        if form.root == "src":
            expect = [count * at for count, at in zip(expect, at_root, strict=True)]
            inputs, send = (inputs, send) if at_root[me] else ([], zero)
        else:
            send = [count * at for count, at in zip(send, at_root, strict=True)]
            outputs, expect = (outputs, expect) if at_root[me] else ([], zero)
    if form.input == form.output and inputs:
        outputs = []  # in place
    unit = "rows" if form.send is _rows else "elements"
    return Spec(dtype, shape, send, expect, root, _reduction(arguments.get("op")), unit, inputs, outputs)


def _tensors(value: Any) -> Tensors:
    return [value] if isinstance(value, torch.Tensor) else list(value or ())


def _root(arguments: Mapping[str, Any], ranks: list[int], name: str) -> int:
    """The global rank, which torch also takes by its place in the group."""
    if arguments.get(f"group_{name}") is not None:
        return ranks[int(arguments[f"group_{name}"])]
    return int(arguments[name] or 0)


def _reduction(op: Any) -> str:
    """`SUM` for ReduceOp.SUM and for ReduceOp(ReduceOp.SUM)."""
    return "" if op is None else str(getattr(op, "op", op)).rpartition(".")[2]
