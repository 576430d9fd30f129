"""What a target says of itself, as plain data from the process that imports it to the one that judges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moeref_conformance.contract.api import Claims, Info, to_plain
from moeref_conformance.contract.checks import BadInput


class Described(Protocol):
    """Anything that says what a target is and claims: its facts, a dump, or the target itself."""

    @property
    def info(self) -> Info: ...
    @property
    def claims(self) -> Claims: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A target's info and claims, without the target."""

    info: Info
    claims: Claims

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Facts:
        """From what `as_plain` made of a target."""
        claims: dict[str, Any] = {
            name: frozenset(v) if isinstance(v, list) else v for name, v in plain["claims"].items()
        }
        return cls(info=Info(**plain["info"]), claims=Claims(**claims))


def as_plain(target: Described) -> dict[str, Any]:
    """`info` and `claims` as JSON has them. Raises BadInput for claims whose class is not `api.Claims` itself."""
    if type(target.claims) is not Claims:
        kind = type(target.claims).__qualname__
        raise BadInput(
            f"target {target.info.name!r}: its claims are a {kind}, a subclass of api.Claims. The kit judges by the "
            "fields of claims, in a process without the target: give an api.Claims with these fields"
        )
    plain: dict[str, Any] = json.loads(json.dumps({"info": to_plain(target.info), "claims": to_plain(target.claims)}))
    return plain
