"""The preflight against megatron-core: random runs, each checked by the rules and constructed for real.

`python -m tests.upstream.preflight_cases CASES [BUILT]` draws that many runs with hypothesis, builds the layers of at
most BUILT of those that should work, prints the rates and exits with 1 for a false accept or an unexplained false
refusal, which hypothesis has shrunk. It runs in a process of its own: stand-ins for Transformer Engine and CUDA stay in
it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, given, settings

from tests.upstream.preflight_draws import Run, runs
from tests.upstream.preflight_layouts import refusal_of_layout, stages_of

#: What a refusal of the preflight says besides a rule's id, and why Megatron may accept it.
EXPLAINED = {
    r"whose weights then do not fit": "Megatron reads no checkpoint when it makes a config",
    r"GEMMs take widths in multiples": "the GEMM refuses, in the first step",
    r"no such setup|both at least 1": "the router fails, in the first step",
    r"layout says": "names, groups and checkpoints follow the layout",
    r"seed": "Megatron seeds without looking",
}


def explained(text: str) -> str:
    """Why moeref refuses what megatron-core's config accepts; "" if nothing explains it."""
    from moeref.config import core_rules, rules, step_rules
    from moeref.dispatcher import table

    later = {rule.id: rule.text for rule in table.RULES if rule.stage != "config" or rule.stricter}
    own = {
        rule.id: rule.text
        for rule in (*rules.RULES, *rules.LAYOUT_RULES, *core_rules.RULES, *step_rules.RULES)
        if "__post_init__" not in rule.source
    }
    for found in re.findall(r"\[([a-z0-9.-]+)\]", text):
        if found in later or found in own:
            return found
    return next((why for said, why in EXPLAINED.items() if re.search(said, text)), "")


@dataclass
class Compared:
    """Rates of what was compared so far."""

    core: str
    build: int = 0
    count: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def compare(self, run: Run) -> None:
        """Judge one run by rules and by construction. Raises AssertionError where they differ without a reason."""
        from moeref.check import CheckError, check
        from moeref.config import MoEConfig
        from tests.unit.models import CONFIGS

        asked = MoEConfig(transformer_config_kwargs=run.settings)
        self.count["runs"] += 1
        try:
            report = check(CONFIGS[run.family], run.layout, asked=asked, core=self.core, verify=False, **run.options)
        except CheckError:
            self.count["bad input"] += 1
            return
        self.count[report.verdict] += 1
        if report.verdict == "works":
            self._accepted(report, run)
        elif report.verdict == "refused":
            self._refused(report, run)

    def _accepted(self, report: Any, run: Run) -> None:
        from moeref import megatron

        try:
            config, _ = megatron.transformer_config(report.record)
            stages = stages_of(config)
        except Exception as error:
            raise AssertionError(f"false accept: {run}: {type(error).__name__}: {error}") from error
        ours = {(stage.pp, stage.vp): stage.layers for stage in report.stages}
        assert ours == stages, f"wrong stages: {run}: {ours} are {stages}"
        on_cpu = report.record.kernels == "torch" and not report.needs
        if on_cpu and self.count["built"] < self.build:
            self.count["built"] += 1
            self._built(report.record, run)

    def _built(self, record: Any, run: Run) -> None:
        from moeref import megatron
        from tests.upstream.built_from_record import world

        try:
            # A model leaves its attention backend in variables, and refuses those of another.
            with world(record.layout, 0), mock.patch.dict(os.environ):
                megatron.build(record, 0)
        except Exception as error:
            raise AssertionError(f"false accept, layers: {run}: {type(error).__name__}: {error}") from error

    def _refused(self, report: Any, run: Run) -> None:
        self.count["refused and constructed"] += 1
        if refusal_of_layout(run.layout, report.model) or _refusal(report, run, self.core):
            return
        self.count["false refusals"] += 1
        reasons = [explained(f"{p.text}; {p.fix}") for p in report.problems]
        assert any(reasons), f"false refusal without a reason: {run}: {report.problems}"
        self.refusals[next(filter(None, reasons))] += 1

    def rates(self) -> str:
        """The rates as lines of text."""
        refusals = "".join(f"\n  {number:6} {reason}" for reason, number in self.refusals.most_common())
        numbers = ", ".join(f"{name} {number}" for name, number in self.count.items())
        return f"megatron-core {self.core}: {numbers}; false accepts 0\nfalse refusals by reason:{refusals or ' none'}"


def _refusal(report: Any, run: Run, core: str) -> str:
    """What megatron-core's own class says to the settings of a run that moeref refuses; "" if it accepts them."""
    from moeref.config import MoEConfig
    from moeref.config.settings import ATTRIBUTES
    from moeref.layout import Layout, LayoutError
    from moeref.megatron import construct
    from moeref.record import Draft, Options

    options = Options(core=core, **run.options)
    try:
        layout = Layout.parse(run.layout)
        draft = Draft(report.model, layout, MoEConfig(transformer_config_kwargs=run.settings), options)
        values = {"moe_token_dispatcher_type": "alltoall", **draft._given}
    except LayoutError:  # moeref has no settings for this layout, which Megatron itself takes
        return ""
    request = {
        "kind": "MLATransformerConfig" if report.model.mla else "TransformerConfig",
        "values": {name: value for name, value in values.items() if name not in ATTRIBUTES},
        "activation": "quick_gelu" if report.model.clamp else "silu",
        "dtype": report.model.param_dtype,
    }
    try:
        return str(construct.construct(request)["refusal"])
    except KeyError as error:  # no such attention backend
        return str(error)


def main(cases: int, built: int = 0, derandomize: bool = False, shrink: bool = True) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from moeref_conformance.worlds import cpu

    cpu.install("cpu", "torch")
    import megatron.core

    cpu.install("cpu", "megatron")
    from moeref.megatron import construct

    construct.stand_in()
    compared = Compared(megatron.core.__version__.partition("+")[0], built)
    more = {"phases": (Phase.generate, *([Phase.shrink] if shrink else [])), "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=cases, database=None, deadline=None, derandomize=derandomize, **more)
    @given(run=runs(compared.core))
    def compare(run: Run) -> None:
        compared.compare(run)

    compare()
    print(compared.rates())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
