"""A small inference engine, with what `moeref.sync` asks of one: weights, a prefix cache, requests, versions.

Its model: the hidden state after a prefix is the mean of the prefix' embeddings, and logits are a linear map of it. The
prefix cache holds sums of embeddings, which are wrong as soon as the embeddings change.
"""

from __future__ import annotations

import torch

from moeref.sync import Bucket, Intake, Receipt, Refused, SyncError, Update

EMBEDDING, HEAD, DRAFT = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.eh_proj.weight"


class SmallEngine:
    """Writes buckets into the weights that it serves, as vLLM does."""

    caches = frozenset({"prefix"})

    def __init__(self, weights: dict[str, torch.Tensor], version: int = 0) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.drafts = DRAFT in weights
        self.intake = Intake(version, drafts=self.drafts)
        self.paused = False
        self.arrived: set[str] = set()
        self.sums: dict[tuple[int, ...], torch.Tensor] = {}

    def logprobs(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Of the next token after `tokens`: [vocabulary]. Raises RuntimeError while it is paused."""
        if self.paused:
            raise RuntimeError("the engine is paused")
        known = next(n for n in range(len(tokens), -1, -1) if n == 0 or tokens[:n] in self.sums)
        total_H = self.sums[tokens[:known]] if known else torch.zeros(self.weights[EMBEDDING].shape[1])
        for end in range(known + 1, len(tokens) + 1):
            total_H = self.sums[tokens[:end]] = total_H + self.weights[EMBEDDING][tokens[end - 1]]
        return torch.log_softmax(self.weights[HEAD] @ (total_H / len(tokens)), dim=0)

    def version(self) -> int:
        return self.intake.version

    def receipt(self) -> Receipt | None:
        return self.intake.receipt

    def pause(self) -> None:
        if self.paused:
            raise Refused("an update has paused the engine already")
        self.paused = True

    def begin(self, update: Update) -> None:
        self.intake.begin(update)
        self.arrived = set()

    def send(self, bucket: Bucket) -> Receipt:
        received = self.intake.accept(bucket)
        for name, tensor in bucket.tensors:
            self.load(name, tensor)
            self.arrived.add(name)
        return received

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Raises SyncError for a tensor that the model does not have."""
        if name not in self.weights or self.weights[name].shape != tensor.shape:
            raise SyncError(f"the model has no {name} of shape {tuple(tensor.shape)}")
        self.weights[name].copy_(tensor)

    def commit(self, version: int) -> Receipt:
        self.intake.complete(version)
        update = self.intake.update
        assert update is not None
        kept = {DRAFT} if update.drafts == "kept" else set()
        if update.kind == "full" and (missing := self.weights.keys() - self.arrived - kept):
            raise SyncError(f"a full update without {', '.join(sorted(missing))}")
        return self.intake.commit(version)

    def reset_caches(self) -> frozenset[str]:
        self.sums.clear()
        return frozenset({"prefix"})

    def resume(self) -> None:
        if self.intake.update is not None:
            raise SyncError(f"the update to version {self.intake.update.version} is not finished")
        self.paused = False
