"""The preflight against megatron-core: random runs, each checked by the rules and constructed for real.

`python -m tests.upstream.preflight_cases CASES [BUILT]` draws that many runs with hypothesis, builds the layers of at
most BUILT of those that should work, prints the rates and exits with 1 for a false accept or an unexplained false
refusal, which hypothesis has shrunk. It runs in a process of its own: stand-ins for Transformer Engine and CUDA stay in
it.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "glm4_moe_lite", "qwen3_next")
MODULES = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    "x",
)
OFFLOADED = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "other")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", "aux")
TRUE = st.booleans()


def _lists(names: Iterable[str]) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(list(names)), max_size=3, unique=True)


#: Settings that meet one another, drawn together: each name with its values.
BUNDLES: tuple[dict[str, st.SearchStrategy[Any]], ...] = (
    {
        "recompute_granularity": st.sampled_from(["full", "selective", None]),
        "recompute_method": st.sampled_from(["uniform", "block", None]),
        "recompute_num_layers": st.sampled_from([1, 2, None]),
        "recompute_modules": st.none() | _lists(MODULES),
        "moe_layer_recompute": TRUE,
        "distribute_saved_activations": TRUE,
        "moe_grouped_gemm": TRUE,
        "moe_shared_expert_overlap": TRUE,
    },
    {
        "overlap_moe_expert_parallel_comm": st.just(True),
        "delay_wgrad_compute": TRUE,
        "ep_overlap_early_attn_memory_release": TRUE,
        "moe_shared_expert_overlap": TRUE,
        "recompute_granularity": st.sampled_from(["full", "selective", None]),
        "recompute_method": st.sampled_from(["uniform", None]),
        "recompute_modules": _lists(MODULES),
        "mtp_num_layers": st.sampled_from([None, 0, 1]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather"]),
    },
    {
        "fine_grained_activation_offloading": st.just(True),
        "offload_modules": _lists(OFFLOADED),
        "recompute_granularity": st.sampled_from(["selective", None]),
        "recompute_modules": _lists(MODULES),
    },
    {
        "moe_router_num_groups": st.sampled_from([1, 2, 3, 4, 5, None]),
        "moe_router_group_topk": st.sampled_from([0, 1, 2, 5, None]),
        "moe_router_topk": st.sampled_from([1, 2, 4]),
        "moe_router_score_function": st.sampled_from(["softmax", "sigmoid"]),
        "moe_router_enable_expert_bias": TRUE,
        "moe_router_pre_softmax": TRUE,
        "moe_router_load_balancing_type": st.sampled_from(LOSSES) | _lists(LOSSES).filter(bool),
        "moe_aux_loss_coeff": st.sampled_from([0.0, 0.1, [0.1], [0.1, 0.2]]),
        "moe_router_dtype": st.sampled_from(["fp32", "fp64", None]),
        "moe_router_fusion": TRUE,
    },
    {
        "fp8": st.sampled_from(["e4m3", "hybrid", None]),
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_param": TRUE,
        "fp4": st.sampled_from(["e2m1", None]),
        "fp4_param": TRUE,
        "first_last_layers_bf16": TRUE,
        "num_layers_at_start_in_bf16": st.integers(-1, 5),
        "num_layers_at_end_in_bf16": st.integers(-1, 5),
        "fp8_output_proj": TRUE,
        "moe_router_padding_for_quantization": TRUE,
        "recompute_modules": _lists(MODULES),
        "recompute_granularity": st.sampled_from(["selective", None]),
    },
    {
        "moe_expert_capacity_factor": st.sampled_from([-1.0, 0.5, 1.0, None]),
        "moe_pad_expert_input_to_capacity": TRUE,
        "moe_token_drop_policy": st.sampled_from(["probs", "position"]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather", "flex"]),
        "moe_flex_dispatcher_backend": st.sampled_from(["deepep", "hybridep"]),
        "moe_enable_deepep": TRUE,
        "variable_seq_lengths": TRUE,
        "moe_permute_fusion": TRUE,
        "moe_router_load_balancing_type": st.sampled_from(LOSSES),
    },
    {
        "apply_rope_fusion": TRUE,
        "rotary_interleaved": TRUE,
        "cache_mla_latents": TRUE,
        "fused_single_qkv_rope": TRUE,
        "attention_backend": st.sampled_from(["flash", "fused", "auto", "flesh"]),
        "cp_comm_type": st.sampled_from(["p2p", "a2a", ["p2p"], ["p2p"] * 4]),
        "bias_activation_fusion": TRUE,
        "use_te_activation_func": TRUE,
        "activation_func_fp8_input_store": TRUE,
    },
    {
        "defer_embedding_wgrad_compute": TRUE,
        "gradient_accumulation_fusion": TRUE,
        "wgrad_deferral_limit": st.integers(-1, 1),
        "overlap_p2p_comm": TRUE,
        "batch_p2p_comm": TRUE,
        "overlap_p2p_comm_warmup_flush": TRUE,
        "fp32_residual_connection": TRUE,
        "fp16": TRUE,
    },
)


@dataclass(frozen=True)
class Run:
    """One run: a small model of a family, a layout, options of `check`, and settings."""

    family: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@functools.cache
def _typed(core: str) -> st.SearchStrategy[tuple[str, Any]]:
    """Any field with a type that is known, and a value of it."""
    from moeref.config.core import known_fields

    values = {"bool": TRUE, "int": st.integers(0, 4), "float": st.sampled_from([0.0, 0.5, 1.0])}
    pairs = [
        st.tuples(st.just(name), st.sampled_from(known["choices"]) if "choices" in known else values[known["type"]])
        for name, known in known_fields(core, mla=True).items()
        if {"type", "choices"} & known.keys()
    ]
    return st.one_of(pairs)


@st.composite
def runs(draw: st.DrawFn, core: str) -> Run:
    """Runs whose settings are some of a bundle and, at times, any others."""
    sizes = {"tp": draw(st.sampled_from([1, 2, 4])), "pp": draw(st.sampled_from([1, 2])), "ep": 1, "cp": 1}
    sizes |= {"ep": draw(st.sampled_from([1, 2, 4])), "cp": draw(st.sampled_from([1, 1, 2]))}
    sizes["etp"] = draw(st.sampled_from([1, sizes["tp"]]))
    if sizes["pp"] > 1:
        sizes["vpp"] = draw(st.sampled_from([1, 2]))
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "kernels": st.just("te"),
                "experts": st.sampled_from(["sequential", "grouped"]),
                "replay": st.just("R2"),
                "precision": st.sampled_from(["fp32", "bf16", "delayed", "blockwise"]),
            },
        )
    )
    bundle = draw(st.sampled_from(BUNDLES))
    names = draw(st.lists(st.sampled_from(sorted(bundle)), max_size=5, unique=True))
    asked = {name: draw(bundle[name]) for name in names}
    asked |= dict(draw(st.lists(_typed(core), max_size=1)))
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    return Run(draw(st.sampled_from(FAMILIES)), text, options, asked)


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
    from moeref.config import core_rules, rules
    from moeref.dispatcher import table

    later = {rule.id: rule.text for rule in table.RULES if rule.stage != "config" or rule.stricter}
    own = {rule.id: rule.text for rule in (*rules.RULES, *core_rules.RULES) if "__post_init__" not in rule.source}
    for found in re.findall(r"\[([a-z0-9-]+)\]", text):
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
        elif report.verdict == "refused" and not {"layout", "bridge"} & {p.about for p in report.problems}:
            self._refused(report, run)

    def _accepted(self, report: Any, run: Run) -> None:
        from moeref import megatron

        try:
            megatron.transformer_config(report.record)
        except Exception as error:
            raise AssertionError(f"false accept: {run}: {type(error).__name__}: {error}") from error
        on_cpu = report.record.kernels == "torch" and report.record.dispatcher in ("alltoall", "allgather")
        if on_cpu and self.count["built"] < self.build:
            self.count["built"] += 1
            self._built(report.record, run)

    def _built(self, record: Any, run: Run) -> None:
        from moeref import megatron
        from tests.upstream.built_from_record import world

        try:
            with world(record.layout, 0):
                megatron.build(record, 0)
        except Exception as error:
            raise AssertionError(f"false accept, layers: {run}: {type(error).__name__}: {error}") from error

    def _refused(self, report: Any, run: Run) -> None:
        self.count["refused and constructed"] += 1
        if _refusal(report, run, self.core):
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
    from moeref.layout import Layout
    from moeref.megatron import construct
    from moeref.record import Draft, Options

    options = Options(core=core, **run.options)
    draft = Draft(report.model, Layout.parse(run.layout), MoEConfig(transformer_config_kwargs=run.settings), options)
    values = {"moe_token_dispatcher_type": "alltoall", **draft._given}
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
