"""Seeds that the facet `seeds` is asked for."""

from __future__ import annotations

from typing import Any

#: The seed of every run, and the two ways to ask for it; another seed, which must make a difference.
SEED = 1234
OTHER = 98_765
WAYS = {"plain": False, "per_dp": True}
#: Values that no generator can be seeded with.
BAD: tuple[Any, ...] = (None, 0, -7)
