"""What the facet `logprobs` is asked for."""

from __future__ import annotations

#: Logits are divided by it, as where samples were drawn with it.
TEMPERATURE = 0.7
