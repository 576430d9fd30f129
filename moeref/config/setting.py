"""One setting: its value, and where the value comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: From the weakest: held by the class or object that is to be filled, moeref's own choice for RL, read from the Hugging
#: Face config or fixed by its architecture, decided by the layout, asked for as a field of MoEConfig or as an override,
#: and what Megatron makes of all of them when it is finalised.
Origin = Literal["provider default", "default", "hf", "layout", "field", "override", "derived"]


@dataclass(frozen=True)
class Setting:
    """One effective value and where it came from."""

    value: Any
    origin: Origin
    reason: str = ""
