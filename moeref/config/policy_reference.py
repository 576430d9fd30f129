"""Settings of policy and reference model: the same, except for declared differences."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moeref.config.effective import EffectiveSettings, plain, same
from moeref.config.errors import nearest, raise_all
from moeref.config.holder import held_by
from moeref.config.user_config import MoEConfig

#: Settings that only the trained model has.
_OF_THE_POLICY = frozenset(
    {"grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func"}
)


def for_reference(policy: MoEConfig, **declared: Any) -> MoEConfig:
    """The settings of the reference model: those of the policy with the `declared` changes."""
    return policy.with_kwargs(**declared)


def declared_differences(
    policy: object, reference: object, *, declared: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """The declared differences between the two: name to plain values (policy, reference).

    Both are EffectiveSettings, mappings, or objects with settings as attributes. Raises ConfigError with every
    undeclared difference, which includes a name that one of them lacks, and every declared name that neither has.
    """
    one, other = _values(policy), _values(reference)
    differ = {
        name: (one.get(name, "absent"), other.get(name, "absent"))
        for name in sorted(one.keys() | other.keys())
        if name not in _OF_THE_POLICY and (name not in one or name not in other or not same(one[name], other[name]))
    }
    problems = [
        f"{name} is {a!r} for the policy and {b!r} for the reference"
        for name, (a, b) in differ.items()
        if name not in declared
    ]
    everything = one.keys() | other.keys()
    problems += [f"declared {n!r} is no setting{nearest(n, everything)}" for n in declared if n not in everything]
    raise_all("policy and reference", problems)
    return differ


def _values(side: object) -> dict[str, Any]:
    values = side.values if isinstance(side, EffectiveSettings) else {n: s.value for n, s in held_by(side).items()}
    return {name: plain(value) for name, value in values.items()}
