"""The loss of multi-token prediction layers in a training step: over the unpadded vocabulary and a step's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from moeref.megatron import batches, padding_mask


class Losses:
    """Stands in for `GPTModel.compute_language_model_loss`, which megatron-core calls for each layer and the decoder.

    The decoder's logits are returned as they are, for the step's own loss, to which `added` is to be added. Megatron's
    own loss of a layer is left at 0: it counts the vocabulary's padding, whose size depends on TP, and divides by the
    tokens of one microbatch on one CP rank. `shares` has how many labels of each layer a microbatch has in the mean.
    """

    def __init__(self, vocab: int, config: TransformerConfig, shares: Sequence[float]) -> None:
        self._vocab, self._factor, self._shares = vocab, config.mtp_loss_scaling_factor, shares
        self._ahead: list[torch.Tensor] = []
        self._found: list[torch.Tensor] = []

    def labels(self, microbatch: batches.Microbatch, at_S: torch.Tensor) -> torch.Tensor | None:
        """The labels `[B, S/CP]` at these positions, with which a chunk is called next; None without such layers."""
        if not self._shares:
            return None
        self._ahead, self._found = [microbatch.ahead(number)[:, at_S] for number in range(len(self._shares) + 1)], []
        return self._ahead[0]

    def __call__(self, labels_BS: torch.Tensor, logits_SBV: torch.Tensor) -> torch.Tensor:
        """The logits `[B, S, V/TP]` for the labels last given, zeros `[B, S]` for those of a layer."""
        if labels_BS is self._ahead[0]:
            return logits_SBV.transpose(0, 1).contiguous()
        full_SBV = tensor_parallel.gather_from_tensor_model_parallel_region(logits_SBV)
        logits_BVS = full_SBV[..., : self._vocab].float().permute(1, 2, 0)
        number = len(self._found)
        # Megatron's labels go on where a sample's padding begins, and count what is not trained on.
        own_BS, share = self._ahead[number + 1], self._shares[number]
        total = torch.nn.functional.cross_entropy(logits_BVS, own_BS, reduction="sum", ignore_index=batches.IGNORED)
        self._found.append(self._factor / len(self._shares) * total / (share or 1.0))  # without a label it is 0
        return torch.zeros_like(labels_BS, dtype=torch.float32)

    @property
    def added(self) -> torch.Tensor | float:
        """The loss of all layers in the forward that was last."""
        return sum(self._found)

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


def check(config: TransformerConfig, microbatches: Sequence[batches.Microbatch], bias_rate: float) -> None:
    """Raise ValueError for packed samples whose padding megatron-core would count in the layers' routers.

    0.16.1 gives these no padding_mask; 0.19 shifts it like the tokens, and wrongly where TP has cut it.
    """
    if microbatches[0].lengths and (bias_rate or padding_mask.losses(config)):
        counted = "megatron-core counts padding in a loss or in the expert bias of their routers"
        raise ValueError(f"packed samples with MTP layers: {counted}; set coefficients and bias_rate to 0")
