"""What a user asks for: the first-class MoE fields, each unset or a value, and pass-through settings by name.

An unset field keeps the value of lower precedence (the provider's, or the Hugging Face config's). `False` and `None`
are values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from moeref.config.errors import ConfigError, nearest, raise_all


class Unset(enum.Enum):
    """The type of `UNSET`."""

    UNSET = "unset"

    def __bool__(self) -> bool:
        raise TypeError("UNSET is neither true nor false; compare with `is UNSET`")

    def __repr__(self) -> str:
        return "UNSET"


#: Not asked for. In YAML, where a schema may require every key, write the string `unset`.
UNSET = Unset.UNSET
_Unset = Literal[Unset.UNSET]

#: First-class fields and the types of their values besides None.
_TYPES: dict[str, tuple[type, ...]] = {
    "moe_token_dispatcher_type": (str,),
    "moe_router_load_balancing_type": (str, list),
    "moe_grouped_gemm": (bool,),
    "moe_router_score_function": (str,),
    "moe_router_enable_expert_bias": (bool,),
    "moe_flex_dispatcher_backend": (str,),
    "moe_enable_routing_replay": (bool,),
}
_THROUGH = "transformer_config_kwargs"


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Settings that the user asks for, under megatron-core's names in TransformerConfig.

    `transformer_config_kwargs` takes any name and has precedence over the fields. Raises ConfigError for a value whose
    type does not match the field.
    """

    moe_token_dispatcher_type: str | _Unset | None = UNSET
    moe_router_load_balancing_type: str | list[str] | _Unset | None = UNSET
    moe_grouped_gemm: bool | _Unset | None = UNSET
    moe_router_score_function: str | _Unset | None = UNSET
    moe_router_enable_expert_bias: bool | _Unset | None = UNSET
    moe_flex_dispatcher_backend: str | _Unset | None = UNSET
    moe_enable_routing_replay: bool | _Unset | None = UNSET
    transformer_config_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if value is UNSET or value is None:
                continue
            if not isinstance(value, types) or (isinstance(value, list) and not _is_texts(value)):
                kinds = " or ".join("list of str" if t is list else t.__name__ for t in types)
                problems.append(f"{name}={value!r} is no {kinds}")
        if not isinstance(self.transformer_config_kwargs, Mapping):
            problems.append(f"{_THROUGH}={self.transformer_config_kwargs!r} is no mapping")
        raise_all("MoEConfig", problems)
        through = {k: v for k, v in self.transformer_config_kwargs.items() if v is not UNSET}
        object.__setattr__(self, _THROUGH, through)

    @property
    def fields(self) -> dict[str, Any]:
        """The first-class fields that are set, by name."""
        return {name: value for name in _TYPES if (value := getattr(self, name)) is not UNSET}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> MoEConfig:
        """The settings in a mapping: parsed YAML, or an OmegaConf or Hydra config with resolvable interpolations.

        The string `unset` leaves a first-class field unset. Raises ConfigError for an unknown key (with the nearest
        name), a missing mandatory value (`???`), and a string with an unresolved interpolation (`${…}`).
        """
        names = [f.name for f in fields(cls)]
        problems: list[str] = []
        found: dict[str, Any] = {}
        for key in mapping:
            if key not in names:
                hint = nearest(str(key), names) or f"; any other setting of Megatron's goes into {_THROUGH}"
                problems.append(f"unknown key {key!r}{hint}")
                continue
            try:
                found[key] = _plain(mapping[key])
            except Exception as error:  # OmegaConf has its own exceptions for missing and unresolvable values
                problems.append(f"{key} cannot be read: {error}")
        for path, text in _texts(found):
            if text == "???":
                problems.append(f"{path} is mandatory and missing (???)")
            elif "${" in text:
                problems.append(
                    f"{path}={text!r} is an interpolation; resolve it, e.g. OmegaConf.to_container(…, resolve=True)"
                )
        raise_all("MoEConfig", problems)
        if found.get(_THROUGH, {}) is None:  # YAML's `transformer_config_kwargs:` without a value
            del found[_THROUGH]
        values: dict[str, Any] = {k: UNSET if isinstance(v, str) and v == UNSET.value else v for k, v in found.items()}
        return cls(**values)

    def with_kwargs(self, **changes: Any) -> MoEConfig:
        """These settings with `changes` to the pass-through settings."""
        given = {name: getattr(self, name) for name in _TYPES}
        return MoEConfig(**given, transformer_config_kwargs={**self.transformer_config_kwargs, **changes})


def _is_texts(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(v, str) for v in values)


def _plain(value: Any) -> Any:
    """`value` with its containers as dict and list: megatron-core tests `isinstance(…, list)`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [_plain(item) for item in value]
    return value


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{number}]")


__all__ = ["UNSET", "ConfigError", "MoEConfig", "Unset"]
