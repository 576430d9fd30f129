"""From megatron-core's effective settings to a setup for the table of dispatchers, and its contradictions.

`moeref.config` uses this, so that compatibility is written in the table only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from moeref.dispatcher.backends import BACKENDS
from moeref.dispatcher.setup import CORES, PACKAGES, DispatcherError, Environment, Setup
from moeref.dispatcher.table import CAPACITY_BALANCING, RULES, Refusal, Rule, refusals
from moeref.layout import Layout

#: From a field of Setup to the setting of megatron-core with its value.
SETTINGS = {
    "dispatcher": "moe_token_dispatcher_type",
    "backend": "moe_flex_dispatcher_backend",
    "sequence_parallel": "sequence_parallel",
    "experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "capacity_factor": "moe_expert_capacity_factor",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "drop_policy": "moe_token_drop_policy",
    "balancing": "moe_router_load_balancing_type",
    "variable_lengths": "variable_seq_lengths",
    "pad_for_quantization": "moe_router_padding_for_quantization",
    "shared_overlap": "moe_shared_expert_overlap",
    "permute_fusion": "moe_permute_fusion",
    "bias": "add_bias_linear",
    **{field: name for backend in BACKENDS for field, name in backend.settings.items()},
}
#: Every supported version with all packages and a GPU. What all of these refuse is refused on any machine.
ANYWHERE = tuple(Environment(core=core, packages=frozenset(PACKAGES), gpu=True) for core in CORES)


def setup_of(settings: Mapping[str, Any], layout: Layout, **more: Any) -> Setup:
    """The setup of effective settings of megatron-core; `more` gives fields of Setup that the settings do not.

    A name that is absent or None gets the default of Setup, the most permissive value; only for the backend is None a
    value. The precision is fp8 or fp4 if set, else that of `more`, because params_dtype does not decide the dtype of
    dispatched rows. Raises DispatcherError for a value that the table does not know.
    """
    found = {field: value for field, name in SETTINGS.items() if (value := settings.get(name)) is not None}
    if SETTINGS["backend"] in settings:
        found["backend"] = settings[SETTINGS["backend"]]
    if isinstance(kinds := found.get("balancing"), list):
        # Each type must allow a capacity factor, so take one that does not, if any.
        found["balancing"] = next((kind for kind in kinds if kind not in CAPACITY_BALANCING), kinds[0])
    if settings.get("moe_router_padding_for_fp8"):  # the older name
        found["pad_for_quantization"] = True
    found["shared_experts"] = bool(settings.get("moe_shared_expert_intermediate_size"))
    for precision in ("fp8", "fp4"):
        if settings.get(precision):
            found["precision"] = precision
    try:
        return Setup(layout=layout, **{**more, **found})
    except (TypeError, ValueError) as error:
        raise DispatcherError(f"the table of dispatchers has no such setup: {error}") from error


def contradictions(setup: Setup) -> tuple[tuple[Refusal, tuple[str, ...]], ...]:
    """What is refused on every machine and in every version, each with the names of the settings at fault.

    A setting is at fault if the refusal disappears when a boolean is negated or another value set to its default.
    """
    found = [refusals(setup, environment) for environment in ANYWHERE]
    everywhere = set.intersection(*({refusal.rule for refusal in one} for one in found))
    rules = {rule.id: rule for rule in RULES}
    return tuple((r, _at_fault(rules[r.rule], setup)) for r in found[-1] if r.rule in everywhere)


def _at_fault(rule: Rule, setup: Setup) -> tuple[str, ...]:
    names = []
    for one in fields(Setup):
        if one.name in SETTINGS and one.name not in ("experts", "topk"):
            held = getattr(setup, one.name)
            without: dict[str, Any] = {one.name: not held if isinstance(held, bool) else one.default}
            if not rule.refuses(replace(setup, **without), ANYWHERE[-1]):
                names.append(SETTINGS[one.name])
    return tuple(names)
