"""Steps of the facet `config`: what the model is given, what its modules hold, and what becomes of requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moeref_conformance.contract.api import Config, Request

#: Requests that every target has to honour, by name.
HONOURED: dict[str, Request] = {
    "nothing": Request(),
    "other values": Request(
        fields={
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_grouped_gemm": True,
            "moe_enable_routing_replay": True,
        },
        overrides={"layernorm_epsilon": 0.125, "moe_z_loss_coeff": 0.25, "moe_router_dtype": "fp64"},
    ),
    "false": Request(fields={"moe_grouped_gemm": False, "moe_router_enable_expert_bias": False}),
    "false, passed through": Request(overrides={"qk_layernorm": False, "gated_linear_unit": False}),
    "none": Request(overrides={"moe_router_topk_scaling_factor": None, "moe_shared_expert_intermediate_size": None}),
    "a list": Request(
        fields={"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
        overrides={"moe_aux_loss_coeff": [0.5, 0.25]},
    ),
    "recompute": Request(
        overrides={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "flex": Request(fields={"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}),
}
#: Requests in which both levels name a setting.
TWICE: dict[str, Request] = {
    "true, then false": Request(fields={"moe_grouped_gemm": True}, overrides={"moe_grouped_gemm": False}),
    "two dispatchers": Request(
        fields={"moe_token_dispatcher_type": "alltoall"}, overrides={"moe_token_dispatcher_type": "allgather"}
    ),
}
#: Names that no version of TransformerConfig has.
UNKNOWN: dict[str, Request] = {
    "unknown field": Request(fields={"moe_grouped_gemms": True}),
    "unknown override": Request(overrides={"moe_router_topkk": 2}),
}
#: One of the two would have no effect, without a word.
SILENT: dict[str, Request] = {
    "replay under a fused router": Request(
        fields={"moe_enable_routing_replay": True}, overrides={"moe_router_fusion": True}
    ),
    "flex without a backend": Request(
        fields={"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": None}
    ),
}
REQUESTS = {**HONOURED, **TWICE, **UNKNOWN, **SILENT}
#: Asked of the reference model too.
OF_THE_REFERENCE = "other values"


def recorded(config: Config, chunks: Sequence[Any] | None) -> dict[str, Any]:
    """What was given, what each different config of the modules holds, and every request's answer.

    An answer is what changes against the request for nothing, or the text of the refusal.
    """
    base = _values(config.resolve(Request(), "policy"))
    answers: dict[str, Any] = {}
    for name, request in REQUESTS.items():
        answers[name] = _answer(config, request, "policy", base)
    reference = {name: _answer(config, REQUESTS[name], "reference", base) for name in ("nothing", OF_THE_REFERENCE)}
    held = None if chunks is None else held_by(chunks)
    return {
        "given": _values(config.given()),
        "nothing": base,
        "requests": answers,
        "reference": reference,
        "held": held,
    }


def held_by(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The plain values of every config object in the modules, each object once, with the module that came first."""
    found: dict[int, dict[str, Any]] = {}
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            config = getattr(module, "config", None)
            if dataclasses.is_dataclass(config) and id(config) not in found:
                values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
                found[id(config)] = {"module": f"{number}:{name}", "values": _values(values)}
    return list(found.values())


def _answer(config: Config, request: Request, role: str, base: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values = _values(config.resolve(request, role))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    changed = {k: v for k, v in values.items() if k not in base or not same(base[k], v)}
    return {"changed": changed, "gone": sorted(base.keys() - values.keys())}


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1."""
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are plain: None, bool, numbers, text, and lists of them."""
    return {str(k): list(v) if isinstance(v, tuple) else v for k, v in values.items() if _is_plain(v)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)
