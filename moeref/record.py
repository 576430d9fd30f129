"""The record of a run: everything that decides how one of its models is built.

`moeref.check` makes a record. `moeref.megatron.build` takes only the record, a rank and a device, so it builds what was
checked.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, cast

from moeref import dispatcher, seeds
from moeref.bridge import VOCAB_DIVISIBLE_BY
from moeref.config import ConfigError, EffectiveSettings, MoEConfig, Origin, Setting, resolve, transformer_settings
from moeref.config.core import transformer_config
from moeref.config.effective import same
from moeref.config.errors import nearest, raise_all
from moeref.config.holder import names_of, unfit
from moeref.config.precision import PRECISIONS, recipe
from moeref.config.rules import run_contradictions
from moeref.config.settings import ATTRIBUTES
from moeref.dispatcher import AUTO, Choice, DispatcherError, Environment, Setup, setup_of
from moeref.dispatcher.setup import CORE, PACKAGES, minor_version
from moeref.dtypes import DTYPES, NAMES
from moeref.families import Model, SpecNames
from moeref.layout import Layout

Kernels = Literal["torch", "te"]
Replay = Literal["off", "R2", "R3"]
#: Allowed values of options. None means that the value follows from the rest of the run.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "dispatcher": (AUTO, *Choice),
    "precision": (*PRECISIONS, None),
    "replay": ("off", "R2", "R3"),
    "kernels": ("torch", "te", None),
    "norms": ("separate", "fused", None),
    "experts": ("sequential", "grouped", None),
}
_DISPATCHER, _REPLAY, _GROUPED = "moe_token_dispatcher_type", "moe_enable_routing_replay", "moe_grouped_gemm"
_MTP = "mtp_num_layers"
#: Off on every device. On a GPU masked softmax and gradient accumulation would use apex's kernels, and the other
#: fusions would compute differently from a CPU. Batched point-to-point calls compute PP2·VPP2 wrongly.
_OFF = (
    *("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "deallocate_pipeline_outputs", "batch_p2p_comm"),
)


@cache
def installed_core() -> str:
    """The installed version of megatron-core; CORE if there is none."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a run may be checked without megatron-core
        return CORE


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run asks for besides Megatron's settings.

    dispatcher: `auto`, or a choice such as `flex-deepep` (or `flex:deepep`).
    precision: one of PRECISIONS; None for the checkpoint's.
    kernels: plain torch modules or Transformer Engine's; None takes `te` if the precision needs it.
    norms: `separate` modules, or `fused` into the linears; None follows the kernels.
    experts: `sequential` or `grouped` modules; None follows `moe_grouped_gemm`.
    divisible_by: the vocabulary is padded to a multiple of this times TP.
    core: the version of megatron-core; "" for the installed one.

    Raises ConfigError for any other value.
    """

    dispatcher: str = AUTO
    precision: str | None = None
    replay: str = "off"
    kernels: str | None = None
    norms: str | None = None
    experts: str | None = None
    seed: int = 1234
    seed_formula: str = "megatron"
    seed_per_dp: bool = False
    divisible_by: int = VOCAB_DIVISIBLE_BY
    core: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatcher", str(self.dispatcher).replace(":", "-"))
        object.__setattr__(self, "core", self.core or installed_core())
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                offered = ", ".join(filter(None, allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r} is none of {offered}")
        if type(self.divisible_by) is not int or self.divisible_by < 1:
            raise ConfigError(f"divisible_by={self.divisible_by!r} must be an integer and at least 1")
        try:
            self.environment  # noqa: B018
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def environment(self) -> Environment:
        """A machine with a GPU and every package. The preflight lists what a dispatcher needs of them."""
        return Environment(core=self.core, packages=frozenset(PACKAGES), gpu=True)

    @property
    def settings(self) -> dict[str, Setting]:
        """These options as megatron-core's settings, without options that have their default."""
        plain = self.precision in (None, "bf16")
        precision = {} if plain else PRECISIONS[str(self.precision)]
        found = {name: Setting(value, "field", f"precision {self.precision}") for name, value in precision.items()}
        if self.dispatcher != AUTO:
            found |= settings_of(Choice(self.dispatcher), "field", f"dispatcher {self.dispatcher}")
        if self.replay != "off":
            found[_REPLAY] = Setting(True, "field", f"replay {self.replay}")
        return found


def settings_of(choice: Choice, origin: Origin, why: str) -> dict[str, Setting]:
    """The settings of a dispatcher; those of value None, such as the backend without flex, are left out."""
    return {n: Setting(v, origin, why) for n, v in dispatcher.settings(choice).items() if v is not None}


@dataclass(frozen=True)
class Seeds:
    """The arguments from which `moeref.seeds.rank_seeds` computes the seeds of every rank."""

    seed: int
    formula: seeds.Formula = "megatron"
    per_dp: bool = False

    def of_rank(self, layout: Layout, rank: int) -> seeds.RankSeeds:
        """The seeds of one rank."""
        return seeds.rank_seeds(layout, rank, self.seed, per_dp=self.per_dp, formula=self.formula)


@dataclass(frozen=True, kw_only=True)
class Record:
    """How one model of a run is built. Made by `Record.of`, or by `moeref.check`, which reports every problem.

    Raises ConfigError for settings that contradict the other fields.
    """

    model: Model
    layout: Layout
    settings: EffectiveSettings
    kernels: Kernels
    names: SpecNames
    replay: Replay
    seeds: Seeds
    divisible_by: int
    core: str

    @classmethod
    def of(cls, model: Model, layout: Layout, asked: MoEConfig | None = None, options: Options | None = None) -> Record:
        """The record of `model` under `layout` with these settings and options.

        Raises ConfigError, LayoutError, DispatcherError or SeedError if they cannot be combined.
        """
        draft = Draft(model, layout, asked or MoEConfig(), options or Options())
        draft.check_names()
        return draft.record(draft.resolve({} if draft.names_dispatcher else draft.automatic()))

    def __post_init__(self) -> None:
        facts = {
            "kernels": self.kernels,
            "norms": self.names.norms,
            "experts": self.names.experts,
            "replay": self.replay,
            "core": minor_version(self.core),
            "parameters": DTYPES[self.model.param_dtype].precision,
        }
        raise_all(f"{self.model.family}", run_contradictions(self.settings.by_name, self.layout, facts))

    @property
    def dispatcher(self) -> Choice:
        """The dispatcher that the settings choose."""
        return dispatcher.read(self.settings.values)

    @property
    def precision(self) -> str:
        """One of PRECISIONS: the recipe of quantised GEMMs, or else the precision of the parameters."""
        return recipe(self.settings.values) or DTYPES[self.model.param_dtype].precision


@dataclass(frozen=True)
class Draft:
    """A run before its settings are resolved. `moeref.check` calls the steps one by one, `Record.of` all of them.

    `model` has as many MTP layers as the run: other than the config says if `asked` says so and files have them.
    """

    model: Model
    layout: Layout
    asked: MoEConfig
    options: Options

    def __post_init__(self) -> None:
        wanted = self._asked.get(_MTP, self.model.mtp_layers) or 0
        if type(wanted) is int and 0 <= wanted <= self.model.most_mtp_layers and wanted != self.model.mtp_layers:
            object.__setattr__(self, "model", self.model.with_mtp(wanted))

    @cached_property
    def _asked(self) -> dict[str, Any]:
        return {**self.asked.fields, **self.asked.transformer_config_kwargs}

    @cached_property
    def _wanted(self) -> dict[str, Any]:
        """The values that options or `asked` set."""
        return {**{name: setting.value for name, setting in self.options.settings.items()}, **self._asked}

    @property
    def kernels(self) -> Kernels:
        """The option, or else `te` for a quantised precision and `torch` for any other."""
        quantised = self._wanted.get("fp8") or self._wanted.get("fp4")
        return cast(Kernels, self.options.kernels or ("te" if quantised else "torch"))

    @property
    def names(self) -> SpecNames:
        """Which of Megatron's names the parameters have."""
        norms = self.options.norms or ("fused" if self.kernels == "te" else "separate")
        experts = self.options.experts or ("grouped" if self._wanted.get(_GROUPED) else "sequential")
        # The transformer layer inside an MTP layer has another name in megatron-core 0.16.
        mtp = "transformer_layer" if self.options.environment.minor == "0.16" else "mtp_model_layer"
        return SpecNames(norms=norms, experts=experts, mtp=mtp)  # type: ignore[arg-type]

    @cached_property
    def _more(self) -> dict[str, Setting]:
        """moeref's settings besides those of `transformer_settings`, and the settings of the options."""
        # The checkpoint's precision is a default, which options and `asked` may replace.
        plain = PRECISIONS[DTYPES[self.model.param_dtype].precision or "bf16"]
        own = {name: Setting(value, "default", "the checkpoint's") for name, value in plain.items()}
        own |= {name: Setting(False, "default") for name in _OFF}
        # In the interleaved schedule NCCL and gloo order the chunks alike only with overlapped, unbatched calls.
        own["overlap_p2p_comm"] = Setting(self.layout.vpp > 1, "default")
        if self.kernels == "te":
            experts = self.names.experts
            own[_GROUPED] = Setting(experts == "grouped", "default", f"experts={experts!r}")
        return {**own, **self.options.settings}

    @property
    def own(self) -> frozenset[str]:
        """Names of the settings that have a value of moeref's, before the user asks for anything."""
        return frozenset({**transformer_settings(self.model, self.layout), **self._more})

    @property
    def provider(self) -> type:
        """A dataclass with the fields of TransformerConfig in this version of megatron-core."""
        return transformer_config(self.options.core, mla=self.model.mla is not None)

    def check_names(self) -> None:
        """Raise ConfigError for names that this version of megatron-core lacks, values of another type, and settings
        that contradict an option."""
        kind, said = self.provider, self.options.settings
        known = (names_of(kind) or frozenset()) | ATTRIBUTES
        problems = [*self._other_dtype()]
        for name, value in self._asked.items():
            if name not in known:
                problems.append(f"megatron-core {self.options.core} has no {name}{nearest(name, known)}")
            elif wrong := unfit(kind, name, value):
                problems.append(wrong)
            elif name in said and not same(said[name].value, value):
                reason, other = said[name].reason, said[name].value
                problems.append(f"{name}={value!r} is asked for, and {reason} says {other!r}; say one of them")
        raise_all(f"settings of {self.model.family}", problems)

    def _other_dtype(self) -> Iterator[str]:
        precision, dtype = self.options.precision, self.model.param_dtype
        needed = None if precision is None else NAMES.get(precision, "bfloat16")
        if needed not in (None, dtype):
            yield f"precision={precision!r} needs parameters in {needed}, and the model is read in {dtype}"

    @cached_property
    def _given(self) -> dict[str, Any]:
        """Every value except Megatron's own defaults."""
        own = {**transformer_settings(self.model, self.layout), **self._more}
        return {**{name: setting.value for name, setting in own.items()}, **self._asked}

    @property
    def names_dispatcher(self) -> bool:
        """Whether options or settings name a dispatcher; otherwise `automatic` chooses one."""
        return _DISPATCHER in self._given

    @property
    def setup(self) -> Setup:
        """The setup to look up in the table of dispatchers. Raises DispatcherError for values that it does not know."""
        return setup_of(self._given, self.layout, precision=DTYPES[self.model.param_dtype].precision or "bf16")

    def automatic(self) -> dict[str, Setting]:
        """The settings of the dispatcher that `auto` selects.

        If no dispatcher can be used, raises ConfigError if the settings contradict one another, else DispatcherError.
        """
        try:
            selection = dispatcher.select(AUTO, self.setup, self.options.environment)
        except DispatcherError:
            self.resolve({})
            raise
        return settings_of(selection.choice, "derived", selection.why)

    def resolve(self, chosen: Mapping[str, Setting]) -> EffectiveSettings:
        """The effective settings with `chosen`, those of the automatic dispatcher. Raises as `config.resolve` does."""
        return resolve(self.model, self.layout, self.asked, provider=self.provider, more={**self._more, **chosen})

    def record(self, settings: EffectiveSettings) -> Record:
        """The record with these settings. Raises ConfigError for contradictions and SeedError for refused seeds."""
        options = self.options
        formula = cast(seeds.Formula, options.seed_formula)
        seeds.check(self.layout, options.seed, per_dp=options.seed_per_dp, formula=formula)
        return Record(
            model=self.model,
            layout=self.layout,
            settings=settings,
            kernels=self.kernels,
            names=self.names,
            replay=cast(Replay, options.replay),
            seeds=Seeds(options.seed, formula, options.seed_per_dp),
            divisible_by=options.divisible_by,
            core=options.core,
        )
