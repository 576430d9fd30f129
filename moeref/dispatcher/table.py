"""The table of dispatchers: which token dispatcher and backend works with which settings, layout and environment.

`RULES` has the order in which megatron-core checks the conditions, so the first rule that refuses and is not `stricter`
gives the exception megatron-core raises. The upstream tests compare the table with real `TransformerConfig` and
`MoELayer` construction in every supported version. Rules marked `stricter` refuse what megatron-core accepts at
construction, but fails on or computes wrongly in the first step.
Functions named in sources are megatron-core's unless a repository is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from moeref.dispatcher.backends import BACKENDS, DEFAULT, Backend
from moeref.dispatcher.setup import Choice, DispatcherError, Environment, Setup

Stage = Literal["config", "construction", "step"]

#: Load-balancing types under which megatron-core accepts a capacity factor.
CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@dataclass(frozen=True)
class Rule:
    """One condition. `refuses` takes a setup and an environment; `error` names megatron-core's exception class.

    `choices` are the dispatchers that it concerns. For `stricter` rules `error` is raised in the first step; "" if
    megatron-core raises nothing.
    """

    id: str
    stage: Stage
    error: str
    choices: tuple[Choice, ...]
    text: str
    fix: str
    source: str
    refuses: Callable[[Setup, Environment], bool]
    stricter: bool = False
    #: Exception classes that differ from `error`, by minor version.
    error_of: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a setup is refused, the stage at which megatron-core fails, and the fix."""

    rule: str
    stage: Stage
    error: str
    text: str
    fix: str
    source: str
    stricter: bool

    def __str__(self) -> str:
        return f"{self.text}; {self.fix} [{self.rule}]"


ALL = tuple(Choice)
GATHER, EXCHANGE = (Choice.ALLGATHER,), (Choice.ALLTOALL,)
FLEX = tuple(Choice(backend.choice) for backend in BACKENDS)


def _with(**facts: Any) -> tuple[Choice, ...]:
    """The choices whose backends have these values in their rows."""
    return tuple(Choice(b.choice) for b in BACKENDS if all(getattr(b, name) == value for name, value in facts.items()))


_EQUAL = (*GATHER, *_with(equal_rows=True))
_PADS_UNEVEN = tuple(Choice(backend.choice) for backend in BACKENDS if "pad_uneven_rows" in backend.settings)
_OTHERS = tuple(Choice(backend.choice) for backend in BACKENDS if backend.name != DEFAULT)
_CONFIG = "TransformerConfig.__post_init__"


def _quantised(setup: Setup) -> bool:
    return setup.precision in ("fp8", "fp4")


def _fp4_without_te(setup: Setup, env: Environment) -> bool:
    return setup.precision == "fp4" and "transformer_engine" not in env.packages


def _overlap(setup: Setup, env: Environment) -> bool:
    allowed = ("alltoall",) if env.minor == "0.16" else ("alltoall", "flex")
    return setup.shared_experts and setup.shared_overlap and setup.dispatcher not in allowed


def _one_rank(setup: Setup, env: Environment) -> bool:
    concerned = setup.dispatcher == "flex" if env.minor == "0.16" else setup.choice in _with(takes_one_rank=False)
    return concerned and setup.layout.etp * setup.layout.ep == 1


def _capacity(setup: Setup) -> float | None:
    """The effective capacity factor: megatron-core reads a negative one as None."""
    return None if setup.capacity_factor is None or setup.capacity_factor < 0 else setup.capacity_factor


def _overfull(setup: Setup) -> bool:
    factor = _capacity(setup)
    return (
        factor is not None
        and setup.pad_to_capacity
        and setup.dispatcher == "alltoall"
        and factor * setup.topk > setup.experts
    )


def _unequal(setup: Setup, env: Environment) -> bool:
    concerned = setup.choice in _EQUAL and setup.layout.etp * setup.layout.ep > 1
    pads_itself = setup.choice in _PADS_UNEVEN and setup.pad_uneven_rows and env.minor != "0.16"
    return concerned and not setup.equal_rows and not pads_itself


def _package_rule(backend: Backend) -> Rule:
    choice = Choice(backend.choice)
    return Rule(
        f"{backend.name}-package", "construction", "ImportError", (choice,),
        f"{backend.needs} is not installed",
        "install it or use alltoall", f"{backend.manager}.__init__",
        lambda s, e: s.choice == choice and backend.package not in e.packages,
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    Rule(
        "uneven-is-new", "config", "TypeError", _PADS_UNEVEN,
        "megatron-core 0.16 has no moe_hybridep_pad_uneven_dispatch_inputs",
        "drop pad_uneven_rows and pad the rows with a plan", "TransformerConfig",
        lambda s, e: s.pad_uneven_rows and e.minor == "0.16",
    ),
    Rule(
        "sp-needs-tp", "config", "ValueError", ALL,
        "sequence parallelism splits rows over the tensor parallel group, and tp is 1",
        "turn it off or raise tp", "ModelParallelConfig.__post_init__",
        lambda s, e: s.sequence_parallel and s.layout.tp == 1,
    ),
    Rule(
        "deepep-flag-needs-flex", "config", "ValueError", ALL,
        "the deprecated moe_enable_deepep goes with the flex dispatcher only",
        f"drop the flag and choose flex-{DEFAULT}", _CONFIG,
        lambda s, e: s.enable_deepep and s.dispatcher != "flex",
    ),
    Rule(
        "one-backend", "config", "ValueError", _OTHERS,
        f"moe_enable_deepep contradicts every backend but {DEFAULT}",
        "drop the flag", _CONFIG,
        lambda s, e: s.enable_deepep and s.dispatcher == "flex" and s.backend not in (DEFAULT, None),
    ),
    Rule(
        "deepep-never-pads", "config", "ValueError", _with(pads_to_capacity=False),
        "this backend does not pad expert inputs to capacity",
        f"drop pad_to_capacity, or use {', '.join((*EXCHANGE, *_with(pads_to_capacity=True)))}", _CONFIG,
        lambda s, e: s.choice in _with(pads_to_capacity=False) and s.pad_to_capacity,
    ),
    Rule(
        "overlap-needs-exchange", "config", "ValueError", (*GATHER, *FLEX),
        "shared experts overlap with an all-to-all (from 0.19 also with flex), and with nothing else",
        "drop shared_overlap or use alltoall", _CONFIG,
        _overlap,
    ),
    Rule(
        "capacity-needs-balancing", "config", "ValueError", ALL,
        f"a capacity factor goes with the load-balancing types {', '.join(CAPACITY_BALANCING)} only",
        "change balancing or drop capacity_factor", _CONFIG,
        lambda s, e: s.capacity_factor is not None and s.balancing not in CAPACITY_BALANCING,
    ),
    Rule(
        "padding-needs-capacity", "config", "ValueError", ALL,
        "padding to capacity needs a capacity factor (a negative one counts as none)",
        "set capacity_factor", _CONFIG,
        lambda s, e: s.pad_to_capacity and _capacity(s) is None,
    ),
    Rule(
        "bias-needs-etp1", "config", "AssertionError", ALL,
        "experts with biases cannot be split: every tensor parallel rank would add the bias",
        "set etp=1", _CONFIG,
        lambda s, e: s.bias and s.layout.etp > 1,
    ),
    Rule(
        "fp8-needs-te", "config", "ValueError", ALL,
        "fp8 with experts needs Transformer Engine, 1.7 or newer (1.11 with grouped GEMM)",
        "install transformer-engine", _CONFIG,
        lambda s, e: s.precision == "fp8" and "transformer_engine" not in e.packages,
        error_of={"0.16": "TypeError"},
    ),
    Rule(
        "routing-padding-needs-quantisation", "config", "ValueError", ALL,
        "routing-map padding aligns quantised expert inputs, and neither fp8 nor fp4 is on",
        "drop pad_for_quantization", _CONFIG,
        lambda s, e: s.pad_for_quantization and not _quantised(s),
    ),
    Rule(
        "allgather-never-pads-routing", "config", "ValueError", GATHER,
        "allgather does not pad the routing map for quantisation",
        "use alltoall", _CONFIG,
        lambda s, e: s.pad_for_quantization and s.dispatcher == "allgather",
    ),
    Rule(
        "allgather-needs-one-length", "config", "ValueError", GATHER,
        "allgather gathers equal pieces and does not take variable sequence lengths",
        "use alltoall", _CONFIG,
        lambda s, e: s.variable_lengths and s.dispatcher == "allgather",
    ),
    Rule(
        "fusion-needs-te", "config", "ValueError", ALL,
        "fused permutation needs Transformer Engine, 2.1 or newer",
        "drop permute_fusion or install transformer-engine", _CONFIG,
        lambda s, e: s.permute_fusion and "transformer_engine" not in e.packages,
        error_of={"0.16": "ImportError"},
    ),
    Rule(
        "experts-divide", "construction", "AssertionError", ALL,
        "the experts do not divide over the expert parallel ranks",
        "choose ep that divides the experts", "BaseMoELayer.__init__",
        lambda s, e: s.experts % s.layout.ep != 0,
    ),
    Rule(
        "flex-needs-a-group", "construction", "AssertionError", FLEX,
        "a group of etp·ep = 1 has nobody to exchange with"
        f" (from 0.19 {', '.join(_with(takes_one_rank=True))} takes it)",
        "use alltoall", "MoEFlexTokenDispatcher.__init__",
        _one_rank,
    ),
    Rule(
        "flex-needs-a-backend", "construction", "ValueError", FLEX,
        "the flex dispatcher needs a backend and has none",
        f"choose {' or '.join(FLEX)}", "MoEFlexTokenDispatcher.__init__",
        lambda s, e: s.choice is None,
    ),
    *map(_package_rule, BACKENDS),
    Rule(
        "shared-experts-have-no-bias", "construction", "AssertionError", ALL,
        "shared experts take no bias",
        "drop bias or the shared experts", "SharedExpertMLP.__init__",
        lambda s, e: s.bias and s.shared_experts,
    ),
    Rule(
        "fp4-needs-te", "construction", "TypeError", ALL,
        "fp4 needs Transformer Engine; 0.16 with shared experts says so at construction",
        "install transformer-engine", "SharedExpertMLP.__init__",
        lambda s, e: _fp4_without_te(s, e) and s.shared_experts and e.minor == "0.16",
    ),
    Rule(
        "fp4-needs-te-later", "step", "", ALL,
        "fp4 needs Transformer Engine; without it the local linear layers run in the parameters' precision unasked",
        "install transformer-engine", "get_fp4_context",
        lambda s, e: _fp4_without_te(s, e) and not (s.shared_experts and e.minor == "0.16"),
        stricter=True,
    ),
    Rule(
        "tp-needs-sp", "step", "ValueError", ALL,
        "training experts with tp > 1 needs sequence parallelism; megatron-core says so in the first forward",
        "turn sequence_parallel on", "MoELayer.forward",
        lambda s, e: s.training and s.layout.tp > 1 and not s.sequence_parallel,
        stricter=True,
    ),
    Rule(
        "drop-policy", "step", "ValueError", ALL,
        "the drop policy is neither probs nor position; megatron-core reads it at the first drop",
        "use probs or position", "apply_router_token_dropping",
        lambda s, e: _capacity(s) is not None and s.drop_policy not in ("probs", "position"),
        stricter=True,
    ),
    Rule(
        "capacity-over-rows", "step", "RuntimeError", EXCHANGE,
        "capacity_factor·topk > experts gives an expert more places than there are rows, which padding cannot fill",
        "keep capacity_factor at most experts/topk", "permute (its drop_and_pad branch)",
        lambda s, e: _overfull(s),
        stricter=True,
    ),
    Rule(
        "etp-without-ep", "step", "", ALL,
        "megatron-core 0.16 scales expert gradients wrongly when etp differs from tp and ep is 1",
        "set etp to tp, raise ep, or use 0.19", "measured: gradients off by a factor, forward right",
        lambda s, e: e.minor == "0.16" and s.training and s.layout.ep == 1 and s.layout.etp != s.layout.tp,
        stricter=True,
    ),
    Rule(
        "equal-rows", "step", "RuntimeError", _EQUAL,
        "all ranks of the etp·ep group must dispatch the same number of rows; unequal counts fail or hang",
        f"pad with a plan for the group ({', '.join(_PADS_UNEVEN)} from 0.19: or pad_uneven_rows), or use alltoall",
        "gather_from_sequence_parallel_region, hybrid_ep_dispatch",
        _unequal,
        stricter=True,
    ),
    Rule(
        "flex-rows-bf16", "step", "RuntimeError", FLEX,
        "the kernels dispatch bf16 rows (or fp8 with scales), not fp32",
        "use bf16, or alltoall", "deepseek-ai/DeepEP dd758ca deep_ep/buffers/legacy.py, Buffer.dispatch",
        lambda s, e: s.dispatcher == "flex" and s.precision == "fp32",
        stricter=True,
    ),
    Rule(
        "flex-gpu", "step", "RuntimeError", FLEX,
        "the kernels of flex backends are CUDA's, and there is no GPU",
        "use alltoall", "fused_dispatch, hybrid_ep_dispatch",
        lambda s, e: s.dispatcher == "flex" and not e.gpu,
        stricter=True,
    ),
)  # fmt: skip


def refusals(setup: Setup, environment: Environment) -> tuple[Refusal, ...]:
    """Every reason to refuse `setup`, in the order of the table; empty if the dispatcher can be used."""
    return tuple(
        Refusal(
            rule=rule.id,
            stage=rule.stage,
            error=rule.error_of.get(environment.minor, rule.error),
            text=rule.text,
            fix=rule.fix,
            source=rule.source,
            stricter=rule.stricter,
        )
        for rule in RULES
        if rule.refuses(setup, environment)
    )


def check(setup: Setup, environment: Environment) -> None:
    """Raise DispatcherError with every reason to refuse `setup`, if there is any."""
    if found := refusals(setup, environment):
        name = setup.choice or "flex without a backend"
        raise DispatcherError(
            f"dispatcher {name} under {setup.layout.text} with megatron-core {environment.core}:\n"
            + "\n".join(f"- {refusal}" for refusal in found)
        )


def requirements(choice: Choice) -> tuple[Rule, ...]:
    """The rules of the table that concern `choice`."""
    return tuple(rule for rule in RULES if choice in rule.choices)
