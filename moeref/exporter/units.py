"""Which tensors a loader needs together, by their Hugging Face names."""

from __future__ import annotations

import functools
import re

#: What comes before these parts of a name is the unit: all experts of a layer, which a loader stacks; an attention,
#: whose q, k, v (MLA: both down projections) it fuses; a dense or shared MLP, whose gate and up it fuses.
_UNITS = (
    re.compile(r"(.*\.experts)\."),
    re.compile(r"(.*(?:attn|attention))\."),
    re.compile(r"(.*)\.(?:gate|up|down|gate_up)_proj\b"),
)


@functools.lru_cache(maxsize=1 << 17)
def unit_of(name: str) -> str:
    """The unit of a tensor: tensors of one unit stay in one bucket. A tensor of no unit is one by itself."""
    for pattern in _UNITS:
        if match := pattern.match(name):
            return match[1]
    return name
