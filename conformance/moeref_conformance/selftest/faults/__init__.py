"""All faults by id, and the known bugs that no fault can bring back yet."""

import re
import tomllib
from importlib.resources import files

from moeref_conformance.selftest.faults import (
    batches,
    bystanders,
    capture,
    config,
    context,
    delta,
    dispatch,
    export,
    fused,
    gather,
    gpt_oss,
    gradients,
    hybrid,
    loading,
    model,
    mtp,
    names,
    replay,
    roles,
    routes,
    seeds,
    static,
    steps,
    stream,
    sync,
)
from moeref_conformance.selftest.faults.base import Fault

FAULTS: dict[str, Fault] = {
    fault.id: fault
    for module in (
        *(names, loading, context, gather, gradients, model, steps, batches, export, bystanders, fused, stream, mtp),
        *(roles, seeds, config, gpt_oss, hybrid, static, routes, capture, replay, dispatch, delta, sync),
    )
    for fault in module.FAULTS
}
#: Reported bugs by id: {"report": …, "symptom": …, "waits": …}. A fault's `bug` text names ids of it.
KNOWN_BUGS: dict[str, dict[str, str]] = tomllib.loads(files(__name__).joinpath("bugs.toml").read_text(encoding="utf-8"))
#: Bugs whose effect the kit cannot show yet, and why.
NOT_EXPRESSIBLE = {bug: entry["waits"] for bug, entry in KNOWN_BUGS.items() if "waits" in entry}


def bugs_of(fault: Fault) -> list[str]:
    """The ids of reported bugs that a fault's text names: those of `KNOWN_BUGS`, and of other issues."""
    return re.findall(r"\b[BPRSW]\d+\b|[\w-]+#\d+", fault.bug)


__all__ = ["FAULTS", "KNOWN_BUGS", "NOT_EXPRESSIBLE", "Fault", "bugs_of"]
