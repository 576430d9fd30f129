"""One layer of Transformer Engine against one of megatron-core's local spec, on the same weights: time and difference.

Without Transformer Engine both sides are plain torch, under two sets of parameter names: it shows that the code
runs. Routes are the router's own on each side; a near tie that turns shows in the difference.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu import models
from tests.bench.gpu.figures import Figure, close, ratio, timed

#: Relative distance of logits and of the embedding's gradient; wider in bf16, where a token in hundreds is routed
#: otherwise. On an H100 logits were 5.3e-2 apart.
MOST = {"bfloat16": 1e-1, "float32": 1e-4}


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Ratio of forward and backward, distances of logits and of a gradient that went through the whole layer."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    model = sizes.model(layers=1, vocab_size=1024)
    local = models.made(model, device)
    kernels = "te" if HAVE_TE and device.type == "cuda" else "torch"
    other = models.twin(local, device, folder, kernels=kernels, norms="fused", experts="grouped")
    if spoil:
        models.spoil(other.chunks[0].decoder)
    given = models.tokens(sizes, model.vocab, device)
    steps = [partial(_step, built.chunks[0], *given) for built in (local, other)]
    (logits, grad), (logits_of_other, grad_of_other) = steps[0](), steps[1]()
    name, against, most = f"kernels={kernels!r}", "local spec", MOST[sizes.dtype]
    found = [
        close(f"{name}, logits", logits_of_other, logits, most, against),
        close(f"{name}, gradient of the embedding", grad_of_other, grad, most, against),
    ]
    mine, theirs = timed(device, *steps, rounds=sizes.rounds)
    return [*found, ratio(f"{name}, forward and backward", theirs, mine, against)]


def _step(chunk: Any, tokens_BS: torch.Tensor, positions_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chunk.zero_grad(set_to_none=True)
    logits_BSV = chunk(tokens_BS, positions_BS, None)  # attention is causal and makes its own mask
    logits_BSV.float().logsumexp(-1).mean().backward()
    return logits_BSV.detach(), chunk.embedding.word_embeddings.weight.grad
