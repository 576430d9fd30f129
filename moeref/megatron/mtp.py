"""The loss of multi-token prediction layers in a training step: megatron-core's own, over the unpadded vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel

from moeref.layout import Layout
from moeref.megatron import batches

_OWN = "megatron-core divides the loss of MTP layers by each microbatch's own tokens"


class Losses:
    """Stands in for `GPTModel.compute_language_model_loss`, which megatron-core calls for each layer and the decoder.

    The decoder's logits are returned as they are, for the step's own loss. The loss of a multi-token prediction layer
    is the cross entropy of each token over the unpadded vocabulary: Megatron's counts the padding, whose size depends
    on TP. GPTModel weighs it by `mtp_loss_scaling_factor` and divides by the number of layers and of tokens.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab, self._labels_BS = vocab, torch.empty(0)

    def labels(self, microbatch: batches.Microbatch) -> torch.Tensor:
        """The labels `[B, S]` that a chunk is called with next. GPTModel moves them on for each layer."""
        self._labels_BS = microbatch.labels_BS
        return self._labels_BS

    def __call__(self, labels_BS: torch.Tensor, logits_SBV: torch.Tensor) -> torch.Tensor:
        """The logits `[B, S, V/TP]` for the labels last given, the loss `[B, S]` for those of a layer."""
        if labels_BS is self._labels_BS:
            return logits_SBV.transpose(0, 1).contiguous()
        full_SBV = tensor_parallel.gather_from_tensor_model_parallel_region(logits_SBV)
        logits_BVS = full_SBV[..., : self._vocab].float().permute(1, 2, 0)
        return torch.nn.functional.cross_entropy(logits_BVS, labels_BS, reduction="none")

    @contextmanager
    def in_place(self, chunks: Sequence[GPTModel]) -> Iterator[None]:
        """Stand in inside the `with` block."""
        for chunk in chunks:
            chunk.compute_language_model_loss = self
        try:
            yield
        finally:
            for chunk in chunks:
                del chunk.compute_language_model_loss


def check(layout: Layout, microbatches: Sequence[batches.Microbatch]) -> None:
    """Raise ValueError for a step in which megatron-core's loss depends on the layout or on what is packed."""
    if layout.cp > 1:
        raise ValueError(f"cp={layout.cp}: megatron-core divides the loss of MTP layers by each rank's own tokens")
    if microbatches[0].lengths:
        raise ValueError(f"packed samples: {_OWN}")
    if any(bool((of.labels_BS == batches.IGNORED).any()) for of in microbatches):
        raise ValueError(f"a loss mask: {_OWN}")
