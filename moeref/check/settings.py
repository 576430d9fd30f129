"""Owns the part of the preflight that is settings: what Megatron is given, from which dispatcher on.

The preflight's own options become settings like any others, and the dispatcher is judged by what is effective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeref.check.report import CheckError, Problem, Report
from moeref.config import ConfigError, MoEConfig, Origin, Setting, resolve, transformer_settings
from moeref.config.core import transformer_config
from moeref.config.effective import same
from moeref.config.errors import nearest
from moeref.config.holder import names_of, unfit
from moeref.config.precision import PRECISIONS
from moeref.config.settings import ATTRIBUTES
from moeref.dispatcher import AUTO, Choice, DispatcherError, Environment, Setup, refusals, select, setup_of
from moeref.dispatcher import settings as of_choice
from moeref.dispatcher.setup import PACKAGES
from moeref.families import Model
from moeref.layout import Layout, LayoutError

REPLAY = ("off", "R2", "R3")
_PACKAGES = {
    "deep_ep": "the package deep_ep",
    "hybrid_ep": "deep_ep's hybrid-ep branch",
    "transformer_engine": "Transformer Engine",
}
_DISPATCHER, _REPLAY = "moe_token_dispatcher_type", "moe_enable_routing_replay"
#: Settings that decide the shapes of weights: with other values than the model's its checkpoint does not fit.
_SHAPES = frozenset(
    {
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "gated_linear_unit"),
        *("multi_latent_attention", "attention_output_gate", "linear_num_key_heads", "linear_num_value_heads"),
    }
)


@dataclass(frozen=True)
class Options:
    """What the preflight itself is asked for, beside the settings. Raises CheckError for a value that means nothing."""

    dispatcher: str = AUTO
    precision: str = "bf16"
    replay: str = "off"
    core: str = "0.19.2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatcher", str(self.dispatcher).replace(":", "-"))
        for name, allowed in (("precision", tuple(PRECISIONS)), ("replay", REPLAY), ("dispatcher", (AUTO, *Choice))):
            if getattr(self, name) not in allowed:
                raise CheckError(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}")
        try:
            self.environment  # noqa: B018
        except ValueError as error:
            raise CheckError(str(error)) from error

    @property
    def environment(self) -> Environment:
        """A GPU and all packages are taken to be there; what a dispatcher needs of them is told."""
        return Environment(core=self.core, packages=frozenset(PACKAGES), gpu=True)

    @property
    def settings(self) -> dict[str, Setting]:
        """What these options say in megatron-core's names; nothing that is left at its default."""
        found = {name: Setting(v, "field", f"precision {self.precision}") for name, v in self._precision.items()}
        if self.dispatcher != AUTO:
            found |= _chosen(Choice(self.dispatcher), "field", f"dispatcher {self.dispatcher}")
        if self.replay != "off":
            found[_REPLAY] = Setting(True, "field", f"replay {self.replay}")
        return found

    @property
    def _precision(self) -> dict[str, Any]:
        return {} if self.precision == "bf16" else PRECISIONS[self.precision]


def understood(model: Model, asked: MoEConfig, options: Options) -> None:
    """Raises CheckError for names that this version of megatron-core lacks, values that fit no such name, and settings
    that say otherwise than an option does."""
    kind = transformer_config(options.core, mla=model.mla is not None)
    known = (names_of(kind) or frozenset()) | ATTRIBUTES
    problems = []
    for name, value in _given(asked).items():
        said = options.settings.get(name)
        if name not in known:
            problems.append(f"megatron-core {options.core} has no {name}{nearest(name, known)}")
        elif wrong := unfit(kind, name, value):
            problems.append(wrong)
        elif said is not None and not same(said.value, value):
            problems.append(f"{name}={value!r} is asked for, and {said.reason} says {said.value!r}; say one of them")
    if problems:
        raise CheckError("; ".join(problems))


def settled(
    report: Report, layout: Layout, asked: MoEConfig, options: Options, problems: list[Problem], notes: list[str]
) -> Report:
    """The report with the dispatcher and the record of effective settings; what is wrong goes to `problems`."""
    model, said = report.model, options.settings
    own = PRECISIONS["bf16"]  # nobody asked for it, and it is what checkpoints are in
    more = {**{n: Setting(v, "default", "the checkpoint's") for n, v in own.items() if n not in said}, **said}
    refused: tuple[str, ...] = ()
    try:
        values = {n: s.value for n, s in (*transformer_settings(model, layout).items(), *more.items())}
        given = {**values, **_given(asked)}
        setup = setup_of(given, layout, precision="fp32" if options.precision == "fp32" else "bf16")
        chosen, report, refused = _dispatcher(report, setup, _DISPATCHER in given, options, problems)
        kind = transformer_config(options.core, mla=model.mla is not None)
        record = resolve(model, layout, asked, provider=kind, more={**more, **chosen})
    except DispatcherError as error:
        problems.append(Problem("config", *_split(str(error))))
        return report
    except LayoutError as error:
        if str(error) not in {problem.text for problem in problems}:
            problems.append(Problem("layout", str(error)))
        return report
    except ConfigError as error:
        for text in error.problems:
            if not text.endswith(refused):
                problems.append(Problem("config", *_split(text)))
        return report
    _of_the_checkpoint(record.trails, problems, notes)
    return replace(report, record=record)


def recipe(report: Report, options: Options) -> str | None:
    """The recipe of quantised GEMMs in the effective settings; None in high precision."""
    values: Mapping[str, Any] = report.record.values if report.record else PRECISIONS[options.precision]
    if values.get("fp8"):
        return str(values["fp8_recipe"])
    return str(values.get("fp4_recipe", "nvfp4")) if values.get("fp4") else None


def _given(asked: MoEConfig) -> dict[str, Any]:
    return {**asked.fields, **asked.transformer_config_kwargs}


def _dispatcher(
    report: Report, setup: Setup, named: bool, options: Options, problems: list[Problem]
) -> tuple[dict[str, Setting], Report, tuple[str, ...]]:
    """Settings of an automatic choice, the report with the dispatcher, and the ends of refusals already told."""
    there, why, chosen = options.environment, "asked for", {}
    if not named:
        try:
            selection = select(AUTO, setup, there)
        except DispatcherError as error:
            problems.append(Problem("dispatcher", str(error)))
            return {}, report, ()
        choice, why = selection.choice, selection.why
        setup = replace(setup, dispatcher=choice.dispatcher, backend=choice.backend)
        chosen = _chosen(choice, "derived", why)
    found = refusals(setup, there)
    problems += [Problem("dispatcher", f"{setup.choice or 'flex'}: {r.text} [{r.rule}]", r.fix) for r in found]
    if setup.choice is not None:
        report = replace(report, dispatcher=str(setup.choice), dispatcher_why=why)
    if not found:
        report = replace(report, needs=_needs(setup, there))
    return chosen, report, tuple(f"[{refusal.rule}]" for refusal in found)


def _chosen(choice: Choice, origin: Origin, why: str) -> dict[str, Setting]:
    """The settings of a choice; without flex there is no backend to ask for."""
    return {name: Setting(value, origin, why) for name, value in of_choice(choice).items() if value is not None}


def _needs(setup: Setup, environment: Environment) -> tuple[str, ...]:
    """What the machine has to have: what the table refuses to do without."""
    without = {name: replace(environment, packages=environment.packages - {name}) for name in PACKAGES}
    found = [said for name, said in _PACKAGES.items() if refusals(setup, without[name])]
    return (*found, *(("a GPU",) if refusals(setup, replace(environment, gpu=False)) else ()))


def _of_the_checkpoint(trails: Mapping[str, tuple[Setting, ...]], problems: list[Problem], notes: list[str]) -> None:
    """Settings that replace what the model's config says: its weights may not fit any more."""
    for name, trail in trails.items():
        theirs = next((setting.value for setting in trail if setting.origin == "hf"), trail[-1].value)
        if not same(theirs, trail[-1].value):
            text = f"{name}={trail[-1].value!r} replaces {theirs!r} of the model's own config"
            if name in _SHAPES:
                problems.append(Problem("config", f"{text}, whose weights then do not fit", "give the model's config"))
            else:
                notes.append(text)


def _split(text: str) -> tuple[str, str]:
    """What is wrong, and what to do: they are told with a semicolon between."""
    wrong, _, fix = text.partition("; ")
    return wrong, fix
