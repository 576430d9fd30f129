"""Bugs of microbatches with several samples: which token is whose, and what a mean is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from moeref_conformance.contract.api import Cell, Session, TokenLogprobs, World
from moeref_conformance.contract.topology import inner_stage
from moeref_conformance.selftest.border import each_chunk, facet
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.routes import in_one


def _sequence_first(session: Session, cell: Cell, world: World) -> Any:
    """The logits of a microbatch in the order of Megatron's [S, B], taken for [B, S]."""
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found_BSV = good.logits(tokens_BS)
        if found_BSV is None:
            return None
        return torch.cat([pair.transpose(0, 1).reshape(pair.shape) for pair in found_BSV.split(cell.rows)])

    return facet(session, "forward", logits=logits)


def _another_token_for(of: int) -> Any:
    """In place of the token with this id the model is given its neighbour."""

    def wrap(session: Session, cell: Cell, world: World) -> Any:
        good: Any = session.forward

        def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
            found_BSV: torch.Tensor | None = good.logits(tokens_BS.masked_fill(tokens_BS == of, abs(of - 1)))
            return found_BSV

        return facet(session, "forward", logits=logits)

    return wrap


def _padded_on_the_left(session: Session, cell: Cell, world: World) -> Any:
    """Sequences are filled up to a multiple of 8 at their beginning, and no mask says so."""
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        more = -tokens_BS.shape[1] % 8
        found_BSV = good.logits(torch.nn.functional.pad(tokens_BS, (more, 0)))
        return None if found_BSV is None else found_BSV[:, more:]

    return facet(session, "forward", logits=logits)


def _one_sample_a_step(session: Session, cell: Cell, world: World) -> Any:
    """The sum over the samples of a microbatch is divided by the length of one."""
    good: Any = session.gradients

    def gradients(tokens_BS: torch.Tensor) -> Any:
        return {key: cell.rows * gradient for key, gradient in good.gradients(tokens_BS).items()}

    return facet(session, "gradients", gradients=gradients)


def _samples_in_a_row(session: Session, cell: Cell, world: World) -> Any:
    """The routes of the samples of a microbatch one after the other, for rows in which they take turns."""
    good: Any = session.replay

    def packed(routes: Sequence[Any]) -> list[Any]:
        """Routes that, taken in turns, come in the order of `routes` one after the other."""
        samples = list(map(in_one, routes))
        pairs = [np.concatenate(pair) for pair in zip(samples[::2], samples[1::2], strict=True)]
        return [pair_TLK[first :: cell.rows] for pair_TLK in pairs for first in range(cell.rows)]

    return facet(session, "replay", step=lambda tokens_BS, routes: good.step(tokens_BS, packed(routes)))


def _of_one_token_left_out(session: Session, cell: Cell, world: World) -> Any:
    """A sample of one token, after which there is none to predict, is in no pack."""
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found_BSV: torch.Tensor | None = good.logits(tokens_BS)
        several_B11 = ((tokens_BS >= 0).sum(1) > 1)[:, None, None]
        return None if found_BSV is None else found_BSV * several_B11

    return facet(session, "forward", logits=logits)


def _one_sequence(session: Session, cell: Cell, world: World) -> Any:
    """Attention takes packed samples for one sequence."""
    return _with_borders(session, [0, -1])


def _two_sequences(session: Session, cell: Cell, world: World) -> Any:
    """Attention takes the samples after the first one for one sequence."""
    return _with_borders(session, [0, 1, -1])


def _with_borders(session: Session, kept: list[int]) -> Session:
    """`session` whose attention has these borders of packed samples alone."""

    def joined(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        packed = kwargs["packed_seq_params"]
        ends = packed.cu_seqlens_q[kept]
        return args, {**kwargs, "packed_seq_params": replace(packed, cu_seqlens_q=ends, cu_seqlens_kv=ends)}

    for chunk in session.export.chunks() if session.export else ():
        for attention in chunk.modules():
            if hasattr(attention, "core_attention"):
                core: Any = attention.core_attention
                core.register_forward_pre_hook(joined, with_kwargs=True)
    return session


def _logprobs_cut_by_the_sample_before(session: Session, cell: Cell, world: World) -> Any:
    """Log-probabilities of a sample are cut out where the one before it ends, counted from that one's begin."""
    good: Any = session.logprobs

    def logprobs(tokens_BS: torch.Tensor, *given: Any) -> TokenLogprobs | None:
        found: TokenLogprobs | None = good.logprobs(tokens_BS, *given)
        if found is None:
            return None
        cut_BS, lengths = found.logprobs_BS.clone(), (tokens_BS >= 0).sum(1).tolist()
        for row, length in enumerate(lengths):
            if row % cell.rows > 1:
                first = row - row % cell.rows
                told = [found.logprobs_BS[one, : lengths[one] - 1] for one in range(first, first + cell.rows)]
                cut_BS[row, : length - 1] = torch.cat(told)[lengths[row - 1] - 1 :][: length - 1]
        return replace(found, logprobs_BS=cut_BS)

    return facet(session, "logprobs", logprobs=logprobs)


def _mean_of_means(session: Session, cell: Cell, world: World) -> Any:
    """Every microbatch weighs the same, whatever its number of tokens."""
    good: Any = session.gradients

    def gradients(tokens_BS: torch.Tensor) -> Any:
        each = [good.gradients(pack_BS) for pack_BS in torch.split(tokens_BS, cell.rows)]
        return {key: torch.stack([one[key] for one in each]).mean(0) for key in each[0]}

    return facet(session, "gradients", gradients=gradients)


def mean_of_replicas(session: Session, cell: Cell, world: World) -> Any:
    """Every data-parallel replica divides by its own number of tokens, and the mean of that is taken."""
    good: Any = session.gradients

    def gradients(*given: torch.Tensor) -> Any:
        of_ranks: list[Any] = [None] * world.size
        dist.all_gather_object(of_ranks, given)
        each = [good.gradients(*of_rank) for of_rank in of_ranks]
        return {key: torch.stack([one[key] for one in each]).mean(0) for key in each[0]}

    return facet(session, "gradients", gradients=gradients)


def _unpadded_offsets(session: Session, cell: Cell, world: World) -> Any:
    """Logits of packed samples are cut by the lengths without padding: the second sample's begin too early."""
    good: Any = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found_BSV: torch.Tensor | None = good.logits(tokens_BS)
        if found_BSV is not None:
            found_BSV[1 :: cell.rows] = found_BSV[1 :: cell.rows].roll(1, 1)
        return found_BSV

    return facet(session, "forward", logits=logits)


def _routes_without_padding(session: Session, cell: Cell, world: World) -> Any:
    """The second sample of a pack begins a row later in the batch than in the routes."""
    good: Any = session.replay

    def late(routes: Sequence[Any]) -> list[Any]:
        return [np.roll(in_one(sample), number % cell.rows, axis=0) for number, sample in enumerate(routes)]

    return facet(session, "replay", step=lambda tokens_BS, routes: good.step(tokens_BS, late(routes)))


def _recorded_rows_moved(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Routers record the rows of the second half of a microbatch one row up."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    good = RouterReplay.record_indices

    def record_indices(self: Any, idx_TK: torch.Tensor) -> None:
        first_TK, second_TK = idx_TK.tensor_split(2)
        good(self, torch.cat([first_TK, second_TK.roll(-1, 0)]))

    return mock.patch.object(RouterReplay, "record_indices", record_indices)


def _padding(
    change: Callable[[torch.Tensor], torch.Tensor | None], recomputed: bool = False
) -> Callable[[Cell, World], Any]:
    """A fault's `patch`: routers get `change(padding_mask)`; with `recomputed` where layers are recomputed alone."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.models.gpt import GPTModel

        good = GPTModel.forward

        def forward(self: Any, *args: Any, padding_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if padding_mask is not None and (self.config.recompute_granularity or not recomputed):
                padding_mask = change(padding_mask)
            return good(self, *args, padding_mask=padding_mask, **kwargs)

        return mock.patch.object(GPTModel, "forward", forward)

    return patch


def _middle_stages_untold(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """Stages that have neither the first layer nor the loss are not told where packed samples begin."""
    from megatron.core.models.gpt import GPTModel

    good, inner = GPTModel.forward, inner_stage(cell.layout, world.rank)

    def forward(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return good(self, *args, packed_seq_params=None if inner else packed_seq_params, **kwargs)

    return mock.patch.object(GPTModel, "forward", forward)


def _nets(chunk: Any) -> Iterator[Any]:
    return (module for module in chunk.modules() if type(module).__name__ == "GatedDeltaNet")


def _untold(chunk: Any) -> None:
    """Gated delta nets are not told where packed samples begin."""
    for net in _nets(chunk):
        net.forward = lambda *given, good=net.forward, **named: good(*given, **{**named, "packed_seq_params": None})


def _states_run_on(chunk: Any) -> None:
    """The convolution in gated delta nets begins anew with each packed sample, the delta rule does not."""
    for net in _nets(chunk):
        rule = net.gated_delta_rule
        net.gated_delta_rule = lambda *given, rule=rule, **named: rule(*given, **{**named, "cu_seqlens": None})


FAULTS = (
    Fault(
        id="delta-nets-run-on-in-packs",
        bug="Automodel#2147, prime-rl#3003, torchtitan#3892: gated delta nets take packed samples for one sequence",
        rules=("FWD-001",),
        cell=cell("qwen3_next", "one", batch="packed"),
        wrap=each_chunk(_untold),
        one_rank=True,
        says="differ from transformers",
    ),
    Fault(
        id="delta-states-run-on-in-packs",
        bug="radixark/Megatron-LM#85 in kind: convolutions begin anew with each packed sample, states go on",
        rules=("FWD-001",),
        cell=cell("qwen3_5_moe_text", "one", batch="packed"),
        wrap=each_chunk(_states_run_on),
        one_rank=True,
        says="differ from transformers",
    ),
    Fault(
        id="padded-on-the-left",
        bug="trl#469 in kind: padding on the left that attention sees, of sequences whose length is no multiple",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "tp2"),
        wrap=_padded_on_the_left,
        says="logits of the first 14 tokens alone, once weights have changed, differ from transformers",
    ),
    Fault(
        id="logits-sequence-first",
        bug="logits of a microbatch [S, B] are reshaped to [B, S]: right for one sample, mixed up for two",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "tp2", batch="pairs"),
        wrap=_sequence_first,
    ),
    Fault(
        id="mean-of-one-sample",
        bug="the loss of a microbatch of several samples is divided by the tokens of one",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp2", batch="pairs"),
        wrap=_one_sample_a_step,
        one_rank=True,
        diagnosis="2 times the right one",
    ),
    Fault(
        id="routes-batch-first",
        bug="routes of a microbatch one sample after the other, where Megatron's rows are [S, B]: logits off by 1.5",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "one", batch="pairs", replay="R3"),
        wrap=_samples_in_a_row,
        one_rank=True,
        diagnosis="the route of token",
    ),
    Fault(
        id="packed-as-one-sequence",
        bug="cu_seqlens are lost on the way to attention: a sample attends to those packed before it",
        rules=("FWD-001",),
        cell=cell("glm4_moe", "one", batch="packed"),
        wrap=_one_sequence,
        one_rank=True,
    ),
    Fault(
        id="packed-without-samples-of-one-token",
        bug="reported nowhere: a sample of one token, which has no next one to predict, is left out of its pack",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one", batch="packed"),
        wrap=_of_one_token_left_out,
        one_rank=True,
        says="logits differ from transformers",
    ),
    Fault(
        id="packed-as-one-sequence-on-middle-stages",
        bug="ms-swift#5544, Megatron-Bridge#3926: stages that are neither first nor last know no borders of samples",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("qwen3_moe", "pp4", layers=4, batch="packed"),
        patch=_middle_stages_untold,
    ),
    Fault(
        id="packed-as-two-sequences",
        bug="reported nowhere: of the borders of packed samples attention has the first one: the third sees the second",
        rules=("FWD-001",),
        cell=cell("qwen3_moe", "one", batch="packed"),
        wrap=_two_sequences,
        one_rank=True,
        says="logits differ from transformers",
    ),
    Fault(
        id="packed-logprobs-cut-by-the-sample-before",
        bug="reported nowhere: a packed sample is cut out where the one before it ends, wherever that one begins",
        rules=("LGP-001",),
        cell=cell("qwen3_moe", "one", batch="packed"),
        wrap=_logprobs_cut_by_the_sample_before,
        one_rank=True,
    ),
    Fault(
        id="mean-of-microbatch-means",
        bug="verl in kind: a mean over microbatches of their means, where they have unequal numbers of tokens",
        rules=("GRD-001",),
        diagnosis="tokens of the samples count 0.852",
        cell=cell("qwen3_moe", "cp2", batch="packed"),
        wrap=_mean_of_means,
        one_rank=True,
    ),
    Fault(
        id="mean-of-replica-means",
        bug="prime-rl#2359: replicas with unequal numbers of tokens divide by their own, and the mean is taken of that",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "tp1", world_size=2, batch="packed"),
        wrap=mean_of_replicas,
    ),
    Fault(
        id="packed-routes-without-padding",
        bug="routes of packed samples one after the other, where TP padded each of the samples before them",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "cp2", batch="packed", replay="R3"),
        wrap=_routes_without_padding,
        one_rank=True,
        diagnosis="the route of token",
    ),
    Fault(
        id="packed-routes-without-padding-in-bf16",
        bug="routes of packed samples one after the other, where TP padded each of the samples before them",
        rules=("RPL-001",),
        cell=cell("qwen3_moe", "tp2-ep2-etp1", batch="packed", replay="R3", dtype="bfloat16", loss_mask=True),
        wrap=_routes_without_padding,
        one_rank=True,
        diagnosis="the route of token",
    ),
    *(
        Fault(
            id=f"recorded-rows-moved-in-{batch}",
            bug=bug,
            rules=("RPL-001",),
            cell=cell("qwen3_moe", "tp2", batch=batch, replay="R2"),
            patch=_recorded_rows_moved,
            diagnosis="the route of token",
        )
        for batch, bug in (
            ("packed", "verl#7106: padding of packed samples moves the rows that the routers recorded"),
            ("pairs", "miles#3146 in kind: recorded rows of several samples come back in another order"),
        )
    ),
    Fault(
        id="padding-in-the-routers-loss",
        bug="Megatron-LM#1984, Megatron-LM#4776: padding of packed samples counts in the loss of the routers",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "cp2", batch="packed", router_loss="aux_loss"),
        patch=_padding(lambda mask: None),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="padding-moves-the-bias",
        bug="Megatron-LM#1984 in kind: tokens of padding count in the updates of the experts' bias",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", batch="packed", bias_update=True),
        patch=_padding(lambda mask: None),
        diagnosis="moved by",
    ),
    Fault(
        id="padding-of-the-other-polarity",
        bug="R18: Megatron-LM#6114, a mask that is true for tokens, where the router takes what is true for padding",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "ep2", batch="packed", bias_update=True),
        patch=_padding(lambda mask: ~mask),
        diagnosis="moved by",
    ),
    Fault(
        id="recomputed-padding-in-the-routers-loss",
        bug="Megatron-LM#2754, Megatron-LM#5841 in kind: which tokens are padding is not told to what is recomputed",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "pp2", batch="packed", router_loss="aux_loss"),
        patch=_padding(lambda mask: None, recomputed=True),
        says="off transformers' by",
    ),
    Fault(
        id="recomputed-padding-moves-the-bias",
        bug="Megatron-LM#6367 in kind: a recomputed router counts padding, which the forward's did not",
        rules=("GRD-002",),
        cell=cell("glm4_moe", "pp2", batch="packed", bias_update=True, layers=4),
        patch=_padding(lambda mask: None, recomputed=True),
        diagnosis="moved by",
    ),
    Fault(
        id="padding-of-another-place",
        bug="Megatron-LM#5011 in kind: the mask of padding is shifted against the tokens",
        rules=("GRD-001",),
        cell=cell("qwen3_moe", "one", batch="packed", router_loss="z_loss"),
        patch=_padding(lambda mask: mask.roll(1, 1)),
        one_rank=True,
        says="off transformers' by",
    ),
    Fault(
        id="packed-cut-without-padding",
        bug="outputs of packed samples are cut by cu_seqlens without padding, which TP or CP added",
        rules=("FWD-002",),
        also=("FWD-001",),
        cell=cell("deepseek_v3", "tp2", layers=3, batch="packed"),
        wrap=_unpadded_offsets,
    ),
    *(
        Fault(
            id=f"{which}-id-replaced",
            bug=bug,
            rules=("FWD-001", "FWD-002"),
            cell=cell("qwen3_moe", "tp2"),
            wrap=_another_token_for(of),
            says="logits differ from transformers",
        )
        for which, of, bug in (
            ("first", 0, "reported nowhere: id 0 is taken for padding, and what stands there for no token"),
            ("last", 130, "reported nowhere: ids are held below the vocabulary's last by a bound that is one short"),
        )
    ),
)
