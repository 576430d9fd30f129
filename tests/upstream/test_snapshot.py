"""Weights kept beside a model's own, and put in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from moeref.megatron.snapshot import Snapshot

pytestmark = pytest.mark.cpu


def _chunk() -> torch.nn.Module:
    chunk = torch.nn.Module()
    chunk.embedding, chunk.head = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    chunk.head.weight = chunk.embedding.weight  # tied
    chunk.register_buffer("expert_bias", torch.zeros(2))
    return chunk


def _are(chunks: Sequence[torch.nn.Module], want: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for chunk, held in zip(chunks, want, strict=True):
        torch.testing.assert_close(dict(chunk.state_dict()), dict(held), rtol=0, atol=0)


def test_weights_and_buffers_are_exchanged_and_put_back() -> None:
    chunks = [_chunk(), _chunk()]
    kept = Snapshot(chunks)
    then = [{name: of.clone() for name, of in chunk.state_dict().items()} for chunk in chunks]
    with torch.no_grad():
        for chunk in chunks:
            for of in chunk.state_dict().values():
                of.add_(1.0)
    now = [{name: of.clone() for name, of in chunk.state_dict().items()} for chunk in chunks]
    with kept.in_place():
        _are(chunks, then)
    _are(chunks, now)
    with pytest.raises(RuntimeError, match="a forward that fails"), kept.in_place():
        raise RuntimeError("a forward that fails")
    _are(chunks, now)
    assert chunks[0].head.weight is chunks[0].embedding.weight
