"""What an engine's logprobs and routes must be: those of transformers' module with the weights of a folder, in fp32.

Shape suffixes: S tokens of prompt and sample, V vocabulary, G sampled tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from moeref_conformance.oracles.dialect import read_config
from moeref_conformance.oracles.recipes import MAKING


@lru_cache(maxsize=4)
def model(folder: Path) -> Any:
    """transformers' module with the weights of a folder, in fp32."""
    from transformers import AutoModelForCausalLM

    with MAKING:
        return AutoModelForCausalLM.from_pretrained(
            folder, config=read_config(folder), dtype=torch.float32, attn_implementation="eager"
        ).eval()


def logprobs(folder: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """`logprobs_G` of the tokens that were sampled after a prompt, of logits that are divided by a temperature."""
    logprobs_GV = _logprobs(folder, prompt, sampled, temperature)
    return logprobs_GV.gather(1, torch.tensor([*sampled]).clamp(0, logprobs_GV.shape[-1] - 1)[:, None])[:, 0]


def greatest(folder: Path, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """`logprobs_G` of the likeliest token where each of these was sampled."""
    return _logprobs(folder, prompt, sampled).amax(-1)


def spread(
    folder: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance `[G]` of the logprob, at a temperature, of a token that is drawn where each of these was."""
    logprobs_GV = _logprobs(folder, prompt, sampled, temperature).double()
    shares_GV = logprobs_GV.exp()
    mean_G = (shares_GV * logprobs_GV).sum(-1)
    return mean_G, (shares_GV * logprobs_GV.square()).sum(-1) - mean_G.square()


def routes(folder: Path, prompt: Sequence[int], sampled: Sequence[int]) -> list[list[frozenset[int]]]:
    """By token of prompt and sample but the last, and by MoE layer, the experts that transformers' module takes."""
    return _forward(folder, (*prompt, *sampled))[1][:-1]


def _logprobs(folder: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """`logprobs_GV` where the tokens were sampled."""
    logits_SV = _forward(folder, (*prompt, *sampled))[0]
    return (logits_SV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


#: Cells are judged in several threads.
_ONE_AT_A_TIME = threading.Lock()
Forward = tuple[torch.Tensor, list[list[frozenset[int]]]]


def _forward(folder: Path, tokens: tuple[int, ...]) -> Forward:
    """`logits_SV`, and by token and MoE layer the experts that it goes to. Several rules ask for the same.

    With a token that the model does not have, as of a row that pads its head, logits are NaN, and no expert is taken.
    """
    with _ONE_AT_A_TIME:
        rows = model(folder).config.vocab_size
        if all(0 <= token < rows for token in tokens):
            return _run(folder, tokens)
        logits_SV, taken = _run(folder, (0,) * len(tokens))
        return torch.full_like(logits_SV, torch.nan), [[frozenset()] * len(row) for row in taken]


@lru_cache(maxsize=512)
def _run(folder: Path, tokens: tuple[int, ...]) -> Forward:
    module, by_layer = model(folder), list[list[frozenset[int]]]()

    def keep(_: Any, entering: tuple[torch.Tensor, ...]) -> None:
        by_layer.append([frozenset(row) for row in entering[1].tolist()])  # hidden states, experts, weights

    experts = [of for name, of in module.named_modules() if name.endswith(".mlp.experts")]
    hooks = [of.register_forward_pre_hook(keep) for of in experts]
    try:
        with torch.no_grad():
            logits_SV = module(torch.tensor([tokens])).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    return logits_SV, [list(row) for row in zip(*by_layer, strict=True)]
