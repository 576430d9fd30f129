"""All faults by id, and the known bugs that no fault can bring back yet."""

import tomllib
from importlib.resources import files

from moeref_conformance.selftest.faults import (
    config,
    context,
    dispatch,
    export,
    gather,
    gpt_oss,
    gradients,
    hybrid,
    loading,
    names,
    replay,
    roles,
    routes,
    seeds,
    static,
    steps,
    stream,
)
from moeref_conformance.selftest.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for module in (
        *(names, loading, context, gather, gradients, steps, export, stream),
        *(roles, seeds, config, gpt_oss, hybrid, static, routes, replay, dispatch),
    )
    for fault in module.FAULTS
}
#: The list of reported bugs by id: {"report": …, "symptom": …}. A fault's `bug` text names ids of it.
KNOWN_BUGS: dict[str, dict[str, str]] = tomllib.loads(files(__name__).joinpath("bugs.toml").read_text(encoding="utf-8"))
#: Bugs whose effect the kit cannot show yet, and why.
NOT_EXPRESSIBLE = {
    "B19": "quantizer buffers next to a weight: no cell has a quantised model",
    "B44": "scale blocks of a quantised weight: no cell has a quantised checkpoint",
    "B45": "scales of an all-zero block: no cell has a quantised checkpoint",
    "SkyRL#1680": "the engine's loader: the export facet ends at the writer",
    "slime#2209": "delta updates: no facet yet",
    "Dressage#1": "a vision-language model: no family of the kit has one",
    "verl#7195": "the engine's parameter layout: the export facet ends at the writer",
    "ms-swift#9828": "a transpose on either side of the transport: the export facet ends at the writer",
    "prime-rl#3543": "CUDA graphs of the engine: the export facet ends at the writer",
    "W1": "pausing the engine: the export facet ends at the writer",
    "W2": "finalising in the engine after every chunk: the export facet ends at the writer",
    "W5": "delta updates: no facet yet",
    "W6": "delta updates in two halves of a buffer: no facet yet",
    "W9": "delta updates with a base version: no facet yet",
    "W15": "delta updates by XOR: no facet yet",
    "R9": "padding for FP8: no cell has a quantised model",
    "R18": "the mask of padded tokens: the tokens of a cell have no padding",
    "Megatron-LM#5047": "the scale of an auxiliary loss: the step that is asked for has none, with one GRD-001 fails",
    "W18": "a checker that waits for nothing: a bug of the judge, not of the judged",
}

__all__ = ["FAULTS", "KNOWN_BUGS", "NOT_EXPRESSIBLE", "Fault"]
