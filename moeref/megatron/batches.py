"""Microbatches as GPTModel takes them: rows side by side in [B, S], or samples packed into one sequence (THD).

Causal attention never looks from a sample into the padding behind it, so `cu_seqlens` has padded lengths alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from moeref.dispatcher.padding import Plan
from moeref.layout import Layout
from moeref.layout.sequence import restored
from moeref.replay import rank_rows

#: The label of a position without a loss.
IGNORED = -100


@dataclass(frozen=True)
class Microbatch:
    """All positions of a microbatch, before context parallelism cuts them. `labels_BS` is IGNORED in padding.

    `cu_seqlens` cuts S into sequences. `lengths` are those of packed samples without padding; empty for rows.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    cu_seqlens: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    def part(self, layout: Layout, cp_rank: int) -> torch.Tensor:
        """The positions [S/CP] along S that a CP rank computes, in its order."""
        return torch.from_numpy(rank_rows(self.cu_seqlens, cp=layout.cp, cp_rank=cp_rank)).to(self.tokens_BS.device)

    def order(self, layout: Layout) -> torch.Tensor:
        """`joined[order]` has the positions in order again; `joined` has the parts of all CP ranks."""
        return torch.tensor(restored(self.part(layout, rank).tolist() for rank in range(layout.cp)))

    @property
    def positions_S(self) -> torch.Tensor:
        """The position of each token in its sample."""
        return torch.cat([torch.arange(size, device=self.tokens_BS.device) for size in self._sizes])

    def ahead(self, number: int) -> torch.Tensor:
        """The labels `[B, S]` of tokens `number` positions later in the same sample; IGNORED after its end."""
        within_S = self.positions_S + number < self._each(self._sizes)
        return self.labels_BS.roll(-number, 1).where(within_S, IGNORED)

    @property
    def padding_BS(self) -> torch.Tensor:
        """True behind the end of each packed sample."""
        return (self.positions_S >= self._each(self.lengths))[None]

    def _each(self, of_sequences: Sequence[int]) -> torch.Tensor:
        """A number for each sequence, repeated at its positions [S]."""
        numbers, sizes = (torch.tensor(of, device=self.tokens_BS.device) for of in (of_sequences, self._sizes))
        return numbers.repeat_interleave(sizes)

    @property
    def _sizes(self) -> list[int]:
        """The tokens of each sequence, with padding."""
        return [end - begin for begin, end in itertools.pairwise(self.cu_seqlens)]

    @property
    def packed(self) -> PackedSeqParams | None:
        """What Megatron's attention and rotary embeddings need of packed samples; None for rows."""
        if not self.lengths:
            return None
        ends = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.tokens_BS.device)
        longest = max(self._sizes)
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )

    def spread(self, samples: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of the tokens of packed samples, at their positions [S]; 0 in padding."""
        pairs = zip(samples, self._sizes, strict=True)
        return torch.cat([torch.nn.functional.pad(of, (0, size - len(of))) for of, size in pairs])

    def unpacked(self, logits_1SV: torch.Tensor) -> list[torch.Tensor]:
        """The logits [S, V] of each packed sample, without padding."""
        pairs = zip(self.cu_seqlens, self.lengths, strict=False)  # the last of cu_seqlens begins no sample
        return [logits_1SV[0, begin : begin + length] for begin, length in pairs]


def labels(tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The label of each position: the next token along the last axis, and at the end the first token.

    It is IGNORED where `mask` is False for the token that is predicted.

    Raises ValueError for a mask that is not bool or has another shape.
    """
    behind = tokens.roll(-1, -1)
    if mask is None:
        return behind
    if mask.dtype != torch.bool or mask.shape != tokens.shape:
        wanted = f"bool {[*tokens.shape]}, True for tokens that are trained on"
        raise ValueError(f"a loss mask is {mask.dtype} {[*mask.shape]}; it has to be {wanted}")
    return behind.where(mask.roll(-1, -1).to(behind.device), IGNORED)


def of_rows(tokens_BS: torch.Tensor, size: int, mask_BS: torch.Tensor | None = None) -> list[Microbatch]:
    """Microbatches of `size` rows that follow each other, with their `labels`.

    Raises ValueError for rows that do not divide into them, and for a mask as `labels` does.
    """
    if len(tokens_BS) % size:
        raise ValueError(f"{len(tokens_BS)} rows do not divide into microbatches of {size}")
    pairs = zip(torch.split(tokens_BS, size), torch.split(labels(tokens_BS, mask_BS), size), strict=True)
    return [Microbatch(rows, labels, (0, tokens_BS.shape[1])) for rows, labels in pairs]


def of_samples(
    packs: Sequence[Sequence[torch.Tensor]],
    plan: Plan,
    total: int = 0,
    masks: Sequence[Sequence[torch.Tensor]] | None = None,
) -> list[Microbatch]:
    """A microbatch of the samples `tokens_S` in each pack, padded by `plan`, and all to one length, at least `total`.

    Pipeline stages send equal lengths. As in `moeref.replay.packed`, what is added at the end pads the last sample.
    `masks` has the loss mask of each sample. Raises ValueError as `packed_length` and `labels` do, and for masks of
    other numbers of packs or samples.
    """
    total = max(total, packed_length(packs, plan))
    fits = [plan.pack([len(sample) for sample in pack]) for pack in packs]
    labelled = [[labels(sample) for sample in pack] for pack in packs]
    if masks is not None:
        pairs = zip(packs, masks, strict=True)
        labelled = [[labels(*pair) for pair in zip(pack, of, strict=True)] for pack, of in pairs]
    return [_packed(*one, total) for one in zip(packs, labelled, [fit.samples for fit in fits], strict=True)]


def packed_length(packs: Sequence[Sequence[torch.Tensor]], plan: Plan) -> int:
    """The padded length of the longest pack. Raises ValueError for a pack or a sample without tokens."""
    if not packs or not all(packs) or not all(len(sample) for pack in packs for sample in pack):
        raise ValueError("a microbatch needs at least one sample, and a sample at least one token")
    return max(plan.pack([len(sample) for sample in pack]).total for pack in packs)


def _packed(
    samples: Sequence[torch.Tensor], labelled: Sequence[torch.Tensor], padded: Sequence[int], total: int
) -> Microbatch:
    begins = [0, *itertools.accumulate(padded[:-1])]
    tokens_1S = samples[0].new_zeros(1, total)
    labels_1S = torch.full_like(tokens_1S, IGNORED)
    for begin, sample, labels_S in zip(begins, samples, labelled, strict=True):
        tokens_1S[0, begin : begin + len(sample)] = sample
        labels_1S[0, begin : begin + len(sample)] = labels_S
    return Microbatch(tokens_1S, labels_1S, (*begins, total), tuple(len(sample) for sample in samples))
