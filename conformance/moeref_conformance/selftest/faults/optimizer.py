"""Bugs of the optimizer: what its steps begin from, what they move, and the norm that clips them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, World
from moeref_conformance.contract.cells import OPTIMIZER_RATE
from moeref_conformance.selftest.border import facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.gradients import Wrap, marked

Named = dict[tuple[int, str], torch.Tensor]
#: Gets the weights before the model was loaded, those before a step, what a good step adds, those after it, and the
#: rate; writes to those after it.
Change = Callable[[Named, Named, Named, Named, float], None]


def _held(session: Any) -> Named:
    chunks = enumerate(session.export.chunks())
    return {(number, name): of.data for number, chunk in chunks for name, of in chunk.named_parameters()}


def _copies(session: Any) -> Named:
    return _copies_of(_held(session))


def _copies_of(tensors: Named) -> Named:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def _write(session: Any, tensors: Named) -> None:
    held = _held(session)
    for key, tensor in tensors.items():
        held[key].copy_(tensor)


def _after(change: Change) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap` that passes the weights of a rank through `change` after each step."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer
        begun: Named = {}
        right: Named = {}
        saved: Named = {}

        def make(*settings: Any) -> None:
            begun.update(_copies(session))
            right.clear()
            good.make(*settings)

        def save(folder: Any) -> None:
            saved.update(_copies_of(right))
            good.save(folder)

        def restore(folder: Any) -> None:
            right.update(_copies_of(saved))
            good.restore(folder)

        def step(tokens_BS: torch.Tensor, rate: float) -> float | None:
            held = _copies(session)
            moves = bool(rate != 0.0 or not right or cell.dtype != "float32")
            # The good optimizer goes on from its own weights; where none moves, the gradient is that of the wrong ones.
            _write(session, right if moves else {})
            before = _copies(session)
            norm: float | None = good.step(tokens_BS, rate)
            after = _copies(session)
            right.update(after if moves else {})
            change(begun, held, {key: after[key] - before[key] for key in after}, _held(session), rate)
            return norm

        def load(checkpoint: Any) -> None:
            right.clear()
            export.load(checkpoint)

        export: Any = session.export
        return facet(facet(session, "export", load=load), "optimizer", make=make, save=save, restore=restore, step=step)

    return wrap


def _kept(which: Callable[[int, str], bool]) -> Change:
    """Steps do not move these parameters."""

    def change(begun: Named, held: Named, adds: Named, after: Named, rate: float) -> None:
        for key, tensor in after.items():
            if which(*key):
                tensor.copy_(held[key])

    return change


def _half_of_each(begun: Named, held: Named, adds: Named, after: Named, rate: float) -> None:
    for key, tensor in after.items():
        half = tensor.numel() // 2
        tensor.view(-1)[half:] = held[key].reshape(-1)[half:]


def _from_the_begin(begun: Named, held: Named, adds: Named, after: Named, rate: float) -> None:
    for key, tensor in after.items():
        tensor.copy_(begun[key] + adds[key])
        begun[key] = tensor.clone()


def _from_the_begin_in_the_second_half(begun: Named, held: Named, adds: Named, after: Named, rate: float) -> None:
    """As a distributed optimizer has it, of which the second replica holds the masters of the later parameters."""
    later = list(after)[len(after) // 2 :]
    _from_the_begin(begun, held, adds, {key: after[key] for key in later}, rate)


def _norms_of_a_replica(chunk: int, name: str) -> bool:
    return dist.get_rank() == 1 and "norm" in name


def _decayed(begun: Named, held: Named, adds: Named, after: Named, rate: float) -> None:
    for key, tensor in after.items():
        tensor.sub_(held[key], alpha=0.1 * (rate or 0.0))


def _rate_of_the_construction(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.optimizer
    return facet(session, "optimizer", step=lambda tokens_BS, rate: good.step(tokens_BS, OPTIMIZER_RATE))


def _norm_of_the_own(session: Session, cell: Cell, world: World) -> Any:
    """The norm is not summed over the ranks of TP: each is about as long."""
    good: Any = session.optimizer
    return facet(session, "optimizer", step=lambda *given: good.step(*given) / cell.layout.tp**0.5)


def _replicas_counted(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """No parameter is taken for a replica of another TP rank's."""
    from megatron.core import tensor_parallel

    return mock.patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", return_value=True)


def _by_dense_ranks(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """A parameter that is not cut over TP counts on the first rank of the dense layers' TP group, an expert too."""
    from megatron.core import parallel_state, tensor_parallel

    def counted(parameter: Any, *groups: Any, **named: Any) -> bool:
        cut: bool = getattr(parameter, "tensor_model_parallel", False)
        return cut or parallel_state.get_tensor_model_parallel_rank() == 0

    return mock.patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", counted)


def _unmarked_masters(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Master weights do not say that they are cut over TP, and count on its first rank alone."""
    from megatron.core import tensor_parallel

    return mock.patch.object(tensor_parallel, "copy_tensor_model_parallel_attributes")


def _copies_counted(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """No parameter is taken for a copy of the embedding."""
    from megatron.core.optimizer import optimizer

    return mock.patch.object(optimizer, "param_is_not_shared", return_value=True)


def _masters_of_the_first_load(session: Session, cell: Cell, world: World) -> Any:
    """A step after a second load begins from the weights that were there before it."""
    export: Any = session.export
    good: Any = session.optimizer
    kept = dict[torch.nn.Parameter, torch.Tensor]()
    loads = list[Any]()

    def load(checkpoint: Any) -> None:
        own = [parameter for chunk in export.chunks() for parameter in chunk.parameters()]
        before = {parameter: parameter.detach().clone() for parameter in own} if loads else {}
        export.load(checkpoint)
        loads.append(checkpoint)
        kept.update(before)

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        norm = good.step(tokens_BS, rate)
        for parameter, before in kept.items():
            parameter.data.copy_(before)
        kept.clear()
        return norm

    return facet(facet(session, "export", load=load), "optimizer", step=step)


def _of_before_a_step(name: str, method: str, part: str = "") -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: a facet's method computes with these weights as they were before the optimizer's last step.

    Not once a load or somebody else has written others, nor where the step has moved none.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer
        ask = getattr(getattr(session, name), method)
        before: Named = {}
        after: Named = {}

        def stale() -> Named:
            held = _held(session)
            moved = {key: of for key, of in before.items() if part in key[1] and not torch.equal(of, held[key])}
            return {key: of for key, of in moved.items() if torch.equal(held[key], after[key])}

        def step(tokens_BS: torch.Tensor, rate: float) -> Any:
            held, old = _copies(session), stale() if method == "step" else {}
            _write(session, old)
            norm = good.step(tokens_BS, rate)
            _write(session, {key: held[key] + _held(session)[key] - of for key, of in old.items()})
            before.update(held)
            after.update(_copies(session))
            return norm

        def asked(*given: Any) -> Any:
            held = _copies(session)
            _write(session, stale())
            try:
                return ask(*given)
            finally:
                _write(session, held)

        stepped = facet(session, "optimizer", step=step)
        return stepped if method == "step" else facet(stepped, name, **{method: asked})

    return wrap


def _entropies_of_before_a_step(session: Session, cell: Cell, world: World) -> Any:
    """Log-probabilities are of the weights as they are, entropies of those before the last step."""
    bad: Any = _of_before_a_step("logprobs", "logprobs")(session, cell, world)
    good: Any = session.logprobs

    def asked(*given: Any) -> Any:
        old, new = bad.logprobs.logprobs(*given), good.logprobs(*given)
        return new and replace(new, entropies_BS=old.entropies_BS)

    return facet(bad, "logprobs", logprobs=asked)


def _of_before_a_load(name: str, method: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: a facet's method has the weights as they were before a later load, until they are written to.

    Or until the next step.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        export: Any = session.export
        good: Any = session.optimizer
        ask = getattr(getattr(session, name), method)
        loads, old, left = list[Path](), Named(), Named()

        def load(checkpoint: Path) -> None:
            before = _copies(session)
            export.load(checkpoint)
            if loads:
                old.update(before)
                left.update(_copies(session))
            loads.append(checkpoint)

        def step(tokens_BS: torch.Tensor, rate: float) -> Any:
            old.clear()
            return good.step(tokens_BS, rate)

        @contextmanager
        def stale() -> Iterator[None]:
            held = _copies(session)
            _write(session, {key: of for key, of in old.items() if torch.equal(held[key], left[key])})
            try:
                yield
            finally:
                _write(session, held)

        def streamed() -> Iterator[Any]:
            with stale():
                yield from ask()

        def asked(*given: Any) -> Any:
            with stale():
                return ask(*given)

        stepped = facet(facet(session, "export", load=load), "optimizer", step=step)
        return facet(stepped, name, **{method: streamed if method == "stream" else asked})

    return wrap


def _once_restored(wrong: Callable[[Session, Cell, World], Any]) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: what an optimizer that is made once has put right goes wrong from the first restore on."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        bad, restored = wrong(session, cell, world), list[Path]()

        def of_both(name: str, method: str) -> Callable[..., Any]:
            return lambda *given: getattr(getattr(bad if restored else session, name), method)(*given)

        def restore(folder: Path) -> None:
            session.optimizer.restore(folder)  # type: ignore[union-attr]
            restored.append(folder)

        mixed = facet(session, "optimizer", step=of_both("optimizer", "step"), restore=restore)
        for name, method in (("export", "stream"), ("forward", "logits"), ("logprobs", "logprobs")):
            mixed = facet(mixed, name, **{method: of_both(name, method)})
        return mixed

    return wrap


def _back_to_before_a_step(session: Session, cell: Cell, world: World) -> Any:
    """Weights make room for an export, and come back from a copy that was made before the optimizer's last step."""
    good: Any = session.optimizer
    export: Any = session.export
    before: Named = {}
    after: Named = {}

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        before.update(_copies(session))
        norm = good.step(tokens_BS, rate)
        after.update(_copies(session))
        return norm

    def streamed() -> Iterator[Any]:
        yield from export.stream()
        held = _held(session)
        _write(session, {key: of for key, of in before.items() if torch.equal(held[key], after[key])})

    return facet(facet(session, "optimizer", step=step), "export", stream=streamed)


@contextmanager
def _idle_left_out(cell: Cell, world: World) -> Iterator[None]:
    """What has no gradient takes no step: neither do moments of earlier steps move it, nor does it decay."""
    good = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        held = {of: of.grad for group in self.param_groups for of in group["params"] if of.grad is not None}
        for parameter, gradient in held.items():
            parameter.grad = gradient if gradient.any() else None
        answer = good(self, closure)
        for parameter, gradient in held.items():
            parameter.grad = gradient
        return answer

    with mock.patch.object(torch.optim.Adam, "step", step):
        yield


def _sent_before_it_steps(which: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: the first stream after a step has parameters with this in their names as they were before it.

    Unless they were written to since then.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        export: Any = session.export
        good: Any = session.optimizer
        old: Named = {}
        left: Named = {}

        def step(tokens_BS: torch.Tensor, rate: float) -> Any:
            old.update({key: tensor for key, tensor in _copies(session).items() if which in key[1]})
            norm = good.step(tokens_BS, rate)
            left.update(_copies(session))
            return norm

        def stream() -> Iterator[Any]:
            new = _copies(session)
            _write(session, {key: tensor for key, tensor in old.items() if torch.equal(new[key], left[key])})
            old.clear()
            try:
                yield from export.stream()
            finally:
                _write(session, new)

        return facet(facet(session, "export", stream=stream), "optimizer", step=step)

    return wrap


def _frozen_all(session: Session) -> dict[str, torch.nn.Parameter]:
    """The parameters of a rank that are frozen, by their names."""
    named = (pair for chunk in session.export.chunks() for pair in chunk.named_parameters()) if session.export else ()
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def _frozen_decay(session: Session, cell: Cell, world: World) -> Any:
    """What is frozen decays with the rest by the recipe's rate."""
    good: Any = session.optimizer

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        norm = good.step(tokens_BS, rate)
        for parameter in _frozen_all(session).values():
            parameter.data.mul_(1 - 0.1 * rate)
        return norm

    return facet(session, "optimizer", step=step)


def _norm_with_the_frozen(session: Session, cell: Cell, world: World) -> Any:
    """The gradient of what is frozen counts in the norm, as where it is trained."""
    good: Any = session.optimizer
    of_all: dict[bytes, float | None] = {}

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        norm, rows = good.step(tokens_BS, rate), tokens_BS.numpy().tobytes()
        return of_all[rows] if _frozen_all(session) else of_all.setdefault(rows, norm) and norm

    return facet(session, "optimizer", step=step)


def _shared_experts_too(session: Session, cell: Cell, world: World) -> Any:
    """Where routers are frozen, shared experts are."""
    good: Any = session.optimizer

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        shared = {key: of for key, of in _copies(session).items() if ".shared_experts." in key[1]}
        norm = good.step(tokens_BS, rate)
        if _frozen_all(session):
            _write(session, shared)
        return norm

    return facet(session, "optimizer", step=step)


def counting(of: str, call: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap` that counts the calls of a facet in `torch.optim.Adam.calls`."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = getattr(session, of)

        def counted(*asked: Any, **named: Any) -> Any:
            torch.optim.Adam.calls += 1  # type: ignore[attr-defined]
            return getattr(good, call)(*asked, **named)

        return facet(session, of, **{call: counted})

    return wrap


@contextmanager
def rebuilt_behind_calls(cell: Cell, world: World) -> Iterator[None]:
    """The first step after what is counted begins from the weights, as bf16 has them."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    good, seen = MixedPrecisionOptimizer.step_with_ready_grads, dict[int, int]()
    adam: Any = torch.optim.Adam

    def step(self: Any) -> Any:
        if seen.setdefault(id(self), adam.calls) != adam.calls:
            self.reload_model_params()
        seen[id(self)] = adam.calls
        return good(self)

    with (
        mock.patch.object(adam, "calls", 0, create=True),
        mock.patch.object(MixedPrecisionOptimizer, "step_with_ready_grads", step),
    ):
        yield


@contextmanager
def without_moments(cell: Cell, world: World) -> Iterator[None]:
    """The first step of Adam after what is counted is as its very first one."""
    good, seen = torch.optim.Adam.step, dict[int, int]()

    def step(self: Any, closure: Any = None) -> Any:
        if seen.setdefault(id(self), self.calls) != self.calls:
            self.state.clear()
        seen[id(self)] = self.calls
        return good(self, closure)

    with mock.patch.multiple(torch.optim.Adam, create=True, step=step, calls=0):
        yield


@contextmanager
def _with_old_gradients(cell: Cell, world: World) -> Iterator[None]:
    """A parameter that no token has a gradient for keeps that of the step before."""
    good, last = torch.optim.Adam.step, dict[torch.Tensor, torch.Tensor]()

    def step(self: Any, closure: Any = None) -> Any:
        idle = []
        for parameter in (of for group in self.param_groups for of in group["params"] if of.grad is not None):
            if parameter.grad.any():
                last[parameter] = parameter.grad.clone()
            elif parameter in last:
                parameter.grad.copy_(last[parameter])
                idle.append(parameter)
        answer = good(self, closure)
        for parameter in idle:
            parameter.grad.zero_()
        return answer

    with mock.patch.object(torch.optim.Adam, "step", step):
        yield


def _without_masters(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Each step begins from what bf16 has kept of the one before."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    good = MixedPrecisionOptimizer.step_with_ready_grads

    def step(self: Any) -> Any:
        self.reload_model_params()
        return good(self)

    return mock.patch.object(MixedPrecisionOptimizer, "step_with_ready_grads", step)


def _bias_drifts(session: Session, cell: Cell, world: World) -> Any:
    """Each step moves the routers' bias by Megatron's rate, up or down from expert to expert."""
    good: Any = session.optimizer

    def step(tokens_BS: torch.Tensor, rate: float) -> float | None:
        norm: float | None = good.step(tokens_BS, rate)
        chunks = session.export.chunks() if session.export else ()
        biases = [of for one in chunks for name, of in one.named_buffers() if "expert_bias" in name]
        for bias in biases:
            bias.add_(1e-3 * torch.ones_like(bias).cumsum(0).remainder(2).mul(2).sub(1))
        return norm

    return facet(session, "optimizer", step=step)


def read_again(between: Callable[[Any, Named], None], back: Callable[[int, str], bool]) -> Wrap:
    """A reference policy is read from its files into the model, and of the policy's own weights some are put `back`.

    `between` gets the session and the policy's tensors, buffers among them, before the forward.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.export
        folders: list[Path] = []

        def load(checkpoint: Path) -> None:
            folders.append(checkpoint)
            good.load(checkpoint)

        def reference(tokens_BS: torch.Tensor) -> torch.Tensor | None:
            held = _with_buffers(session)
            own = _copies_of(held)
            good.load(folders[-1])
            between(session, own)
            logits: torch.Tensor | None = session.forward.logits(tokens_BS)  # type: ignore[union-attr]
            for key, tensor in held.items():
                if back(*key):
                    tensor.copy_(own[key])
            return logits

        return facet(facet(session, "export", load=load), "optimizer", reference=reference)

    return wrap


def _brought_back_from_a_first_copy(session: Session, cell: Cell, world: World) -> Any:
    """The policy is set aside when the first reference is asked, and not again: later ones bring that back."""
    good: Any = session.optimizer
    aside: Named = {}

    def reference(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        held = _with_buffers(session)
        aside.update(aside or _copies_of(held))
        logits: torch.Tensor | None = good.reference(tokens_BS)
        for key, tensor in held.items():
            tensor.copy_(aside[key])
        return logits

    return facet(session, "optimizer", reference=reference)


def _with_buffers(session: Any) -> Named:
    chunks = enumerate(session.export.chunks())
    biases = {(number, name): of.data for number, chunk in chunks for name, of in chunk.named_buffers()}
    return _held(session) | biases


def nothing_between(session: Any, own: Named) -> None:
    """Reference and policy have nothing in common."""


def _own_bias(session: Any, own: Named) -> None:
    for key, tensor in _with_buffers(session).items():
        if key[1].endswith("expert_bias"):
            tensor.copy_(own[key])


def _own_later_chunks(session: Any, own: Named) -> None:
    for key, tensor in _held(session).items():
        if key[0]:
            tensor.copy_(own[key])


def _of_the_policy(session: Session, cell: Cell, world: World) -> Any:
    """No weights are set aside for a reference."""
    forward: Any = session.forward
    return facet(session, "optimizer", reference=forward.logits)


@contextmanager
def _clipped(cell: Cell, world: World) -> Iterator[None]:
    """Gradients are scaled to a norm of 1 at most, as they are by default."""
    good = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        held = [of for group in self.param_groups for of in group["params"] if of.grad is not None]
        torch.nn.utils.clip_grad_norm_(held, 1.0)
        return good(self, closure)

    with mock.patch.object(torch.optim.Adam, "step", step):
        yield


def _in_groups(change: Callable[[dict[str, Any]], Any]) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: Adam steps once `change` has been at each of its groups of parameters."""
    good = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            change(group)
        return good(self, closure)

    return lambda cell, world: mock.patch.object(torch.optim.Adam, "step", step)


def _experts_do_not_decay(group: dict[str, Any]) -> None:
    if group["is_expert_parallel"]:
        group["weight_decay"] = 0.0


def _settings_not_passed_on(session: Session, cell: Cell, world: World) -> Any:
    """Whatever is asked for, the optimizer is made as ever."""
    good: Any = session.optimizer
    return facet(session, "optimizer", make=lambda *settings: good.make())


def _clipping(by: Callable[[list[torch.Tensor], float, float], float]) -> Callable[[Cell, World], Any]:
    """A fault's `patch`: gradients of an optimizer's parameters are clipped as if their norm was what `by` gives."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.optimizer import optimizer

        good: Any = optimizer.clip_grad_by_total_norm_fp32

        def clip(parameters: Any, max_norm: float, total_norm: float, *more: Any, **named: Any) -> None:
            held = list(parameters)
            good(held, max_norm, by(held, max_norm, total_norm), *more, **named)

        return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", clip)

    return patch


def _without_a_bound(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Gradients are scaled to the norm that is asked for, shorter ones too."""
    from megatron.core.optimizer import optimizer

    def scale(parameters: Any, max_norm: float, total_norm: float, *more: Any, **named: Any) -> None:
        for of in parameters:
            if of.grad is not None:
                of.grad.mul_(max_norm / (total_norm + 1e-6))

    return mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", scale)


def _of_its_own(held: list[torch.Tensor], max_norm: float, total_norm: float) -> float:
    """The norm of what one of the chained optimizers has; under EP without TP and PP each rank has other experts."""
    square = sum((of.grad.double().square().sum() for of in held if of.grad is not None), torch.zeros(()).double())
    if not getattr(held[0], "allreduce", True):
        dist.all_reduce(square)
    return square.sqrt().item()


def _restoring(
    kind: Callable[[], Any], load: Callable[[Any, Any, Any], None]
) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: an optimizer of this kind is restored by `load`, which gets the good way, it and its state."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        of = kind()
        good = of.load_state_dict
        return mock.patch.object(of, "load_state_dict", lambda own, state: load(good, own, state))

    return patch


def _of_torch() -> Any:
    return torch.optim.Optimizer


def _chained() -> Any:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    return ChainedOptimizer


def _with_masters() -> Any:
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    return Float16OptimizerWithFloat16Params


def _from_step_zero(good: Any, own: Any, given: Any) -> None:
    state = {key: {**of, "step": torch.zeros_like(of["step"])} for key, of in given["state"].items()}
    good(own, {**given, "state": state})


def _from_step_one(good: Any, own: Any, given: Any) -> None:
    state = {key: {**of, "step": torch.ones_like(of["step"])} for key, of in given["state"].items()}
    good(own, {**given, "state": state})


def _then_of_the_weights(good: Any, own: Any, given: Any) -> None:
    good(own, given)
    own.reload_model_params()


def _in_the_order_of_the_first(good: Any, own: Any, given: Any) -> None:
    """All stages but the first, which writes them, are given the settings of groups in another order."""
    good(own, given)
    if dist.get_rank():
        decays = [group["weight_decay"] for group in own.param_groups]
        for group, decay in zip(own.param_groups, reversed(decays), strict=True):
            group["weight_decay"] = decay


def _but_for_fp32(good: Any, own: Any, given: Any) -> None:
    """Parameters that are fp32 in a model in bf16 are not given their moments."""
    good(own, given)
    for group in own.fp32_from_fp32_groups:
        for parameter in group:
            own.optimizer.state.pop(parameter, None)


def _first_of_the_chain(good: Any, own: Any, given: Any) -> None:
    """Of the optimizers of dense layers and of experts the first alone is given its state."""
    own.chained_optimizers[0].load_state_dict(given[0])


def _of_the_first_rank(good: Any, own: Any, given: Any) -> None:
    read = [given]
    dist.broadcast_object_list(read)
    good(own, read[0])


def _written_late(session: Session, cell: Cell, world: World) -> Any:
    """What is saved is written while the next step is under way, and is what this one leaves.

    Nothing is left to be written where a new optimizer is made.
    """
    good: Any = session.optimizer
    due = list[Any]()

    def write() -> None:
        while due:
            good.save(due.pop())

    def step(tokens_BS: torch.Tensor, rate: float) -> Any:
        norm = good.step(tokens_BS, rate)
        write()
        return norm

    def make(*settings: Any) -> None:
        write()
        good.make(*settings)

    return facet(session, "optimizer", make=make, save=due.append, step=step)


def _saved_as_restored(session: Session, cell: Cell, world: World) -> Any:
    """What an optimizer saves that was restored is what it was restored from."""
    good: Any = session.optimizer
    restored = dict[str, bytes]()

    def make(*settings: Any) -> None:
        restored.clear()
        good.make(*settings)

    def save(folder: Path) -> None:
        good.save(folder)
        for name, content in restored.items():
            (folder / name).write_bytes(content)

    def restore(folder: Path) -> None:
        good.restore(folder)
        restored.update({file.name: file.read_bytes() for file in folder.iterdir()})

    return facet(session, "optimizer", make=make, save=save, restore=restore)


def _late_by_a_step(which: str) -> Callable[[Session, Cell, World], Any]:
    """A fault's `wrap`: after this call of the optimizer weights are what the first load found, until the next step.

    That step begins from the right ones.
    """

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer
        call: Callable[[Path], None] = getattr(good, which)
        begun, due = _copies(session), Named()

        def late(folder: Path) -> None:
            call(folder)
            due.update(_copies(session))
            _write(session, begun)

        def step(tokens_BS: torch.Tensor, rate: float) -> Any:
            _write(session, due)
            due.clear()
            return good.step(tokens_BS, rate)

        return facet(session, "optimizer", **{which: late, "step": step})

    return wrap


@contextmanager
def _restored_asleep(cell: Cell, world: World) -> Iterator[None]:
    """The first step of Adam after a restore is without its moments, if a call that counts was between the two."""
    adam = torch.optim.Adam
    good, load, asleep = adam.step, adam.load_state_dict, dict[int, int]()

    def restore(self: Any, state: Any) -> Any:
        asleep[id(self)] = self.calls
        return load(self, state)

    def step(self: Any, closure: Any = None) -> Any:
        if asleep.pop(id(self), self.calls) != self.calls:
            self.state.clear()
        return good(self, closure)

    with mock.patch.multiple(adam, create=True, step=step, load_state_dict=restore, calls=0):
        yield


def _scheduling(method: str, instead: Callable[..., None]) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: `instead` of a method of Megatron's scheduler, which is its first argument."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        good = getattr(OptimizerParamScheduler, method)

        def other(own: Any, *given: Any, **named: Any) -> None:
            instead(good, own, *given, **named)

        return mock.patch.object(OptimizerParamScheduler, method, other)

    return patch


def _other_end(end: Callable[[int, int], int]) -> Callable[..., None]:
    """Makes a scheduler whose decay ends in another step, which `end` says by that and the warm-up."""

    def make(good: Any, own: Any, *given: Any, lr_warmup_steps: int, lr_decay_steps: int, **named: Any) -> None:
        steps = end(lr_decay_steps, lr_warmup_steps) if lr_warmup_steps else lr_decay_steps
        good(own, *given, lr_warmup_steps=lr_warmup_steps, lr_decay_steps=steps, **named)

    return make


def _restored_twice(good: Any, own: Any, state: Any) -> None:
    good(own, state)
    own.step(own.num_steps)


def _decaying(start_wd: float) -> Callable[..., None]:
    """Makes a scheduler that sets a weight decay of its own, where rates are to fall."""

    def make(good: Any, own: Any, *given: Any, lr_decay_style: str, **named: Any) -> None:
        if lr_decay_style == "cosine":
            named |= {"start_wd": start_wd, "end_wd": start_wd}
        good(own, *given, lr_decay_style=lr_decay_style, **named)

    return make


def _past_its_end(rate: Callable[[float, float], float]) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: once the decay is over, the rate is another, by the highest one and by how far it would go.

    That is 1 at the end of the decay, and 2 as long again after it.
    """

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        good = OptimizerParamScheduler.get_lr

        def get_lr(own: Any, group: Any) -> float:
            part = (own.num_steps - own.lr_warmup_steps) / (own.lr_decay_steps - own.lr_warmup_steps)
            over = own.lr_decay_style == "cosine" and part > 1
            return rate(group["max_lr"], part) if over else float(good(own, group))

        return mock.patch.object(OptimizerParamScheduler, "get_lr", get_lr)

    return patch


def _counting_rows(cell: Cell, world: World) -> AbstractContextManager[Any]:
    rows = 2 * cell.rows  # of two microbatches
    return _scheduling("step", lambda good, own, increment: good(own, increment * rows))(cell, world)


def _of_dense_layers(good: Any, own: Any, increment: int) -> None:
    """Groups of experts keep the rate that they have."""
    experts = [group for group in own.optimizer.param_groups if group["is_expert_parallel"]]
    rates = [group["lr"] for group in experts]
    good(own, increment)
    for group, rate in zip(experts, rates, strict=True):
        group["lr"] = rate


FAULTS = (
    Fault(
        id="schedule-not-restored",
        bug="verl#7953: the steps of a schedule are saved, and a restore drops them: the rates warm up once more",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_scheduling("load_state_dict", lambda good, own, state: None),
        says="behind a restore",
        diagnosis="the schedule begins again",
    ),
    Fault(
        id="schedule-restored-twice",
        bug="slime#1761: a restored schedule is moved on by the steps that a checkpoint has, once more",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_scheduling("load_state_dict", _restored_twice),
        says="behind a restore",
        diagnosis="steps before the save count twice",
    ),
    Fault(
        id="warmup-taken-off-the-decay",
        bug="AReaL#1289: Megatron is given the length of the decay, where it wants the step in which this ends",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_scheduling("__init__", _other_end(lambda end, warmup: end - warmup)),
        one_rank=True,
        diagnosis="the warm-up is taken off the steps to the end of the decay",
    ),
    Fault(
        id="decay-of-a-thousand-steps",
        bug="NeMo-RL#939: rates decay over so many steps as a default has, which is 1000",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_scheduling("__init__", _other_end(lambda end, warmup: 1000)),
        one_rank=True,
        diagnosis="no decay",
    ),
    Fault(
        id="rate-rises-past-the-decay",
        bug="gpt-neox#1011 in kind: nothing holds a cosine at its end, and a run that goes on has growing rates",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_past_its_end(lambda highest, part: highest * (1 + math.cos(math.pi * part)) / 2),
        one_rank=True,
        says="the rate of step 6",
    ),
    Fault(
        id="rate-of-zero-past-the-decay",
        bug="reported nowhere: once the decay is over the rate is 0, and the lowest one that was asked for is not",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_past_its_end(lambda highest, part: 0.0),
        one_rank=True,
        says="the rate of step 6",
    ),
    Fault(
        id="weight-decay-of-the-schedule",
        bug="Megatron-LM#7468 in kind: Megatron's scheduler sets the weight decay too, to one that nobody asked for",
        rules=("OPT-006",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_scheduling("__init__", _decaying(0.0)),
        one_rank=True,
        says="with settings and a schedule",
        diagnosis="decay",
    ),
    Fault(
        id="schedule-counts-rows",
        bug="Megatron-Bridge#2609 in kind: a schedule in iterations moves on by the samples of each",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "tp1", world_size=2, optimizer_step=True),
        patch=_counting_rows,
        one_rank=True,
        diagnosis="one for each row",
    ),
    Fault(
        id="schedule-of-dense-layers-alone",
        bug="reported nowhere: of the chained optimizers of dense layers and of experts the first has the schedule",
        rules=("OPT-009",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_scheduling("step", _of_dense_layers),
        one_rank=True,
        says="experts: the rate of step",
    ),
    Fault(
        id="settings-of-the-optimizer-lost",
        bug="SkyRL#1646 in kind: none of the settings that are given for the optimizer gets to Megatron's",
        rules=("OPT-006",),
        also=("OPT-009",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_settings_not_passed_on,
        diagnosis="it moves as without any settings",
        says="with settings",
    ),
    Fault(
        id="experts-clipped-by-their-own-norm",
        bug="Megatron-LM#785: under EP experts have an optimizer of their own, which clips them by the norm it sees",
        rules=("OPT-006",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_clipping(_of_its_own),
        diagnosis="gradients are clipped by the norm of all but experts alone",
    ),
    Fault(
        id="gradients-not-clipped",
        bug="prime-rl#2214 in kind: gradients are not clipped in some setups, and their norm in a log looks as ever",
        rules=("OPT-006",),
        cell=cell("glm4_moe", "pp2", optimizer_step=True),
        patch=_clipping(lambda held, max_norm, total_norm: max_norm),
        diagnosis="gradients are not clipped",
    ),
    Fault(
        id="short-gradients-scaled-up",
        bug="tinygrad#11761: the factor by which gradients are clipped has no bound, and short ones are scaled up",
        rules=("OPT-006",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_without_a_bound,
        one_rank=True,
        diagnosis="short gradients are scaled up",
    ),
    Fault(
        id="decay-in-the-gradients",
        bug="reported nowhere: weight decay goes into the gradients, and Adam's moments with them: Adam for AdamW",
        rules=("OPT-006",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_in_groups(lambda group: group.update(decoupled_weight_decay=False)),
        one_rank=True,
        diagnosis="as by Adam's L2 penalty, not AdamW's",
    ),
    Fault(
        id="experts-do-not-decay",
        bug="reported nowhere: groups of parameters that differ in their decay are made of the dense layers alone",
        rules=("OPT-006",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_in_groups(_experts_do_not_decay),
        diagnosis="a weight decay of ",
    ),
    Fault(
        id="frozen-routers-decay",
        bug="SkyRL#1568, prime-rl#1836 in kind: the optimizer is given what is frozen too, and weight decay moves it",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_frozen_decay,
        diagnosis="moved though frozen",
        says="it was frozen",
    ),
    Fault(
        id="shared-experts-frozen-with-routers",
        bug="verl#1792: who freezes the routers freezes what belongs to shared experts with them",
        rules=("OPT-004",),
        cell=cell("glm4_moe", "pp2", optimizer_step=True),
        wrap=_shared_experts_too,
        diagnosis="not moved at all",
        says="with routers frozen",
    ),
    Fault(
        id="norm-counts-frozen-routers",
        bug="maxtext#5290: the norm of the gradient, which clips it, counts parameters that are frozen",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_norm_with_the_frozen,
        says="with routers frozen the norm of the gradient is",
        diagnosis="that of all gradients, frozen ones too",
    ),
    Fault(
        id="experts-sent-before-they-step",
        bug="NeMo-RL#4086 in kind: new weights of experts are gathered by the next forward, and sent before it",
        rules=("EXP-006",),
        cell=cell("glm4_moe", "pp2-ep2", optimizer_step=True),
        wrap=_sent_before_it_steps(".experts."),
        diagnosis="stale: what it held before the step",
        says="after a step of the optimizer it is not what is sent",
    ),
    Fault(
        id="head-sent-before-it-steps",
        bug="Megatron-LM#950 in kind: the last bucket of parameters is not gathered where the others are read",
        rules=("EXP-006",),
        # Logits are of the weights that ranks hold, and a later stream is right.
        also=("OPT-010", "OPT-011"),
        cell=cell("glm4_moe", "pp2", dtype="bfloat16", optimizer_step=True),
        wrap=_sent_before_it_steps("output_layer"),
        diagnosis="stale: what it held before the step",
        says="after a step of the optimizer it is not what is sent",
    ),
    Fault(
        id="logits-of-before-a-step",
        bug="Megatron-LM#5949, #6336: a hook after steps is to copy new weights to those of forwards, and does nothing",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_of_before_a_step("forward", "logits"),
        diagnosis="those of the weights before the step",
        says="logits once a step of the optimizer has moved weights",
    ),
    Fault(
        id="experts-of-before-a-step-in-logits",
        bug="Primus#983: copies of experts go by a version that steps do not raise, and forwards have those of before",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_of_before_a_step("forward", "logits", ".experts."),
        says="logits once a step of the optimizer has moved weights",
    ),
    Fault(
        id="logprobs-of-before-a-step",
        bug="Megatron-LM#5949, #6336 in kind: logprobs are of weights that hooks after steps are to copy, and are not",
        rules=("LGP-001",),
        also=("LGP-002",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_of_before_a_step("logprobs", "logprobs"),
        diagnosis="those of the weights before the step",
        says="once a step of the optimizer has moved weights logprobs differ",
    ),
    Fault(
        id="logits-of-before-a-step-in-bf16",
        bug="Megatron-LM#5949, #6336: a hook after steps is to copy new weights to those of forwards, and does nothing",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True),
        wrap=_of_before_a_step("forward", "logits"),
        says="once a step of the optimizer has moved weights logits are off transformers' by 1",
    ),
    Fault(
        id="experts-of-before-a-step-in-logits-in-bf16",
        bug="Primus#983: copies of experts go by a version that steps do not raise, and forwards have those of before",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=_of_before_a_step("forward", "logits", ".experts."),
        says="once a step of the optimizer has moved weights logits are off transformers' by",
    ),
    Fault(
        id="logprobs-of-before-a-step-in-bf16",
        bug="Megatron-LM#5949, #6336 in kind: logprobs are of weights that hooks after steps are to copy, and are not",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_of_before_a_step("logprobs", "logprobs"),
        says="once a step of the optimizer has moved weights half of the logprobs are off transformers' by 1",
    ),
    Fault(
        id="experts-of-before-a-step-in-logprobs-in-bf16",
        bug="Primus#983 in kind: copies of experts go by a version that steps do not raise, and logprobs are of these",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=_of_before_a_step("logprobs", "logprobs", ".experts."),
        says="once a step of the optimizer has moved weights half of the",
    ),
    Fault(
        id="entropies-of-before-a-step-in-bf16",
        bug="reported nowhere: entropies are kept with the weights that they are of, which a step does not raise",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "one", dtype="bfloat16", optimizer_step=True),
        wrap=_entropies_of_before_a_step,
        says="once a step of the optimizer has moved weights half of the entropies are off",
    ),
    Fault(
        id="logprobs-of-before-a-restored-one-steps-in-bf16",
        bug="Primus#983 in kind: the optimizer that is made first tells forwards of its steps, a restored one does not",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=_once_restored(_of_before_a_step("logprobs", "logprobs")),
        says="once a step of a restored optimizer has moved weights half of the logprobs",
    ),
    Fault(
        id="sent-as-before-a-later-load",
        bug="SkyRL#2149 in kind: weights are loaded after steps, and what was made of them for a sync is not made anew",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_of_before_a_load("export", "stream"),
        diagnosis="stale",
        says="after the checkpoint was loaded again what is sent differs",
    ),
    Fault(
        id="logits-of-before-a-later-load",
        bug="SkyRL#2149 in kind: weights are loaded after steps, and copies of them that forwards have are kept",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_of_before_a_load("forward", "logits"),
        says="logits once the checkpoint is loaded again differ",
    ),
    Fault(
        id="experts-sent-before-a-restored-one-steps",
        bug="NeMo-RL#4086 in kind: the optimizer that is made first tells the export of its steps, a restored one not",
        rules=("EXP-006",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_once_restored(_sent_before_it_steps(".experts.")),
        diagnosis="stale: what it held before the step",
        says="after a step of a restored optimizer it is not what is sent",
    ),
    Fault(
        id="logits-of-before-a-restored-one-steps",
        bug="Primus#983 in kind: the optimizer that is made first tells forwards of its steps, a restored one does not",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_once_restored(_of_before_a_step("forward", "logits")),
        diagnosis="those of the weights before the step",
        says="logits once a step of a restored optimizer has moved weights",
    ),
    Fault(
        id="logprobs-of-before-a-restored-one-steps",
        bug="Primus#983 in kind: the optimizer that is made first tells forwards of its steps, a restored one does not",
        rules=("LGP-001",),
        also=("LGP-002",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_once_restored(_of_before_a_step("logprobs", "logprobs")),
        diagnosis="those of the weights before the step",
        says="once a step of a restored optimizer has moved weights logprobs differ",
    ),
    Fault(
        id="logits-of-before-a-restored-one-steps-in-bf16",
        bug="Primus#983 in kind: the optimizer that is made first tells forwards of its steps, a restored one does not",
        rules=("OPT-010",),
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=_once_restored(_of_before_a_step("forward", "logits")),
        says="once a step of a restored optimizer has moved weights logits are off transformers' by",
    ),
    Fault(
        id="steps-with-weights-of-before-a-step",
        bug="Megatron-LM#4563: where weights are gathered for an evaluation, the next step has those of the one before",
        rules=("OPT-003",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_of_before_a_step("optimizer", "step"),
        diagnosis="that of the weights before the step",
        says="once weights have moved the norm of the gradient is",
    ),
    Fault(
        id="weights-of-before-a-step-behind-an-export",
        bug="slime#2224 in kind: the copy that brings weights back behind an export was made before the last step",
        rules=("OPT-003",),
        cell=cell("qwen3_moe", "pp2", optimizer_step=True),
        wrap=_back_to_before_a_step,
        diagnosis="that of the weights before the step",
        says="once weights have moved the norm of the gradient is",
    ),
    Fault(
        id="idle-experts-take-no-step",
        bug="Automodel#2995: experts that no token comes to have no gradient, and their moments and decay stand still",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_idle_left_out,
        one_rank=True,
        diagnosis="not moved at all",
        says="are not where Adam moves them",
    ),
    Fault(
        id="moments-not-restored",
        bug="AReaL#1468: moments are made by the first step, and what a checkpoint is read into has none to be filled",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_restoring(_of_torch, lambda good, own, given: good(own, {**given, "state": {}})),
        diagnosis="moments are lost",
    ),
    Fault(
        id="step-count-not-restored",
        bug="TransformerEngine#1986 in kind: a rank is given moments, and the step count of one that has taken no step",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        patch=_restoring(_of_torch, _from_step_zero),
        diagnosis="the step counts as number 1, not 2",
    ),
    Fault(
        id="step-count-of-a-dummy-step",
        bug="SkyRL#1403: a step without gradients makes the state that a checkpoint is read into, and its count stays",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_restoring(_of_torch, _from_step_one),
        diagnosis="the step counts as number 2, not 3",
    ),
    Fault(
        id="restored-decays-of-other-groups",
        bug="Megatron-LM#1515: stages have groups of parameters in other orders, and a checkpoint those of the first",
        rules=("OPT-004",),
        cell=cell("glm4_moe", "pp2-first1", optimizer_step=True),
        patch=_restoring(_of_torch, _in_the_order_of_the_first),
        diagnosis="a weight decay of 0",
        says="with settings",
    ),
    Fault(
        id="saved-as-restored",
        bug="verl#4870: a restored optimizer steps on in copies, and what it saves next is what it was restored from",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_saved_as_restored,
        says="are elsewhere than without the restore",
    ),
    Fault(
        id="restored-moments-lost-in-a-sync",
        bug="reported nowhere: an optimizer that makes room for a first sync comes back as it was before a restore",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_restored_asleep,
        wrap=counting("export", "stream"),
        diagnosis="moments are lost",
    ),
    Fault(
        id="masters-rebuilt-in-a-restore",
        bug="miles#3143: checkpoints have no fp32 master weights, and a resumed run makes them of bf16 weights",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        patch=_restoring(_with_masters, _then_of_the_weights),
        diagnosis="master weights are rebuilt",
    ),
    Fault(
        id="restored-weights-a-step-late",
        bug="Megatron-Bridge#3397, ISEEKYAN/Megatron-LM#104 in kind: masters are restored, weights a step later",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_late_by_a_step("restore"),
        diagnosis="changed by a restore",
    ),
    Fault(
        id="weights-make-room-for-a-save",
        bug="reported nowhere: weights that make room for a save are brought back by the next step alone",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_late_by_a_step("save"),
        diagnosis="changed by a save",
    ),
    Fault(
        id="experts-optimizer-not-restored",
        bug="Megatron-LM#761: of the chained optimizers of dense layers and experts one is not given its state",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_restoring(_chained, _first_of_the_chain),
        diagnosis="moments are lost",
    ),
    Fault(
        id="fp32-parameters-not-restored",
        bug="Megatron-LM#5835, Megatron-LM#2777 in kind: groups of bf16 and fp32 parameters, whose states are mixed up",
        rules=("OPT-004",),
        cell=cell("qwen3_5_moe_text", "one", dtype="bfloat16", optimizer_step=True),
        patch=_restoring(_with_masters, _but_for_fp32),
        says="A_log",
    ),
    Fault(
        id="all-ranks-restore-the-first-s",
        bug="transformers#48569 in kind: one name for the files of all ranks, whose shards are of one size",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_restoring(_chained, _of_the_first_rank),
        says="are elsewhere than without the restore",
    ),
    Fault(
        id="saved-state-steps-on",
        bug="nvidia-resiliency-ext#376: an asynchronous save shares memory with the optimizer: it has its next step",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_written_late,
        says="are elsewhere than without the restore",
    ),
    Fault(
        id="gradients-clipped",
        bug="reported nowhere: clip_grad of megatron-core's OptimizerConfig is 1.0 where nobody asks for clipping",
        rules=("OPT-002", "OPT-003"),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_clipped,
        one_rank=True,
        says="are not where Adam moves them",
        diagnosis="gradients are clipped to a norm of 1",
    ),
    Fault(
        id="epsilon-not-passed-on",
        bug="SkyRL#1646 in kind: Adam's epsilon is that of a recipe, and hides small gradients",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_in_groups(lambda group: group.update(eps=1e-6)),
        one_rank=True,
        says="are not where Adam moves them",
        diagnosis="epsilon is 1e-06, not 1e-08",
    ),
    Fault(
        id="masters-older-than-a-later-load",
        bug="SkyRL#2149: weights are loaded after steps, and the next step brings back what was there before",
        rules=("OPT-001",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_masters_of_the_first_load,
        diagnosis="what it held before it was loaded again",
    ),
    Fault(
        id="betas-not-passed-on",
        bug="SkyRL#1646: Adam's betas are not among the settings that go to Megatron's optimizer",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_in_groups(lambda group: group.update(betas=(0.9, 0.95))),
        one_rank=True,
        says="are not where Adam moves them",
        diagnosis="betas are (0.9, 0.95), not (0.9, 0.999)",
    ),
    Fault(
        id="moments-lost-in-a-sync",
        bug="reported nowhere: Adam's moments make room while weights are sent, and are not brought back",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=without_moments,
        wrap=counting("export", "stream"),
        one_rank=True,
        says="are not where Adam moves them",
        diagnosis="moments are lost: it moves as by a first step",
    ),
    Fault(
        id="no-masters-in-bf16",
        bug="NeMo-RL#2322: the optimizer has bf16 weights alone, and steps under half of their last digit are lost",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        patch=_without_masters,
        one_rank=True,
        diagnosis="small steps are lost",
    ),
    Fault(
        id="masters-rebuilt-behind-a-forward",
        bug="SkyRL#1898 (review) in kind: weights that made room for others' logprobs come back, masters made of them",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        patch=rebuilt_behind_calls,
        wrap=counting("forward", "logits"),
        one_rank=True,
        diagnosis="small steps are lost",
    ),
    Fault(
        id="replicas-part-in-bf16",
        bug="NeMo-RL#3716: a step of one's own leaves out the sum over TP of what its ranks share",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=marked("sequence_parallel", False),
        diagnosis="replicas part",
    ),
    Fault(
        id="masters-older-than-the-load",
        bug="NeMo-RL#2372, Megatron-Bridge#4082: master weights keep what the model held before it was loaded",
        rules=("OPT-001",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_after(_from_the_begin),
        diagnosis="what it held before it was loaded",
    ),
    Fault(
        id="masters-of-a-replica-older-than-the-load",
        bug="NeMo-RL#2372 in kind: masters are cut over replicas, and the first alone makes its own anew after a load",
        rules=("OPT-001",),
        cell=cell("qwen3_moe", "tp1", world_size=2, dtype="bfloat16", optimizer_step=True),
        wrap=_after(_from_the_begin_in_the_second_half),
        diagnosis="what it held before it was loaded",
    ),
    Fault(
        id="rate-of-the-construction",
        bug="the schedule's learning rate goes to one of the chained optimizers, the others keep the first one",
        rules=("OPT-001",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_rate_of_the_construction,
        says="after a step at the rate 0",
    ),
    Fault(
        id="experts-in-no-group",
        bug="groups of parameters are made by a name or a mark that experts lack, so that no optimizer has them",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: ".experts." in name)),
        diagnosis="not moved at all",
    ),
    Fault(
        id="mtp-in-no-group",
        bug="reported nowhere: groups of parameters are made of the decoder's layers, embedding and head",
        rules=("OPT-002",),
        cell=cell("glm4_moe", "one", mtp=1, optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: "mtp" in name)),
        diagnosis="not moved at all",
    ),
    Fault(
        id="chunk-without-an-optimizer",
        bug="B22 in kind: the optimizer is made of the first chunk of a rank with several virtual stages",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: chunk == 1)),
        diagnosis="not moved at all",
    ),
    Fault(
        id="new-weights-not-gathered",
        bug="NeMo-RL#4086: a distributed optimizer moves a replica's own shard, and gathers the others too late",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp1", world_size=2, optimizer_step=True),
        wrap=_after(_kept(_norms_of_a_replica)),
        diagnosis="not moved at all",
    ),
    Fault(
        id="decay-nobody-asked-for",
        bug="the weight decay of a recipe of pre-training stays on",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_after(_decayed),
        diagnosis="a weight decay of 0.1",
    ),
    Fault(
        id="still-in-bf16",
        bug="master weights move, and are copied back for all parameters but the router's, which are fp32 elsewhere",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: name.endswith("router.weight"))),
        diagnosis="not moved at all",
    ),
    Fault(
        id="fp32-parameters-in-no-group",
        bug="reported nowhere: an optimizer of master weights knows parameters in bf16 alone, and others stand still",
        rules=("OPT-002",),
        cell=cell("qwen3_5_moe_text", "one", dtype="bfloat16", optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: name.endswith("A_log"))),
        says="A_log",
        diagnosis="not moved at all",
    ),
    Fault(
        id="first-expert-alone-in-bf16",
        bug="reported nowhere: of a rank's experts, whose master weights move in one tensor, one is copied back",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_after(_kept(lambda chunk, name: ".experts." in name and "local_experts.0." not in name)),
        says="and other experts",
        diagnosis="not moved at all",
    ),
    Fault(
        id="half-of-the-new-weights-in-bf16",
        bug="a buffer of bf16 weights is cut in two for a distributed optimizer, and the other half is never gathered",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_after(_half_of_each),
        diagnosis="not moved",
    ),
    Fault(
        id="idle-experts-keep-their-gradient",
        bug="Megatron-LM#6871: an optimizer that skips empty gradients goes on with those of the step before",
        rules=("OPT-002",),
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        patch=_with_old_gradients,
        one_rank=True,
        says="are not where Adam moves them",
        diagnosis="where it has no gradient, that of the step before counts again",
    ),
    Fault(
        id="norm-of-the-own-shards",
        bug="the norm by which gradients are clipped is that of a rank's own shards",
        rules=("OPT-003",),
        also=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_norm_of_the_own,
        diagnosis="0.7071",
    ),
    Fault(
        id="norm-without-sinks",
        bug="Megatron-LM#7452: sinks are cut over TP and not marked so: the norm has those of the first rank alone",
        rules=("OPT-005",),
        cell=cell("gpt_oss", "tp2-ep2-etp1", layers=4, optimizer_step=True),
        wrap=marked("tensor_model_parallel", False, "softmax_offset"),
        says="the norm of the gradient is",
    ),
    Fault(
        id="norm-with-experts-of-the-first-tp-rank",
        bug="Megatron-LM#5916, Megatron-LM#6470: experts pass for replicas over TP, but for those of TP rank 0",
        rules=("OPT-003",),
        also=("OPT-004",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", optimizer_step=True),
        wrap=marked("tensor_model_parallel", False, ".experts."),
        patch=_by_dense_ranks,
        diagnosis="as if experts 8 to 15 were left out",
    ),
    Fault(
        id="norm-of-unmarked-masters",
        bug="Megatron-LM#7227 in kind: copies of parameters that an optimizer steps lack marks of how they are cut",
        rules=("OPT-003",),
        also=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        patch=_unmarked_masters,
        diagnosis="times the right one",
    ),
    Fault(
        id="norm-counts-replicas",
        bug="norms and routers, which all TP ranks hold, count in the norm of the gradient once for each of them",
        rules=("OPT-003",),
        also=("OPT-004",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        patch=_replicas_counted,
        diagnosis="as if norms and routers, which TP ranks hold alike, counted 2 times",
    ),
    Fault(
        id="norm-counts-the-copy-for-mtp",
        bug="reported nowhere: the embedding's copy on the stage of MTP layers counts in the norm of the gradient too",
        rules=("OPT-003",),
        also=("OPT-004",),
        cell=cell("glm4_moe", "pp2", mtp=1, optimizer_step=True),
        patch=_copies_counted,
        diagnosis="as if the embedding counted 2 times",
    ),
    Fault(
        id="bias-drifts-in-steps",
        bug="Megatron-LM#4785: steps of an optimizer update the experts' bias of routers that are not trained",
        rules=("EXP-006",),
        also=("OPT-004", "OPT-007"),
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=_bias_drifts,
        one_rank=True,
        diagnosis="arithmetic, not movement",
    ),
    Fault(
        id="reference-is-the-policy",
        bug="NeMo-RL#2955, NeMo-RL#3722 in kind: the reference is made of trained weights, and the KL to it is 0",
        rules=("OPT-008",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_of_the_policy,
        one_rank=True,
        says="of the largest off those of the checkpoint",
    ),
    Fault(
        id="reference-stays-in-the-model",
        bug="slime#2224, slime#2380: the policy is not put back behind a reference, whose weights are sent",
        rules=("OPT-008",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=read_again(nothing_between, lambda chunk, name: False),
        one_rank=True,
        diagnosis="not put back",
        says="is not as it was before a reference policy was asked",
    ),
    Fault(
        id="reference-with-the-policys-bias",
        bug="miles#1572 in kind: weights are exchanged by named_parameters, and the policy's bias routes the reference",
        rules=("OPT-008",),
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=read_again(_own_bias, lambda chunk, name: True),
        one_rank=True,
        says="of the largest off those of the checkpoint",
    ),
    Fault(
        id="policys-bias-lost-behind-a-reference",
        bug="miles#1572 in kind: what is brought back are parameters, and the policy goes on with the reference's bias",
        rules=("OPT-008",),
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=read_again(nothing_between, lambda chunk, name: not name.endswith("expert_bias")),
        one_rank=True,
        says="router.expert_bias is not as it was before",
    ),
    Fault(
        id="reference-of-the-first-chunk",
        bug="reported nowhere: weights that are set aside by name alone are those of one virtual stage",
        rules=("OPT-008",),
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, optimizer_step=True),
        wrap=read_again(_own_later_chunks, lambda chunk, name: True),
        says="of the largest off those of the checkpoint",
    ),
    Fault(
        id="policy-of-the-first-reference",
        bug="slime#2224 in kind: the copy that brings the policy back is made with the first reference, and not again",
        rules=("OPT-008",),
        cell=cell("qwen3_moe", "tp2", optimizer_step=True),
        wrap=_brought_back_from_a_first_copy,
        one_rank=True,
        diagnosis="not put back",
    ),
    Fault(
        id="moments-lost-behind-a-reference",
        bug="ISEEKYAN/Megatron-LM#45 in kind: Adam's moments make room for a reference, and are not brought back",
        rules=("OPT-004",),
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_restored_asleep,
        wrap=counting("optimizer", "reference"),
        diagnosis="moments are lost",
    ),
)
