"""What adapters are that move, compute or merge otherwise than they should: known mistakes, tried on what was seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.requests.adapters import RATES, SCALE
from moeref_conformance.diagnosis.matching import first_of, runs, short, span
from moeref_conformance.oracles import adapters as oracle

Tensors = Mapping[str, torch.Tensor]
#: How near a factor that is explained has to be, relative to its largest element.
NEAR = 1e-3
#: The same of what was added to a weight in fp32, and of a number that lies half-way between two of bf16.
MERGED, NEARLY_ALL = 1e-2, 0.95
#: How a linear is called inside its adapter: by PEFT, and by Megatron-Bridge.
WRAPPED = ("base_layer", "to_wrap")
#: What no sum of squares is divided by.
TINY = 1e-30
#: Rows of a factor that are told apart.
ENOUGH = 4


@dataclass(frozen=True)
class Step:
    """A step: the `weights` that have adapters, the factors before it, and the gradients of both.

    `earlier` are the gradients of factors in the step before, of the first step none. `of_replica` gives the gradients
    of weights of the rows of one replica; none where it is not asked for them.
    """

    name: str
    weights: list[str]
    before: Tensors
    of_weights: Tensors
    alone: Tensors
    earlier: Tensors
    of_replica: Callable[[], Tensors]


def moved_as(step: Step, name: str, moved: torch.Tensor) -> str:
    """What the factor `name` has `moved` by instead of its gradient; empty if nothing fits."""
    return first_of(
        lambda: _by_its_numbers(_wanted(step, name), moved),
        lambda: _of_another(step, name, moved),
        lambda: _beside_another(step, name, moved),
        lambda: _with_the_step_before(step, name, moved),
        lambda: _of_a_replica(step, name, moved),
        lambda: rows_of(_wanted(step, name), moved),
    )


def of_linears(findings: list[Finding], factors: Iterable[str], right_before: bool) -> list[Finding]:
    """Say of findings of a step without a diagnosis of which linears they are, unless of all.

    `factors` are all that move, and `right_before` says whether the step before moved them as it should.
    """
    linears, every = {_linear_of(one.hf_name) for one in findings}, list(factors)
    diagnosis = f"{len(findings)} of {len(every)} factors move otherwise"
    if linears < {_linear_of(name) for name in every}:
        diagnosis += f", all of {', '.join(sorted(linears))}"
    if right_before:
        diagnosis += "; the step before moves all of them as it should"
    return [one if one.diagnosis else replace(one, diagnosis=diagnosis) for one in findings]


def _wanted(step: Step, name: str) -> torch.Tensor:
    return -RATES[step.name] * step.alone[name]


def _near(got: torch.Tensor, want: torch.Tensor, part: float = NEAR) -> bool:
    if got.shape != want.shape or not bool(want.any()):
        return False
    return float((got - want).abs().max()) <= part * float(want.abs().max())


def _by_its_numbers(want: torch.Tensor, moved: torch.Tensor) -> str:
    if not bool(moved.isfinite().all()):
        return "not finite"
    if not bool(moved.any()):
        return "not moved"
    if not bool(want.any()):
        return "moved without a gradient"
    times = _times(moved, want)
    return f"moved {times:.3g} times as far" if times is not None else ""


def _times(got: torch.Tensor, want: torch.Tensor, part: float = NEAR) -> float | None:
    """How many times as large it is as what is wanted, by least squares; None if that does not explain it."""
    times = float((got * want).sum() / want.square().sum().clamp_min(TINY))
    near = torch.allclose(got, times * want, rtol=part, atol=part * float(got.abs().max()))
    return times if near else None


def _of_another(step: Step, name: str, moved: torch.Tensor) -> str:
    """The factor of another linear, under this name."""
    for other in step.alone:
        if other != name and short(other) == short(name) and _near(moved, _wanted(step, other)):
            return f"moved as that of {_linear(other, name)} should: it is sent under another's name"
    return ""


def _beside_another(step: Step, name: str, moved: torch.Tensor) -> str:
    """The chain rule with the other factor of another linear of the same shape."""
    weight, kind = _weight(name), short(name)
    beside = next(factor for factor in oracle.FACTORS if factor != kind)
    own = step.before[oracle.peft(weight, beside)]
    for other in step.weights:
        factor = step.before[oracle.peft(other, beside)]
        if other == weight or factor.shape != own.shape:
            continue
        exchanged = {**step.before, oracle.peft(weight, beside): factor}
        would = oracle.gradients(step.of_weights, exchanged, [weight])[name]
        if _near(moved, -RATES[step.name] * would):
            return f"moved as beside the {beside} of {_linear(oracle.peft(other, kind), name)}"
    return ""


def _with_the_step_before(step: Step, name: str, moved: torch.Tensor) -> str:
    if name not in step.earlier or not bool(step.earlier[name].any()):
        return ""
    earlier, more = -RATES[step.name] * step.earlier[name], moved - _wanted(step, name)
    times = float((more * earlier).sum() / earlier.square().sum())
    if abs(times) > NEAR and _near(moved, _wanted(step, name) + times * earlier):
        return f"moved by {times:.3g} times the gradient of the step before, too"
    return ""


def _of_a_replica(step: Step, name: str, moved: torch.Tensor) -> str:
    """Whether it is what the rows of one replica move, whose sum may be weighed otherwise."""
    of_weights = step.of_replica()
    if not of_weights:
        return ""
    weight = _weight(name)
    would = -RATES[step.name] * oracle.gradients({weight: of_weights[weight]}, step.before, [weight])[name]
    times = float((moved * would).sum() / would.square().sum().clamp_min(TINY))
    if abs(times) > NEAR and _near(moved, times * would):
        return "moved by the gradient of the rows of one replica: not summed over dp"
    return ""


def rows_of(want: torch.Tensor, got: torch.Tensor, part: float = NEAR) -> str:
    """Which rows of a matrix are right, 0, or other rows of it; empty if some are none of these."""
    if got.shape != want.shape or len(got) < ENOUGH:
        return ""
    near = part * float(want.abs().max())
    apart = torch.cdist(got.double(), want.double(), p=torch.inf)
    right, zero = apart.diagonal() <= near, got.abs().amax(1) <= near
    from_ = [0 if zero else int(row) for zero, row in zip(zero.tolist(), apart.argmin(1).tolist(), strict=True)]
    if not bool((right | zero | (apart.amin(1) <= near)).all()) or bool(right.all()):
        return ""
    if bool((right | zero).all()):
        spans = ", ".join(span(*run) for run in runs((zero & ~right).tolist())[:3])
        return f"rows {spans} are 0, the others right"
    row = int((~right & ~zero).nonzero()[0])
    return f"its rows are in another order: row {row} is the right one of {from_[row]}"


def merged_as(name: str, phases: Mapping[str, Tensors], base: torch.Tensor, merged: torch.Tensor) -> str:
    """What was added to a weight instead of its adapter; empty if nothing fits.

    `phases` has the adapters of each phase, the last of them the right ones.
    """
    *_, last = phases.values()
    added, right = merged.double() - base.double(), _product(last, name, name)
    if not bool(added.any()):
        return "without its adapter"
    if (times := _times(added, right, MERGED)) is not None:
        return f"its adapter counts {times:.3g} times"
    for words, would in _sums(name, phases):
        if _near(added, would, MERGED):
            return words
    if torch.equal(merged, merged.bfloat16().to(merged.dtype)):
        rounded = (base.double() + right).bfloat16().double() == merged.double()
        if float(rounded.double().mean()) >= NEARLY_ALL:
            return "rounded to bf16"
    return rows_of(right, added, MERGED)


def added_as(name: str, phases: Mapping[str, Tensors], base: torch.Tensor, got: torch.Tensor) -> str:
    """Whether a weight that is sent as the base's has its adapter in it, of which phase; empty if nothing fits."""
    added = got.double() - base.double()
    for phase, adapters in reversed([*phases.items()]):
        if (times := _times(added, _product(adapters, name, name), MERGED)) and bool(added.any()):
            counted = "" if abs(times - 1) <= MERGED else f", counted {times:.3g} times"
            return f"with its adapter as it is at {phase}{counted}"
    return ""


def named_as(name: str) -> str:
    """What a name is where it is sent beside those of the base; empty of one that says nothing."""
    if any(f".{factor}." in name for factor in oracle.FACTORS):
        return "a factor of an adapter"
    return next((f"the name of a linear inside its adapter: {part}" for part in WRAPPED if f".{part}." in name), "")


def _sums(name: str, phases: Mapping[str, Tensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """What may have been added instead, with words for it."""
    (*earlier, (_, last)) = phases.items()
    for phase, adapters in reversed(earlier):
        yield f"with its adapter as it was at {phase}", _product(adapters, name, name)
    right = _product(last, name, name)
    for other in sorted({_weight(factor) for factor in last} - {name}):
        linear = _linear(other, name)
        for first, second, of in ((other, name, "lora_A"), (name, other, "lora_B"), (other, other, "adapter")):
            would = _product(last, first, second)
            if would.shape == right.shape:
                yield f"with the {of} of {linear}", would
                if of == "adapter":
                    yield f"with the adapter of {linear} beside its own", right + would


def _product(adapters: Tensors, first: str, second: str) -> torch.Tensor:
    """What the lora_A of one linear and the lora_B of another add."""
    return SCALE * adapters[oracle.peft(second, "lora_B")].double() @ adapters[oracle.peft(first, "lora_A")].double()


def of_other_adapters(weights: list[str], adapters: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Adapters that logits may be of instead, with words for what is wrong with them."""
    for times, (of_which, part) in itertools.product(
        (1 / SCALE, SCALE, 0.5, 2.0), (("adapters", ""), ("adapters of experts", ".experts."))
    ):
        counted = {name for name in adapters if short(name) == "lora_B" and part in name}
        changed = {name: times * of if name in counted else of for name, of in adapters.items()}
        yield f"those of {of_which} that count {times:.3g} times", changed
    for factor in oracle.FACTORS:
        for first, second in itertools.combinations(sorted({short(name) for name in weights}), 2):
            if exchanged := _exchanged(adapters, factor, first, second):
                yield (
                    f"those of the {factor} of {first} for that of {second}, and the reverse",
                    {**adapters, **exchanged},
                )


def _exchanged(adapters: Tensors, factor: str, first: str, second: str) -> dict[str, torch.Tensor]:
    """The factors of two linears of each block under each other's name; none unless their shapes are the same."""
    found = dict[str, torch.Tensor]()
    for name in adapters:
        if name.endswith(f".{first}.{factor}.weight"):
            other = name.replace(f".{first}.{factor}.", f".{second}.{factor}.")
            if other not in adapters or adapters[other].shape != adapters[name].shape:
                return {}
            found |= {name: adapters[other], other: adapters[name]}
    return found


def _weight(name: str) -> str:
    """The weight whose factor this is, with PEFT's prefix or without; a weight's own name stays."""
    name = name.removeprefix(oracle.PREFIX)
    return f"{name.rsplit('.', 2)[0]}.weight" if short(name) in oracle.FACTORS else name


def _linear_of(name: str) -> str:
    """The linear of a factor, and whether it is of experts: `experts.up_proj`."""
    block, _, linear = _weight(name).removesuffix(".weight").rpartition(".")
    of = next((part for part in ("shared_experts", "shared_expert", "experts") if f".{part}" in block), "")
    return f"{of}.{linear}" if of else linear


def _linear(other: str, name: str) -> str:
    """The linear of another factor: short if it is of the same block."""
    (block, linear), own = (_weight(one).removesuffix(".weight").rpartition(".")[::2] for one in (other, name))
    return linear if block == own[0] else f"{block}.{linear}"
