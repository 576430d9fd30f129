"""Bugs of adapters (LRA): what is sent of them, what trains them, what they merge to, and what becomes of the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, TensorMeta, World
from moeref_conformance.contract.cells import ADAPTER_MODULES, BIAS_UPDATE_RATE
from moeref_conformance.contract.requests.adapters import RANK, SCALE
from moeref_conformance.contract.topology import coords
from moeref_conformance.selftest.border import Change, Tensors, checkpoint, facet
from moeref_conformance.selftest.faults import roles
from moeref_conformance.selftest.faults.base import Fault, cell

Sent = Iterator[tuple[str, "torch.Tensor | None"]]
Weights = Iterator[tuple[TensorMeta, "torch.Tensor | None"]]
EXPERTS = ".experts."
#: Channels of a head in Qwen3-Next's attention.
HEAD = 8
#: Key heads of a gated delta net, and rows of in_proj_qkvz that each has of queries, keys, values and gates.
KEY_HEADS, OF_KEY_HEAD = 8, [22, 22, 20, 20]


def trained(session: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of this rank that are trained, by the target's own names."""
    named = ((f"{i}:{n}", p) for i, chunk in enumerate(session.adapters.chunks()) for n, p in chunk.named_parameters())
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _lora_bs(session: Any, part: str = "") -> list[torch.nn.Parameter]:
    """Each lora_B [out, RANK] of this rank that has `part` in its name."""
    return [of for name, of in trained(session).items() if part in name and of.shape[-1] == RANK]


def _untrained_in_fp32(session: Session, cell: Cell, world: World) -> Any:
    """Steps move what is in the base's dtype."""
    good: Any = session.adapters

    def step(*asked: Any) -> None:
        kept = {of: of.detach().clone() for of in trained(session).values() if of.dtype == torch.float32}
        good.step(*asked)
        for of, before in kept.items():
            of.data.copy_(before)

    return facet(session, "adapters", step=step)


def attached(change: Callable[[Any, Cell, World], None]) -> Change:
    """A fault's `wrap` that changes adapters once they are attached."""
    return _behind("attach", change)


def _behind(call: str, change: Callable[[Any, Cell, World], None]) -> Change:
    """A fault's `wrap` that changes adapters behind each `attach` or `restore`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def called(*asked: Any) -> None:
            getattr(good, call)(*asked)
            with torch.no_grad():
                change(session, cell, world)

        return facet(session, "adapters", **{call: called})

    return wrap


def sent(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> Change:
    """A fault's `wrap` that changes each factor that is sent; None drops it."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def stream() -> Sent:
            for name, tensor in good.stream():
                told = (name, tensor) if tensor is None else change(name, tensor)
                if told is not None:
                    yield told

        return facet(session, "adapters", stream=stream)

    return wrap


def _on_whole_qkv(session: Session, cell: Cell, world: World) -> Any:
    """Whatever part of a fused linear is asked for, all of it gets adapters."""
    good: Any = session.adapters

    def attach(checkpoint: Path, rank: int, alpha: float, modules: Any) -> None:
        good.attach(checkpoint, rank, alpha, ("q_proj", "k_proj", "v_proj"))

    return facet(session, "adapters", attach=attach)


def _expert_shards_cut_in_half(session: Session, cell: Cell, world: World) -> Any:
    """Rows [gate, up, gate, up] of two ETP ranks are cut in the middle."""
    good: Any = session.adapters

    def stream() -> Sent:
        held = dict(good.stream())
        for name, tensor in held.items():
            part = next((p for p in ("gate_proj", "up_proj") if f"{p}.lora_B" in name), "")
            if tensor is None or EXPERTS not in name or not part:
                yield name, tensor
                continue
            gate, up = (held[name.replace(part, p)].chunk(2) for p in ("gate_proj", "up_proj"))
            rank = ("gate_proj", "up_proj").index(part)
            yield name, torch.cat((gate[rank], up[rank]))

    return facet(session, "adapters", stream=stream)


def _exchanged(first: str, second: str, factor: str) -> Change:
    """A fault's `wrap` that sends the factor of one linear under the name of another, and of that under this one's."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def stream() -> Sent:
            held = dict(good.stream())
            for name in held:
                other = name.replace(first, "-").replace(second, first).replace("-", second)
                yield name, held[other if name.endswith(f"{factor}.weight") else name]

        return facet(session, "adapters", stream=stream)

    return wrap


def _merged_by(rewrite: Callable[[Weights, Tensors], Weights]) -> Change:
    """A fault's `wrap` whose stream of merged weights is what `rewrite` makes of it and of the base, by name."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters
        base: Tensors = {}

        def attach(folder: Path, *asked: Any) -> None:
            base.update(checkpoint(folder))
            good.attach(folder, *asked)

        return facet(session, "adapters", attach=attach, merged=lambda: rewrite(good.merged(), base))

    return wrap


def _merged(change: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    """A fault's `wrap` that changes merged weights by `change(name, merged, base)`."""

    def rewrite(pairs: Weights, base: Tensors) -> Weights:
        for meta, tensor in pairs:
            yield meta, None if tensor is None else change(meta.name, tensor, base[meta.name])

    return _merged_by(rewrite)


def _promoted(session: Session, cell: Cell, world: World) -> Any:
    """Merged weights are in the dtype of adapters."""
    good: Any = session.adapters

    def merged() -> Weights:
        for meta, tensor in good.merged():
            yield replace(meta, dtype="float32"), None if tensor is None else tensor.float()

    return facet(session, "adapters", merged=merged)


def merged_in_bf16(session: Session, cell: Cell, world: World) -> Any:
    """Factors are sent, multiplied and added to the base as bf16 has them."""
    good: Any = session.adapters
    base: Tensors = {}

    def attach(folder: Path, *asked: Any) -> None:
        base.update(checkpoint(folder))
        good.attach(folder, *asked)

    def stream() -> Sent:
        return ((name, None if of is None else of.bfloat16().float()) for name, of in good.stream())

    def merged() -> Weights:
        factors = {name: of.bfloat16() for name, of in good.stream() if of is not None}
        for meta, tensor in good.merged():
            name_a, name_b = (f"base_model.model.{meta.name[:-6]}{of}.weight" for of in ("lora_A", "lora_B"))
            if tensor is not None and name_a in factors:
                tensor = base[meta.name] + SCALE * (factors[name_b] @ factors[name_a])
            yield meta, tensor

    return facet(session, "adapters", attach=attach, stream=stream, merged=merged)


def stepped(change: Callable[[Any, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]) -> Change:
    """A fault's `wrap` that changes a rank's adapters after each step, by `change(session, before, moved)`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def step(*asked: Any) -> None:
            before = {name: of.detach().clone() for name, of in trained(session).items()}
            good.step(*asked)
            moved = {name: of.detach() - before[name] for name, of in trained(session).items()}
            with torch.no_grad():
                change(session, before, moved)

        return facet(session, "adapters", step=step)

    return wrap


def _experts_stay(session: Any, before: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in trained(session).items():
        if EXPERTS in name:
            parameter.copy_(before[name])


def _with_those_before(session: Session, cell: Cell, world: World) -> Any:
    """Gradients of a step are added to those of the one before."""
    last: Tensors = {}

    def change(session: Any, before: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in trained(session).items():
            if name in last:
                parameter.add_(last[name])
        last.update(moved)

    return stepped(change)(session, cell, world)


def _routers_too(session: Any, before: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]) -> None:
    for chunk in session.adapters.chunks():
        for name, parameter in chunk.named_parameters():
            if name.endswith(".router.weight"):
                parameter.mul_(1.01)


def _biases_too(session: Any, before: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]) -> None:
    """Where steps update the experts' bias, those of adapters do so too."""
    for chunk in session.adapters.chunks():
        for name, buffer in chunk.named_buffers():
            if name.endswith(".router.expert_bias"):
                buffer.add_(BIAS_UPDATE_RATE)


def _norms_inside_too(session: Any, before: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]) -> None:
    for chunk in session.adapters.chunks():
        for name, parameter in chunk.named_parameters():
            if name.endswith(".layer_norm_weight"):
                parameter.mul_(1.01)


def _rows_of_the_first(session: Session, cell: Cell, world: World) -> Any:
    """All replicas train on the rows of the first, so that its adapters move as where they are never reduced."""
    good: Any = session.adapters

    def step(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        for of_BS in (first := [tokens_BS.clone(), mask_BS.clone()]):
            dist.broadcast(of_BS, src=0)
        good.step(*first, rate)

    return facet(session, "adapters", step=step)


def _by_expert_rank(session: Any, cell: Cell, world: World) -> None:
    """Adapters of shared experts are drawn otherwise on other EP ranks."""
    for name, parameter in trained(session).items():
        if "shared_experts" in name and coords(cell.layout, world.rank)["ep"]:
            parameter.neg_()


def _marked(attribute: str, value: bool, part: str = "") -> Change:
    """A fault's `wrap` that sets an attribute of Megatron's on adapters that have it."""

    def change(session: Any, cell: Cell, world: World) -> None:
        for name, parameter in trained(session).items():
            if part in name and hasattr(parameter, attribute):
                setattr(parameter, attribute, value)

    return attached(change)


def _drawn_lora_bs(session: Any, cell: Cell, world: World) -> None:
    for parameter in _lora_bs(session):
        parameter.fill_(0.01)


def _zero(session: Any, cell: Cell, world: World) -> None:
    for parameter in trained(session).values():
        parameter.zero_()


def _cut_by_columns(session: Any) -> Iterator[torch.nn.Parameter]:
    """The factors of this rank that are parts of a lora_A [r, in], by megatron-core's mark of what is cut."""
    for parameter in trained(session).values():
        if getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", 0) == 1:
            yield parameter


def _drawn_alike(session: Any, cell: Cell, world: World) -> None:
    for parameter in _cut_by_columns(session):
        dist.broadcast(parameter.data, 0)


def _drawn_by_the_width_of_a_shard(session: Any, cell: Cell, world: World) -> None:
    for parameter in _cut_by_columns(session):
        parameter.mul_(cell.layout.tp**0.5)


def _scaled_to_one(session: Session, cell: Cell, world: World) -> Any:
    """Alpha is not read: the scale is 1."""
    good: Any = session.adapters

    def attach(folder: Path, rank: int, alpha: float, modules: Any) -> None:
        good.attach(folder, rank, float(rank), modules)

    return facet(session, "adapters", attach=attach)


def _on_all(session: Session, cell: Cell, world: World) -> Any:
    """Modules are not read: every linear gets an adapter."""
    good: Any = session.adapters

    def attach(folder: Path, rank: int, alpha: float, modules: Any) -> None:
        good.attach(folder, rank, alpha, ADAPTER_MODULES)

    return facet(session, "adapters", attach=attach)


class _Counted:
    """An `Adapters` whose lora_B of experts, or all of them, count several times in what is computed."""

    def __init__(self, session: Any, times: float, part: str = "") -> None:
        self._session, self._times, self._part = session, times, part
        self._lora_bs: list[torch.nn.Parameter] = []

    def attach(self, *asked: Any) -> None:
        self._session.adapters.attach(*asked)
        self.find()

    def find(self) -> None:
        """The lora_B that are there now count so often from here on."""
        self._lora_bs = _lora_bs(self._session, self._part)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What a step adds in the block is the gradient of a lora_B that counts so often."""
        before = [of.detach().clone() for of in self._lora_bs]
        for of in self._lora_bs:
            of.data *= self._times
        try:
            yield
        finally:
            for of, was in zip(self._lora_bs, before, strict=True):
                moved = of.data - self._times * was
                of.data.copy_(was + self._times * moved)

    def logits(self, tokens_BS: torch.Tensor, base: bool = False) -> Any:
        with self.counted():
            return self._session.adapters.logits(tokens_BS, base)

    def step(self, *asked: Any) -> None:
        with self.counted():
            self._session.adapters.step(*asked)


def _counted_by_each_rank(session: Session, cell: Cell, world: World) -> Any:
    each = _Counted(session, cell.layout.expert_tp, EXPERTS)
    good: Any = session.adapters

    def restore(*asked: Any) -> None:
        good.restore(*asked)
        each.find()

    return facet(session, "adapters", attach=each.attach, restore=restore, logits=each.logits, step=each.step)


def lent(call: str) -> Change:
    """A fault's `wrap` that sends tensors of the model itself, where it holds what is sent in one piece."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def own(tensor: torch.Tensor) -> torch.Tensor:
            held = (parameter.detach() for chunk in good.chunks() for parameter in chunk.parameters())
            return next((of for of in held if of.shape == tensor.shape and torch.equal(of, tensor)), tensor)

        def lending() -> Iterator[Any]:
            return ((what, tensor if tensor is None else own(tensor)) for what, tensor in getattr(good, call)())

        return facet(session, "adapters", **{call: lending})

    return wrap


def _merged_stays(session: Session, cell: Cell, world: World) -> Any:
    """Once weights were merged, adapters count in the weights and beside them, until a step takes them apart."""
    good: Any = session.adapters
    twice, merges = _Counted(session, 2.0), list[bool]()

    def merged() -> Weights:
        yield from good.merged()
        merges.append(True)

    def logits(tokens_BS: torch.Tensor, base: bool = False) -> Any:
        return (twice if merges else good).logits(tokens_BS, base)

    def step(*asked: Any) -> None:
        merges.clear()
        good.step(*asked)

    return facet(session, "adapters", attach=twice.attach, merged=merged, logits=logits, step=step)


def _in_one_buffer(session: Session, cell: Cell, world: World) -> Any:
    """All factors come in one buffer, which the next one overwrites."""
    good: Any = session.adapters

    def stream() -> Sent:
        buffer = torch.empty(2**16)
        for name, tensor in good.stream():
            yield name, None if tensor is None else buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    return facet(session, "adapters", stream=stream)


def _taken_apart_at_the_end(pairs: Weights, base: Tensors) -> Weights:
    """What is sent merged is the base again once all of it was sent."""
    given: Tensors = {}
    for meta, tensor in pairs:
        if tensor is not None:
            given[meta.name] = tensor
        yield meta, tensor
    with torch.inference_mode():
        for name, tensor in given.items():
            tensor.copy_(base[name])


def _subtracted(session: Session, cell: Cell, world: World) -> Any:
    """What a merge adds to a weight is subtracted from it, and leaves what rounding did."""
    good: Any = session.adapters

    def merged() -> Weights:
        yield from good.merged()
        for chunk in good.chunks():
            for parameter in chunk.parameters():
                if not parameter.requires_grad and parameter.dim() == 2:
                    parameter.data.add_(0.1).sub_(0.1)

    return facet(session, "adapters", merged=merged)


def _base(change: Callable[[Any, Weights, Tensors], Weights]) -> Change:
    """A fault's `wrap` that sends `change(good adapters, base, factors)` of the base, where factors are full."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters

        def base() -> Weights:
            factors = {name: tensor for name, tensor in good.stream() if tensor is not None}
            yield from change(good, good.base(), factors)

        return facet(session, "adapters", base=base)

    return wrap


def _wrapped(name: str, factors: Tensors) -> bool:
    """Whether this weight's linear has an adapter."""
    return f"base_model.model.{name.removesuffix('weight')}lora_A.weight" in factors


def _inside_adapters(good: Any, base: Weights, factors: Tensors) -> Weights:
    for meta, tensor in base:
        inside = f"{meta.name.removesuffix('weight')}base_layer.weight"
        yield replace(meta, name=inside) if _wrapped(meta.name, factors) else meta, tensor


def _factors_beside(good: Any, base: Weights, factors: Tensors) -> Weights:
    yield from base
    for name, tensor in factors.items():
        inner = name.removeprefix("base_model.model.")
        yield TensorMeta(name=inner, shape=tuple(tensor.shape), dtype="float32"), tensor


def _merged_in(part: str) -> Change:
    """A fault's `wrap` that sends merged weights as the base's, of those with `part` in their names."""

    def change(good: Any, base: Weights, factors: Tensors) -> Weights:
        held = {meta.name: tensor for meta, tensor in base if part not in meta.name}
        for meta, tensor in good.merged():
            yield meta, held.get(meta.name, tensor)

    return _base(change)


def _less_the_adapter(good: Any, base: Weights, factors: Tensors) -> Weights:
    """What a merged weight is less what was added to it."""
    held = dict(base)
    for meta, tensor in good.merged():
        of_base = held[meta]
        if tensor is None or of_base is None:
            yield meta, None
        else:
            added = tensor + 0.1
            yield meta, added - (added - of_base)


def _base_in_one_buffer(good: Any, base: Weights, factors: Tensors) -> Weights:
    buffer = torch.empty(2**16)
    for meta, tensor in base:
        yield meta, None if tensor is None else buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _off_behind_the_base(session: Session, cell: Cell, world: World) -> Any:
    """Adapters that were off while the base was sent stay off."""
    good: Any = session.adapters
    sent = list[bool]()

    def base() -> Weights:
        yield from good.base()
        sent.append(True)

    def logits(tokens_BS: torch.Tensor, base: bool = False) -> Any:
        return good.logits(tokens_BS, base or bool(sent))

    def step(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        good.step(tokens_BS, mask_BS, 0.0 if sent else rate)

    return facet(session, "adapters", base=base, logits=logits, step=step)


def _fresh_again(session: Any, cell: Cell, world: World) -> None:
    for parameter in _lora_bs(session):
        parameter.zero_()


def _of_first_tp_rank(session: Any, cell: Cell, world: World) -> None:
    """Other ranks go on from 0."""
    for parameter in _lora_bs(session):
        if getattr(parameter, "tensor_model_parallel", False) and coords(cell.layout, world.rank)["tp"]:
            parameter.zero_()


def _of_first_expert_rank(session: Any, cell: Cell, world: World) -> None:
    for parameter in _lora_bs(session, EXPERTS):
        if coords(cell.layout, world.rank)["ep"]:
            parameter.zero_()


def _rounded(session: Any, cell: Cell, world: World) -> None:
    for parameter in trained(session).values():
        parameter.copy_(parameter.bfloat16())


def _frozen_once_restored(session: Session, cell: Cell, world: World) -> Any:
    """Restored adapters are no part of what is trained."""
    good: Any = session.adapters
    restored = list[bool]()

    def restore(*asked: Any) -> None:
        good.restore(*asked)
        restored.append(True)

    def step(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        good.step(tokens_BS, mask_BS, 0.0 if restored else rate)

    return facet(session, "adapters", restore=restore, step=step)


def _restored_without_alpha(session: Session, cell: Cell, world: World) -> Any:
    """Once restored, adapters count with a scale of 1."""
    counted = _Counted(session, 1 / SCALE)
    good: Any = session.adapters

    def restore(*asked: Any) -> None:
        good.restore(*asked)
        counted.find()

    return facet(session, "adapters", restore=restore, logits=counted.logits, step=counted.step)


def _merged_once_restored(first: str, then: str) -> Change:
    """A fault's `wrap` in which, once adapters are restored, one stream of weights has what comes of the other."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.adapters
        streams = {first: first}

        def restore(*asked: Any) -> None:
            good.restore(*asked)
            streams[first] = then

        return facet(session, "adapters", restore=restore, **{first: lambda: getattr(good, streams[first])()})

    return wrap


def _merged_as_before_a_restore(session: Session, cell: Cell, world: World) -> Any:
    """Once adapters are restored, merged weights are those of the last stream before."""
    good: Any = session.adapters
    last, restored = list[Any](), list[bool]()

    def restore(*asked: Any) -> None:
        good.restore(*asked)
        restored.append(True)

    def merged() -> Weights:
        if not restored:
            last[:] = [(meta, None if of is None else of.detach().clone()) for meta, of in good.merged()]
        yield from ((meta, None if of is None else of.clone()) for meta, of in last)

    return facet(session, "adapters", restore=restore, merged=merged)


def _folded_in_place(session: Session, cell: Cell, world: World) -> Any:
    """What is sent shares the memory of the adapters, and alpha is folded into it there."""
    good: Any = session.adapters
    lora_bs = list[torch.nn.Parameter]()

    def attach(*asked: Any) -> None:
        good.attach(*asked)
        lora_bs.extend(_lora_bs(session))

    def stream() -> Sent:
        for parameter in lora_bs:
            parameter.data *= SCALE
        yield from good.stream()

    return facet(session, "adapters", attach=attach, stream=stream)


def _reference_with_adapters(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.adapters
    return facet(session, "adapters", logits=lambda tokens_BS, base=False: good.logits(tokens_BS))


def _frozen_behind_a_reference(session: Session, cell: Cell, world: World) -> Any:
    """Adapters that were off for a reference train no more."""
    good: Any = session.adapters
    asked = list[bool]()

    def logits(tokens_BS: torch.Tensor, base: bool = False) -> Any:
        asked.extend([base] * base)
        return good.logits(tokens_BS, base)

    def step(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        good.step(tokens_BS, mask_BS, 0.0 if asked else rate)

    return facet(session, "adapters", logits=logits, step=step)


def _merged_once(session: Session, cell: Cell, world: World) -> Any:
    """Merged weights are those of the first time."""
    good: Any = session.adapters
    first = list[Any]()

    def merged() -> Weights:
        if not first:
            first.extend(good.merged())
        yield from first

    return facet(session, "adapters", merged=merged)


def _each_its_own(session: Session, cell: Cell, world: World) -> Any:
    """All ranks are given adapters, which the others have not waited for."""
    good: Any = everywhere(session, cell, world)

    def stream() -> Sent:
        for name, tensor in good.adapters.stream():
            yield name, tensor if world.rank == 0 or name.endswith("lora_A.weight") else torch.zeros_like(tensor)

    return facet(good, "adapters", stream=stream)


def everywhere(session: Any, cell: Cell, world: World) -> Any:
    """As `roles.everywhere`, and adapters and merged weights too."""

    def to_all(pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for key, tensor in pairs:
            given = [tensor]
            dist.broadcast_object_list(given, src=0)
            yield key, given[0]

    good = session.adapters
    return facet(
        roles.everywhere(session, cell, world),
        "adapters",
        stream=lambda: to_all(good.stream()),
        merged=lambda: to_all(good.merged()),
        base=lambda: to_all(good.base()),
    )


def _by_local_number(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Of 16 experts each of two ranks has 8."""
    return re.sub(r"\.experts\.(\d+)\.", lambda found: f".experts.{int(found[1]) % 8}.", name), tensor


def _of_half_the_rank(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    if EXPERTS not in name:
        return name, tensor
    return name, tensor[: RANK // 2] if "lora_A" in name else tensor[:, : RANK // 2]


def _folded(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, SCALE * tensor if "lora_B" in name else tensor


def _without_gates(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Of a lora_B of gated queries the rows of gates, which follow those of the query of each head, stay 0."""
    if not name.endswith("q_proj.lora_B.weight"):
        return name, tensor
    by_head = tensor.clone().view(-1, 2, HEAD, tensor.shape[1])
    by_head[:, 1] = 0
    return name, by_head.view_as(tensor)


def _gates_last(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The rows of all gates after those of all queries."""
    if not name.endswith("q_proj.lora_B.weight"):
        return name, tensor
    return name, tensor.view(-1, 2, HEAD, tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)


def _parts_in_a_run(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The rows of in_proj_qkvz by its parts, as a fused linear holds them, not by key heads as the file does."""
    if not name.endswith("in_proj_qkvz.lora_B.weight"):
        return name, tensor
    of_heads = tensor.view(KEY_HEADS, -1, tensor.shape[1])
    return name, torch.cat([part.flatten(0, 1) for part in torch.split(of_heads, OF_KEY_HEAD, 1)])


def _base_layer(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return re.sub(r"(q_proj|k_proj|v_proj)\.", r"\1.base_layer.", name), tensor


def _without_k_and_v(name: str, merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return base if re.search(r"\.(k_proj|v_proj)\.", name) else merged


def _fused_left_out(name: str, merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    return base if merged.dim() == 3 else merged


def _up_on_gates(name: str, merged: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    if not name.endswith(".gate_up_proj"):
        return merged
    added = merged - base
    gate, up = added.chunk(2, dim=1)
    return base + torch.cat([gate + up, torch.zeros_like(up)], 1)


def _embeddings_cut_off(session: Any, cell: Cell, world: World) -> None:
    """What comes from the embedding needs no gradient: a layer that is recomputed has none."""
    for chunk in session.adapters.chunks():
        if hasattr(chunk, "embedding"):
            chunk.embedding.register_forward_hook(lambda module, given, hidden: hidden.detach())


FAULTS = (
    Fault(
        id="adapters-behind-frozen-embeddings-not-trained",
        bug="Megatron-Bridge#1750, #5586, verl#4566: layers recomputed after a frozen embedding have no gradient",
        rules=("LRA-002",),
        cell=cell("qwen3_moe", "pp2", loss_mask=True),
        wrap=attached(_embeddings_cut_off),
        diagnosis="not moved",
    ),
    Fault(
        id="adapters-of-routed-experts-left-out",
        bug="vLLM#50252, unsloth-zoo#1250: adapters of routed experts have names that nothing finds, and are left out",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=sent(lambda name, tensor: None if EXPERTS in name else (name, tensor)),
        one_rank=True,
        says="was never sent",
    ),
    Fault(
        id="adapters-of-latent-queries-left-out",
        bug="sglang#25001 in kind: of latent attention's linears those after the queries' latent get no adapter",
        rules=("LRA-001",),
        cell=cell("deepseek_v3", "one", layers=3, batch="pairs", loss_mask=True),
        wrap=sent(lambda name, tensor: None if ".q_b_proj." in name else (name, tensor)),
        one_rank=True,
        says="was never sent",
    ),
    Fault(
        id="adapters-by-local-number",
        bug="SkyRL#1816 in kind: experts are named by their number on the rank that holds them",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=sent(_by_local_number),
        says="was sent 2 times",
    ),
    Fault(
        id="adapters-of-base-layers",
        bug="verl#7327: base_layer is put into names by a list of modules, which an engine has wrapped otherwise",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=sent(_base_layer),
        one_rank=True,
        says="is no adapter that was asked for",
    ),
    Fault(
        id="rank-shared-by-experts",
        bug="SkyRL#2026: the rank of adapters of experts is divided among those that are chosen",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=sent(_of_half_the_rank),
        one_rank=True,
        says="is float32 [2, ",
    ),
    Fault(
        id="fresh-adapters-not-zero",
        bug="reported nowhere: both factors are drawn, and the policy begins as another model than its reference",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=attached(_drawn_lora_bs),
        one_rank=True,
        says="is not 0",
    ),
    Fault(
        id="fresh-adapters-all-zero",
        bug="SkyRL#852: both factors are 0 in a slot that was used before, and have no gradient",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=attached(_zero),
        one_rank=True,
        says="has a row of 0",
    ),
    Fault(
        id="fresh-adapters-alike-on-shards",
        bug="PaddleNLP#9427: TP ranks draw from one generator, and their parts of a lora_A are alike",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=attached(_drawn_alike),
        says="has columns that are alike",
        diagnosis="shards drawn alike",
    ),
    Fault(
        id="fresh-adapters-by-the-width-of-a-shard",
        bug="Megatron-Bridge#5840: a lora_A is drawn by the width of a part, and is larger the more TP ranks there are",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=attached(_drawn_by_the_width_of_a_shard),
        says="1.4 times as large as on one rank",
        diagnosis="drawn by the width of a shard",
    ),
    Fault(
        id="adapters-not-sent-to-all",
        bug="mcore-bridge#173 in kind: each rank gives its engine its own copy of a factor that parted from the others",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_each_its_own,
        claims={"receivers": "all"},
        diagnosis="replicas part",
    ),
    Fault(
        id="adapters-of-shared-experts-by-rank",
        bug="Megatron-Bridge#5396: adapters of shared experts are drawn by EP rank, and never reduced",
        rules=("LRA-002",),
        also=("LRA-003", "LRA-007"),
        cell=cell("glm4_moe", "ep2", loss_mask=True),
        wrap=attached(_by_expert_rank),
        says="shared_experts",
        diagnosis="move otherwise, all of shared_experts.down_proj, ",
    ),
    Fault(
        id="adapters-of-replicas-unreduced",
        bug="miles#2723 in kind: a hook reduces adapters, and what the optimizer reads is of one replica",
        rules=("LRA-002",),
        cell=cell("qwen3_moe", "tp1", world_size=2, loss_mask=True),
        wrap=_rows_of_the_first,
        says="moved otherwise",
        diagnosis="moved by the gradient of the rows of one replica: not summed over dp",
    ),
    Fault(
        id="adapters-of-whole-linears-unsummed",
        bug="mcore-bridge#173: a factor that TP ranks hold alike lacks the mark by which its gradients are summed",
        rules=("LRA-002",),
        also=("LRA-003", "LRA-007"),
        cell=cell("deepseek_v3", "tp2", layers=3, loss_mask=True),
        wrap=_marked("sequence_parallel", False),
        says="moved otherwise",
        diagnosis="move otherwise, all of kv_a_proj_with_mqa, q_a_proj",
    ),
    Fault(
        id="adapters-of-grouped-experts-as-dense",
        bug="Megatron-Bridge#5231: adapters of grouped experts are reduced as dense ones where ETP is not TP",
        rules=("LRA-002",),
        also=("LRA-003", "LRA-007"),
        cell=cell("qwen3_moe", "tp2-etp1", world_size=4, experts="grouped", loss_mask=True),
        wrap=_marked("allreduce", True, EXPERTS),
        says="experts",
        diagnosis="move otherwise, all of experts.down_proj, ",
    ),
    Fault(
        id="adapters-of-experts-detached",
        bug="Megatron-Bridge#5634: what the adapters of experts add is detached from autograd, and trains nothing",
        rules=("LRA-002",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=stepped(_experts_stay),
        one_rank=True,
        diagnosis="not moved",
    ),
    Fault(
        id="adapters-with-the-step-before",
        bug="reported nowhere: gradients of adapters are those of the step before, too",
        rules=("LRA-002",),
        also=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_with_those_before,
        one_rank=True,
        says="step2: ",
        diagnosis="times the gradient of the step before, too",
    ),
    Fault(
        id="adapters-without-alpha",
        bug="cloneofsimo-lora#187, mflux#449: alpha is not read, and the scale is 1",
        rules=("LRA-002", "LRA-003", "LRA-005"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_scaled_to_one,
        one_rank=True,
        diagnosis="its adapter counts 0.667 times",
    ),
    Fault(
        id="alpha-folded-into-what-is-sent",
        bug="SkyRL#2250 in kind: alpha is in the lora_B that is sent, and the engine multiplies by it once more",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=sent(_folded),
        one_rank=True,
        diagnosis="moved 1.5 times as far",
    ),
    Fault(
        id="alpha-folded-in-place",
        bug="SkyRL#2250: what is staged shares its memory with the adapter, into which alpha is folded each time",
        rules=("LRA-002", "LRA-004"),
        also=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_folded_in_place,
        one_rank=True,
        says="has changed after the merged stream",
        diagnosis="is 1.5 times the expected tensor",
    ),
    Fault(
        id="adapters-of-k-and-v-exchanged",
        bug="verl#7453: adapters of a stacked linear take the slice of another",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_exchanged("k_proj", "v_proj", "lora_B"),
        one_rank=True,
        says="trained: logits differ",
        diagnosis="moved as that of v_proj should",
    ),
    Fault(
        id="lora-a-of-k-for-q",
        bug="verl#7453 in kind: a lora_A of a stacked linear is that of another part of it",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_exchanged("k_proj", "q_proj", "lora_A"),
        one_rank=True,
        says="trained: logits differ",
        diagnosis="those of the lora_A of k_proj for that of q_proj",
    ),
    Fault(
        id="adapters-of-queries-without-gates",
        bug="miles#2008 in kind: an adapter of gated queries has no rows of the gates, which never train",
        rules=("LRA-002", "LRA-003"),
        also=("LRA-005",),
        cell=cell("qwen3_next", "tp2", layers=3, loss_mask=True),
        wrap=sent(_without_gates),
        says="q_proj.lora_B.weight moved otherwise",
        diagnosis="rows 8–15, 24–31, 40–47 are 0, the others right",
    ),
    Fault(
        id="adapters-of-gates-after-all-queries",
        bug="miles#2008 in kind: rows of a lora_B of gated queries in another order than the file's",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_next", "tp2", layers=3, loss_mask=True),
        wrap=sent(_gates_last),
        says="trained: logits differ",
        diagnosis="its rows are in another order: row 8 is the right one of 16",
    ),
    Fault(
        id="adapters-of-delta-nets-by-parts",
        bug="SkyRL#2093: an adapter of a gated delta net's fused projection is not put into the order of the file",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_next", "tp2", layers=3, loss_mask=True),
        wrap=sent(_parts_in_a_run),
        says="trained: logits differ",
        diagnosis="its rows are in another order",
    ),
    Fault(
        id="adapters-of-beta-for-alpha",
        bug="sglang#31522 in kind: parts of a gated delta net's fused adapter lie the other way round",
        rules=("LRA-003",),
        also=("LRA-002", "LRA-005"),
        cell=cell("qwen3_5_moe_text", "tp2", layers=3, loss_mask=True),
        wrap=_exchanged("in_proj_a", "in_proj_b", "lora_B"),
        says="trained: logits differ",
        diagnosis="with the lora_B of in_proj_a",
    ),
    Fault(
        id="adapters-of-delta-nets-left-out",
        bug="sglang#30499: adapters of the rates of gated delta nets are no known modules, and are left out",
        rules=("LRA-001",),
        cell=cell("qwen3_5_moe_text", "one", layers=3, loss_mask=True),
        wrap=sent(lambda name, tensor: None if re.search(r"in_proj_[ab]\.", name) else (name, tensor)),
        one_rank=True,
        says="was never sent",
    ),
    Fault(
        id="adapters-counted-by-each-rank",
        bug="Megatron-Bridge#5634, #6089, miles#3232: what adapters add is whole on each ETP rank, and summed",
        rules=("LRA-002", "LRA-003"),
        cell=cell("qwen3_moe", "etp2", loss_mask=True),
        wrap=_counted_by_each_rank,
        diagnosis="those of adapters of experts that count 2 times",
    ),
    Fault(
        id="adapters-lent-unsaid",
        bug="unsloth-zoo#942: an engine is given the factors themselves, scales them in place, and training goes on so",
        rules=("LRA-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=lent("stream"),
        says="after: logits differ by",
    ),
    Fault(
        id="merged-base-lent-unsaid",
        bug="unsloth-zoo#942 in kind: an engine is given the weights themselves where nothing is merged, and writes",
        rules=("LRA-004",),
        also=("LRA-005", "LRA-006", "LRA-007"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=lent("merged"),
        says="of the base has changed",
    ),
    Fault(
        id="merge-not-undone",
        bug="EricLBuehler/candle-lora#26: once merged, adapters are added to the weights and computed beside them",
        rules=("LRA-004",),
        also=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged_stays,
        one_rank=True,
        diagnosis="not as before the merge",
    ),
    Fault(
        id="adapters-in-one-buffer",
        bug="verl#7083 in kind: the buffer of a factor is used again while its receiver still holds it",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_in_one_buffer,
        one_rank=True,
        says="held other values at the end of the stream",
    ),
    Fault(
        id="merge-undone-in-what-was-sent",
        bug="TRL#2873: merged weights that an engine has yet to load are taken apart, and it is given the base",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged_by(_taken_apart_at_the_end),
        one_rank=True,
        says="held other values at the end of the stream",
    ),
    Fault(
        id="merge-subtracted",
        bug="PEFT's unmerge in kind: what was added is subtracted, and the base is rounded with each export",
        rules=("LRA-004",),
        also=("LRA-005", "LRA-006"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_subtracted,
        one_rank=True,
        says="of the base has changed",
        diagnosis="arithmetic, not movement",
    ),
    Fault(
        id="reference-with-adapters",
        bug="ms-swift#9934 in kind: the reference is asked with the adapters that are trained",
        rules=("LRA-004",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_reference_with_adapters,
        one_rank=True,
        says="base: logits differ",
        diagnosis="those with adapters",
    ),
    Fault(
        id="adapters-frozen-behind-a-reference",
        bug="huggingface/peft#3447 in kind: adapters that were off for a reference come back with other marks",
        rules=("LRA-002",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_frozen_behind_a_reference,
        one_rank=True,
        diagnosis="not moved",
    ),
    Fault(
        id="merged-of-the-first-sync",
        bug="verl#7495 in kind: what each sync sends of a policy with adapters is the same, byte for byte",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged_once,
        one_rank=True,
        says="is not the sum",
        diagnosis="with its adapter as it was at step1",
    ),
    Fault(
        id="routers-trained-beside-adapters",
        bug="reported nowhere: routers are left trainable, and no engine is sent them",
        rules=("LRA-004", "LRA-005"),
        also=("LRA-002", "LRA-003", "LRA-006", "LRA-007"),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=stepped(_routers_too),
        one_rank=True,
        says="of the base has changed",
        diagnosis="the step before moves all of them as it should",
    ),
    Fault(
        id="experts-bias-moves-beside-adapters",
        bug="mcore-bridge#195: the experts' bias of frozen routers is updated still, and is in no adapter that is sent",
        rules=("LRA-004", "LRA-005"),
        also=("LRA-006",),
        cell=cell("glm4_moe", "one", bias_update=True, loss_mask=True),
        wrap=stepped(_biases_too),
        one_rank=True,
        says="router.expert_bias of the base has changed",
    ),
    Fault(
        id="norms-inside-linears-trained",
        bug="reported nowhere: of a linear with a norm inside the weight is frozen, and the norm trains unseen",
        rules=("LRA-004", "LRA-005"),
        also=("LRA-002", "LRA-003", "LRA-006", "LRA-007"),
        cell=cell("glm4_moe", "one", norms="fused", experts="grouped", loss_mask=True),
        wrap=stepped(_norms_inside_too),
        one_rank=True,
        says="layer_norm_weight of the base has changed",
    ),
    Fault(
        id="merged-in-fp32-of-bf16",
        bug="reported nowhere: what is added is in fp32, and so is its sum with a weight in bf16, which is sent",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", loss_mask=True),
        wrap=_promoted,
        one_rank=True,
        says="is float32 [",
    ),
    Fault(
        id="adapters-in-fp32-beside-a-base-in-bf16-not-trained",
        bug="reported nowhere: an optimizer that keeps master weights of parameters in bf16 leaves out those in fp32",
        rules=("LRA-002",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", loss_mask=True),
        wrap=_untrained_in_fp32,
        one_rank=True,
        diagnosis="not moved",
    ),
    Fault(
        id="merged-is-the-base",
        bug="verl#7285: what is called merged is the base, byte for byte",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged(lambda name, merged, base: base),
        one_rank=True,
        diagnosis="without its adapter",
    ),
    Fault(
        id="merged-again",
        bug="miles#1087 in kind: weights that are merged already are merged once more",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged(lambda name, merged, base: merged + (merged - base)),
        one_rank=True,
        diagnosis="its adapter counts 2 times",
    ),
    Fault(
        id="merged-without-k-and-v",
        bug="Megatron-Bridge#1603 in kind: of a fused linear one part is merged",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merged(_without_k_and_v),
        says="k_proj.weight is not the sum",
        diagnosis="without its adapter",
    ),
    Fault(
        id="adapters-of-k-beside-q-and-v",
        bug="miles#1792, its review: q and v are asked for, and the whole of their fused linear is trained and sent",
        rules=("LRA-001",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_on_whole_qkv,
        claims={"adapter_modules": frozenset({"q_proj", "v_proj"})},
        one_rank=True,
        says="k_proj.lora_A.weight is no adapter that was asked for",
    ),
    Fault(
        id="adapters-of-expert-shards-not-rechunked",
        bug="Megatron-Bridge#3408, its review: rows of ETP ranks, each gate and up of experts, are cut in the middle",
        rules=("LRA-002", "LRA-003", "LRA-005"),
        cell=cell("qwen3_moe", "etp2", loss_mask=True),
        wrap=_expert_shards_cut_in_half,
        says="experts.0.gate_proj.lora_B.weight",
    ),
    Fault(
        id="adapters-on-every-linear",
        bug="Megatron-Bridge#2195: the modules that are asked for are not passed on, and the default has all linears",
        rules=("LRA-001",),
        cell=cell("glm4_moe", "ep2", expert_format="fused", loss_mask=True),
        wrap=_on_all,
        one_rank=True,
        says="o_proj",
    ),
    Fault(
        id="merged-without-experts-of-one-tensor",
        bug="unsloth-zoo#885, #812: an expert's adapter is looked for by the name of a tensor that holds all experts",
        rules=("LRA-005",),
        cell=cell("glm4_moe", "one", expert_format="fused", loss_mask=True),
        wrap=_merged(_fused_left_out),
        one_rank=True,
        diagnosis="without its adapter",
    ),
    Fault(
        id="merged-up-on-rows-of-gates",
        bug="tinker-cookbook#457: adapters of gate and up are both merged into the rows of gate of gate_up_proj",
        rules=("LRA-005",),
        cell=cell("glm4_moe", "ep2", expert_format="fused", loss_mask=True),
        wrap=_merged(_up_on_gates),
        says="up_proj.weight is not the sum",
        diagnosis="with the adapter of up_proj beside its own",
    ),
    Fault(
        id="merged-in-bf16",
        bug="PEFT's merge in kind: a sum in the dtype of the adapters rounds the weight",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_merged(lambda name, merged, base: merged if merged.equal(base) else merged.bfloat16().float()),
        one_rank=True,
        says="is not the sum",
        diagnosis="rounded to bf16",
    ),
    Fault(
        id="base-is-merged",
        bug="miles#1087: what is sent of the base, beside adapters, has them merged already",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merged_in(""),
        one_rank=True,
        says="q_proj.weight of the base: ",
        diagnosis="with its adapter as it is at step2",
    ),
    Fault(
        id="base-of-experts-merged",
        bug="miles#1087 in kind: experts are exported by a path of their own, which merges always",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=_merged_in(EXPERTS),
        one_rank=True,
        says=".experts.",
        diagnosis="with its adapter as it is at step2",
    ),
    Fault(
        id="base-under-names-of-wrapped-linears",
        bug="verl#4632: the base's linears are sent by the names that they have inside their adapters",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_base(_inside_adapters),
        one_rank=True,
        says="q_proj.base_layer.weight is not in the checkpoint",
        diagnosis="the name of a linear inside its adapter: base_layer",
    ),
    Fault(
        id="base-without-wrapped-linears",
        bug="Megatron-Bridge#1272: a linear that its adapter wraps is in no mapping, and is left out of the export",
        rules=("LRA-006",),
        cell=cell("glm4_moe", "ep2", expert_format="fused", loss_mask=True),
        wrap=_base(lambda good, base, factors: (pair for pair in base if not _wrapped(pair[0].name, factors))),
        one_rank=True,
        says="is not sent of the base",
    ),
    Fault(
        id="base-with-factors-beside",
        bug="ISEEKYAN/Megatron-LM#78: an exporter that takes all parameters sends those of adapters among the base's",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_base(_factors_beside),
        one_rank=True,
        says="lora_A.weight is not in the checkpoint",
        diagnosis="a factor of an adapter",
    ),
    Fault(
        id="base-by-subtraction",
        bug="PEFT's unmerge in kind: the base is a merged weight less its adapter, and is not what was loaded",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_base(_less_the_adapter),
        one_rank=True,
        says="of the base: ",
        diagnosis="arithmetic, not movement",
    ),
    Fault(
        id="base-in-one-buffer",
        bug="verl#7083 in kind: the buffer of a weight of the base is used again while its receiver still holds it",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_base(_base_in_one_buffer),
        one_rank=True,
        says="held other values at the end of the stream",
    ),
    Fault(
        id="base-lent-unsaid",
        bug="unsloth-zoo#942 in kind: an engine is given the base's weights themselves, and writes",
        rules=("LRA-004",),
        also=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=lent("base"),
        says="of the base has changed",
    ),
    Fault(
        id="adapters-off-behind-the-base",
        bug="huggingface/peft#3447 in kind: adapters that were off while the base was sent stay off",
        rules=("LRA-002", "LRA-003"),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=_off_behind_the_base,
        one_rank=True,
        diagnosis="not moved",
    ),
    Fault(
        id="adapters-restored-fresh",
        bug="diffusers#12689: what is saved is never read, and a run that is resumed begins with fresh adapters",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_behind("restore", _fresh_again),
        one_rank=True,
        says="is not what was saved",
        diagnosis="all zero",
    ),
    Fault(
        id="adapters-restored-frozen",
        bug="reported nowhere: parameters that take restored adapters are not those that are trained",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_frozen_once_restored,
        one_rank=True,
        says="moved otherwise than by the same step",
        diagnosis="not moved",
    ),
    Fault(
        id="adapters-restored-without-alpha",
        bug="mlx-examples#622: alpha is no part of a save, and restored adapters count otherwise",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_restored_without_alpha,
        one_rank=True,
        says="restored: logits differ",
    ),
    Fault(
        id="base-is-merged-once-restored",
        bug="ms-swift#8233: behind a resume the first weights that are sent as the base have restored adapters merged",
        rules=("LRA-006",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merged_once_restored("base", "merged"),
        says="of the base of restored adapters",
        diagnosis="with its adapter",
    ),
    Fault(
        id="merged-is-the-base-once-restored",
        bug="verl#7285 in kind: what merges was hung on the linears that were there before adapters were restored",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merged_once_restored("merged", "base"),
        says="is not the sum with its adapter, restored",
        diagnosis="without its adapter",
    ),
    Fault(
        id="merged-as-before-a-restore",
        bug="verl#7495 in kind: merged weights of a resumed run are those that were sent before it",
        rules=("LRA-005",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merged_as_before_a_restore,
        says="is not the sum with its adapter, restored",
        diagnosis="step2",
    ),
    Fault(
        id="adapters-saved-by-one-expert-rank",
        bug="Megatron-Bridge#2240 in kind: adapters of the experts of one EP rank are saved alone",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        wrap=_behind("restore", _of_first_expert_rank),
        says=".experts.",
        diagnosis="all zero",
    ),
    Fault(
        id="adapters-saved-by-one-tp-rank",
        bug="Megatron-Bridge#2240: of a factor that TP cuts the shard of one rank is saved alone",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_behind("restore", _of_first_tp_rank),
        says="is not what was saved",
    ),
    Fault(
        id="adapters-saved-in-bf16",
        bug="reported nowhere: fp32 adapters are saved in the dtype of an engine",
        rules=("LRA-007",),
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_behind("restore", _rounded),
        one_rank=True,
        says="is not what was saved",
        diagnosis="bf16-rounded fp32",
    ),
)
