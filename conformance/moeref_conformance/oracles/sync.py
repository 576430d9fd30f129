"""What an engine's logprobs and routes must be: those of transformers' module with the weights of a folder, in fp32.

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


def routes(folder: Path, prompt: Sequence[int], sampled: Sequence[int]) -> list[list[frozenset[int]]]:
    """By token of prompt and sample but the last, and by MoE layer, the experts that transformers' module takes."""
    model, by_layer = _model(folder), list[list[frozenset[int]]]()

    def keep(_: Any, entering: tuple[torch.Tensor, ...]) -> None:
        by_layer.append([frozenset(row) for row in entering[1].tolist()])  # hidden states, experts, weights

    experts = [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]
    hooks = [module.register_forward_pre_hook(keep) for module in experts]
    try:
        with torch.no_grad():
            model(torch.tensor([[*prompt, *sampled[:-1]]]))
    finally:
        for hook in hooks:
            hook.remove()
    return [list(row) for row in zip(*by_layer, strict=True)]
