"""What an engine's logprobs must be: those of transformers' own module with the weights of a folder, in fp32.

Shape suffixes: S tokens of prompt and sample, V vocabulary, G sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=4)
def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logprobs(folder: Path, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """`logprobs_G` of the tokens that were sampled after a prompt."""
    tokens_S = torch.tensor([*prompt, *sampled])
    with torch.no_grad():
        logprobs_SV: torch.Tensor = _model(folder)(tokens_S[None]).logits[0].float().log_softmax(-1)
    return logprobs_SV[len(prompt) - 1 : -1].gather(1, tokens_S[len(prompt) :, None])[:, 0]
