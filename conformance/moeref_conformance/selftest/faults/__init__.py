"""All faults by id."""

import re

from moeref_conformance.selftest.faults import (
    adapters,
    around,
    balancing,
    batches,
    bystanders,
    capture,
    config,
    context,
    delta,
    dispatch,
    export,
    fp8_checkpoint,
    fused,
    gather,
    gpt_oss,
    gradients,
    hybrid,
    int4_checkpoint,
    int4_sent,
    loading,
    logprobs,
    masks,
    minimax,
    model,
    mtp,
    mxfp4_checkpoint,
    names,
    not_finite,
    offload,
    optimizer,
    policy,
    quantised,
    replay,
    roles,
    routes,
    seeds,
    settings,
    sparse,
    static,
    steps,
    stream,
    sync,
)
from moeref_conformance.selftest.faults.base import Fault

MODULES = (
    *(names, loading, around, context, gather, gradients, model, steps, batches, export, bystanders, fused, stream),
    *(mtp, masks, balancing, logprobs, policy, fp8_checkpoint, int4_checkpoint, int4_sent),
    *(mxfp4_checkpoint, minimax),
    *(roles, seeds, config, gpt_oss, hybrid, sparse, static, routes, capture, replay, dispatch, delta, quantised),
    *(optimizer, not_finite, offload, adapters, sync, settings),
)
FAULTS: dict[str, Fault] = {fault.id: fault for module in MODULES for fault in module.FAULTS}


def bugs_of(fault: Fault) -> list[str]:
    """The ids of reported bugs that a fault's text names: those of `known_bugs`, and of other issues."""
    return re.findall(r"\b[BPRSW]\d+\b|[\w-]+#\d+", fault.bug)


__all__ = ["FAULTS", "Fault", "bugs_of"]
