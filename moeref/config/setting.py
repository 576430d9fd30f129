"""One setting: its value, and where the value comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: From the weakest: the value of the class or object that is filled; moeref's choice for RL; the Hugging Face config or
#: its architecture; the layout; a field of MoEConfig; an override (`transformer_config_kwargs`); and what moeref, or
#: Megatron when it is finalised, derives from all of them.
Origin = Literal["provider default", "default", "hf", "layout", "field", "override", "derived"]


@dataclass(frozen=True)
class Setting:
    """One effective value and where it came from."""

    value: Any
    origin: Origin
    reason: str = ""

    @property
    def asked(self) -> bool:
        """Whether the user asked for this value, by a field or an override."""
        return self.origin in ("field", "override")
