"""The precedence of settings, from a provider's values to the effective ones. Replaced values are kept.

provider default < default < hf < layout < field < override < derived

The values of a provider *object* or mapping take precedence over moeref's `default`s; the defaults of a *class* do not.
A setting that the layout decides cannot be asked for with another value, because names, groups and checkpoints follow
the same layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeref.config.effective import EffectiveSettings, same
from moeref.config.errors import ConfigError, nearest, raise_all
from moeref.config.holder import held_by, names_of, unfit
from moeref.config.rules import contradictions, derive
from moeref.config.setting import Origin, Setting
from moeref.config.settings import ATTRIBUTES, transformer_settings
from moeref.config.user_config import MoEConfig
from moeref.families.model import Model
from moeref.layout import Layout


def resolve(
    model: Model,
    layout: Layout,
    asked: MoEConfig | None = None,
    *,
    provider: object | Mapping[str, Any] | None = None,
    more: Mapping[str, Setting] | None = None,
) -> EffectiveSettings:
    """The effective settings of `model` under `layout` when the user asks for `asked`.

    provider: gives the names, the choices and the weakest values: the class TransformerConfig, a megatron-bridge
    provider or another object with such attributes, or a mapping of values. Without one, pass-through names are
    `unchecked` until `apply`. more: further settings of any origin; `asked` takes precedence over them.

    Raises ConfigError with all problems: unknown names (with the nearest), values that do not fit, contradictions.
    Raises LayoutError for a layout under which the model cannot be computed.
    """
    asked = asked or MoEConfig()
    known = names_of(provider)
    known = known and known | ATTRIBUTES
    trails = {name: (setting,) for name, setting in held_by(provider).items()}
    held = set() if isinstance(provider, type) else set(trails)

    def put(name: str, setting: Setting) -> None:
        trails[name] = (*trails.get(name, ()), setting)

    own = {**transformer_settings(model, layout), **_beyond_transformer(model, known), **(more or {})}
    problems = []
    for name, setting in own.items():
        if setting.origin == "default" and (name in held or (known is not None and name not in known)):
            continue
        if known is not None and name not in known:
            problems.append(f"{_title(provider)} has no {name}, which {model.family} needs{nearest(name, known)}")
        put(name, setting)
    from_layout = {name: setting.value for name, setting in own.items() if setting.origin == "layout"}
    levels: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("field", asked.fields),
        ("override", asked.transformer_config_kwargs),
    )
    for origin, given in levels:
        for name, value in given.items():
            if known is not None and name not in known:
                problems.append(f"{_title(provider)} has no {name}{nearest(name, known)}")
                continue
            if wrong := unfit(provider, name, value):
                problems.append(wrong)
            problems += _against_layout(name, value, from_layout, layout)
            over = "transformer_config_kwargs wins over the field" if (origin, name) in _fields(asked) else ""
            put(name, Setting(value, origin, over))
    effective = {name: trail[-1] for name, trail in trails.items()}
    derived = derive(effective, layout)
    problems += contradictions({**effective, **derived}, layout)
    raise_all(f"settings of {model.family} under {layout.text}", problems)
    for name, setting in derived.items():
        put(name, setting)
    unchecked = tuple(asked.transformer_config_kwargs) if known is None else ()
    return EffectiveSettings(asked, trails, tuple(n for n in unchecked if n not in own))


def _fields(asked: MoEConfig) -> set[tuple[str, str]]:
    return {("override", name) for name in asked.fields}


def _against_layout(name: str, value: Any, from_layout: Mapping[str, Any], layout: Layout) -> list[str]:
    """The problem if `value` is not what the layout says; else an empty list.

    This is one value said twice, not a combination of settings, so no table of `rules` has it.
    """
    if name not in from_layout or _agrees(name, value, from_layout[name], layout):
        return []
    return [f"{name}={value!r}, but the layout says {from_layout[name]!r}; change the layout instead"]


def _agrees(name: str, value: Any, from_layout: Any, layout: Layout) -> bool:
    if same(value, from_layout) or name == "sequence_parallel":  # checked by the table of dispatchers
        return True
    # megatron-core replaces an ETP of None by tp, and reads the number of virtual stages from a layout string.
    if name == "expert_tensor_parallel_size":
        return value is None and layout.etp == layout.tp
    return name == "virtual_pipeline_model_parallel_size" and layout.vpp > 1 and same(value, layout.vpp)


def _beyond_transformer(model: Model, known: frozenset[str] | None) -> dict[str, Setting]:
    """Arguments of GPTModel that are not fields of TransformerConfig; providers have them."""
    values = {
        "rotary_base": model.rope_theta,
        "rotary_percent": model.rotary_percent,
        "share_embeddings_and_output_weights": model.tied,
    }
    held = known if known is not None and "share_embeddings_and_output_weights" in known else frozenset()
    return {name: Setting(value, "hf") for name, value in values.items() if name in held}


def _title(holder: object) -> str:
    return holder.__name__ if isinstance(holder, type) else type(holder).__name__


__all__ = ["ConfigError", "resolve"]
