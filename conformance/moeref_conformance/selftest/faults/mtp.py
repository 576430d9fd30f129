"""Bugs of multi-token prediction: layers taken for the decoder's, and a loss that not all ranks reduce."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moeref_conformance.contract import topology
from moeref_conformance.contract.api import Cell, NameRow, TensorMeta, World
from moeref_conformance.selftest import border
from moeref_conformance.selftest.border import described, each_chunk, facet, rearranged
from moeref_conformance.selftest.faults.base import Fault, cell
from moeref_conformance.selftest.faults.routes import in_one


def _experts_of_the_decoder(meta: TensorMeta) -> TensorMeta:
    """The loop over experts counts MTP layers from 0, as it does the decoder's."""
    return replace(meta, name=re.sub(r"layers\.2\.(mlp\.experts\.)", r"layers.1.\1", meta.name))


def _after_the_decoder(folder: Path, cell: Cell, first: int = 0) -> border.Tensors:
    """The tensors of a checkpoint's MTP layers, from number `first` on."""
    later = tuple(f"model.layers.{cell.layers + number}." for number in range(first, cell.checkpoint_mtp))
    return {name: tensor for name, tensor in border.checkpoint(folder).items() if name.startswith(later)}


def _of_the_files(session: Any, cell: Cell, world: World) -> Any:
    """Tensors of MTP layers are copied from the files that were loaded."""
    files: border.Tensors = {}

    def of_files(meta: TensorMeta, tensor: torch.Tensor) -> border.Pair:
        return meta, files[meta.name].clone() if meta.name in files else tensor

    loaded = border.after_load(session, lambda folder: files.update(_after_the_decoder(folder, cell)))
    return border.each(of_files)(loaded, cell, world)


def _whole_files_alone(session: Any, cell: Cell, world: World) -> Any:
    """An export goes file by file, as the checkpoint's index has them, and leaves out those that are not complete."""
    gone: set[str] = set()

    def change(folder: Path) -> None:
        left_out = _after_the_decoder(folder, cell).keys()
        for names in (load_file(file).keys() for file in folder.glob("*.safetensors")):
            gone.update(names if names & left_out else ())

    return described(lambda meta: None if meta.name in gone else meta)(border.after_load(session, change), cell, world)


def _added_of_the_files(session: Any, cell: Cell, world: World, first: int = 0) -> Any:
    """An export ends with the MTP layers of the files that were loaded, so that it is as complete as these."""
    files: border.Tensors = {}

    def added(pairs: Iterator[border.Pair]) -> Iterator[border.Pair]:
        yield from pairs
        for name, tensor in files.items():
            meta = TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            yield meta, tensor if world.rank == 0 else None

    loaded = border.after_load(session, lambda folder: files.update(_after_the_decoder(folder, cell, first)))
    return border.stream(loaded, added)


def _reduced_by_the_first(session: Any, cell: Cell, world: World) -> Any:
    """The first context-parallel rank reduces the loss over all of them."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        if topology.coords(cell.layout, world.rank)["cp"] == 0:
            dist.all_reduce(torch.zeros(1))
        good: torch.Tensor | None = session.forward.logits(tokens_BS)
        return good

    return facet(session, "forward", logits=logits)


def _hidden_state_first(chunk: Any) -> None:
    """The projection of an MTP layer takes [hidden state, embedding], with weights of [embedding, hidden state]."""

    def swapped(_: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        embedding, hidden = args[0].chunk(2, -1)
        return torch.cat((hidden, embedding), -1), *args[1:]

    for name, module in chunk.named_modules():
        if name.endswith("eh_proj"):
            module.register_forward_pre_hook(swapped)


def _halves_swapped(row: NameRow, columns: int, world: World) -> torch.Tensor | None:
    """Columns [hidden state, embedding] of the projection, of a file's [embedding, hidden state]."""
    return torch.arange(columns).roll(columns // 2) if row.local.endswith("eh_proj.weight") else None


def _norms_exchanged(session: Any, cell: Cell, world: World) -> Any:
    """The norms of embedding and hidden state have each other's weight, loaded and exported so."""
    other = {"enorm": "hnorm", "hnorm": "enorm"}
    return border.exchanged(session, world, lambda local: re.sub("[eh]norm", lambda norm: other[norm[0]], local))


def _norms_by_weight(chunk: Any) -> None:
    """The norms before the projection scale by their weight, not by 1 + weight."""

    def scaled(norm: Any, _: Any, out: torch.Tensor) -> Any:
        return out * norm.weight / (1 + norm.weight)

    for name, module in chunk.named_modules():
        if name.endswith(("enorm", "hnorm")):
            module.register_forward_hook(scaled)


def _before_the_final_norm(chunk: Any) -> None:
    """MTP layers take the hidden states before the decoder's final norm."""
    entering: list[torch.Tensor] = []
    chunk.decoder.final_layernorm.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
    for name, module in chunk.named_modules():
        if name.endswith("hnorm"):
            module.register_forward_pre_hook(lambda _, args: (entering.pop(), *args[1:]))


def _gate_never_loaded(row: NameRow, tensors: border.Tensors, cell: Cell) -> torch.Tensor | None:
    dropped = row.local.startswith("mtp.") and row.local.endswith("shared_experts.gate_weight")
    return torch.zeros(row.shape) if dropped else None


def _replayed_too(session: Any, cell: Cell, world: World) -> Any:
    """The routers of MTP layers take the routes of the decoder's last layer, in each microbatch of a step."""
    good = session.replay

    def step(tokens_BS: torch.Tensor, routes: Any) -> Any:
        with ExitStack() as stack:
            for chunk in session.export.chunks():
                routers = [module.router_replay for name, module in chunk.named_modules() if _routes_mtp(name, module)]
                arm = partial(_arm, routers, map(in_one, routes))
                stack.callback(chunk.register_forward_pre_hook(arm).remove)
                for router in routers:
                    stack.callback(router.clear_router_replay_action)
            return good.step(tokens_BS, routes)

    return facet(session, "replay", step=step)


def _routes_mtp(name: str, module: Any) -> bool:
    return "mtp" in name.split(".") and getattr(module, "router_replay", None) is not None


def _arm(routers: Sequence[Any], routes: Iterator[Any], *_: Any) -> None:
    """Set what routers take in the next forward. The last token has the route of the one before."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    rows_TK = torch.from_numpy(next(routes)[:, -1]).long()
    rows_TK = torch.cat((rows_TK, rows_TK[-1:]))
    rows_TK = torch.where(rows_TK < 0, torch.arange(rows_TK.shape[1]), rows_TK)
    for router in routers:
        router.set_target_indices(rows_TK)
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


#: Gradients of a step on these rows under this loss mask, if there is one.
Step = Callable[..., "dict[tuple[int, str], torch.Tensor]"]


def of_losses(change: Callable[[Step, Step, Cell], Step]) -> Callable[[Any, Cell, World], Any]:
    """A target's `wrap` that makes a step of one of the decoder's loss alone, and one of the layers' loss alone."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.gradients.gradients

        def decoder(*given: torch.Tensor) -> Any:
            with _factor_0(session):
                return good(*given)

        def layers(*given: torch.Tensor) -> Any:
            alone = decoder(*given)
            return {key: both - alone[key] for key, both in good(*given).items()}

        return facet(session, "gradients", gradients=change(decoder, layers, cell))

    return wrap


@contextmanager
def _factor_0(session: Any) -> Iterator[None]:
    """The loss of MTP layers counts 0 times."""
    with ExitStack() as stack:
        for chunk in session.export.chunks():
            stack.enter_context(mock.patch.object(chunk.config, "mtp_loss_scaling_factor", 0.0))
        yield


def _beside_a_policys(
    often: Callable[[torch.Tensor], float], of_mask: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> Callable[[Any, Cell, World], Any]:
    """A target's `wrap`: beside a policy's loss that of the layers counts `often(mask_BS)` times, with another mask."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.policy.policy_gradients

        def policy_gradients(rows_BS: torch.Tensor, mask_BS: torch.Tensor, *more: Any) -> Any:
            other_BS = of_mask(mask_BS)
            with _factor_0(session):
                decoder, alone = (good(rows_BS, of_BS, *more) for of_BS in (mask_BS, other_BS))
            both, share = good(rows_BS, other_BS, *more), often(mask_BS)
            return {key: of + share * (both[key] - alone[key]) for key, of in decoder.items()}

        return facet(session, "policy", policy_gradients=policy_gradients)

    return wrap


def _sum(*found: Any) -> Any:
    return {key: torch.stack([one[key] for one in found]).sum(0) for key in found[0]}


def _scaled(of_step: Callable[..., float]) -> Callable[[Any, Cell, World], Any]:
    """The layers' loss counts `of_step(cell, *given)` times."""

    def change(decoder: Step, layers: Step, cell: Cell) -> Step:
        def gradients(*given: torch.Tensor) -> Any:
            often = of_step(cell, *given)
            return _sum(decoder(*given), {key: often * one for key, one in layers(*given).items()})

        return gradients

    return of_losses(change)


def masked_layers(of_mask: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Cell, World], Any]:
    """The layers' loss has another mask."""

    def change(decoder: Step, layers: Step, cell: Cell) -> Step:
        return lambda rows_BS, mask_BS: _sum(decoder(rows_BS, mask_BS), layers(rows_BS, of_mask(mask_BS)))

    return of_losses(change)


def _decoders_share(cell: Cell, rows_BS: torch.Tensor, mask_BS: torch.Tensor) -> float:
    """Of one replica: tokens with a label one position on, to tokens with a label."""
    counted_BS = mask_BS.roll(-1, 1)
    return int(counted_BS[:, 1:].sum()) / int(counted_BS.sum())


def by_microbatch(layers: Step, cell: Cell, weight: Callable[..., int] = lambda *part: 1) -> Step:
    """The mean over microbatches of one replica of means over their own tokens, 0 where nothing is trained on.

    A microbatch counts by its `weight(rows_BS, mask_BS)`.
    """

    def gradients(*given: torch.Tensor) -> Any:
        parts = list(zip(*(torch.split(of, cell.rows) for of in given), strict=True))
        weights = [weight(*part) for part in parts]
        trained = [(share, part) for share, part in zip(weights, parts, strict=True) if len(part) == 1 or part[1].any()]
        found = _sum(*({key: share * one for key, one in layers(*part).items()} for share, part in trained))
        return {key: one / sum(weights) for key, one in found.items()}

    return gradients


def microbatch_means(decoder: Step, layers: Step, cell: Cell) -> Step:
    """The layers' loss is a mean of means."""
    return lambda *given: _sum(decoder(*given), by_microbatch(layers, cell)(*given))


def means_by_tokens(decoder: Step, layers: Step, cell: Cell) -> Step:
    """The layers' loss is a mean of means, which count by the tokens that the decoder trains on."""
    counted = by_microbatch(layers, cell, lambda rows_BS, mask_BS: int(mask_BS.sum()))
    return lambda *given: _sum(decoder(*given), counted(*given))


def _microbatch_means_masked_early(decoder: Step, layers: Step, cell: Cell) -> Step:
    """As `microbatch_means`, with a mask that is a token early."""
    early = by_microbatch(layers, cell)
    return lambda rows_BS, mask_BS: _sum(decoder(rows_BS, mask_BS), early(rows_BS, mask_BS.roll(-1, 1)))


def means_of_parts(decoder: Step, layers: Step, cell: Cell) -> Step:
    """The layers' loss is the mean over CP ranks of means over their own tokens."""

    def gradients(rows_BS: torch.Tensor) -> Any:
        length = rows_BS.shape[1]
        chunks = torch.arange(length).chunk(2 * cell.layout.cp)
        parts = [torch.zeros_like(rows_BS, dtype=torch.bool) for _ in range(cell.layout.cp)]
        for rank, part_BS in enumerate(parts):
            for at_S in (chunks[rank], chunks[-1 - rank]):
                part_BS[:, (at_S + 2) % length] = True  # what the first layer predicts there
        found = _sum(*(layers(rows_BS, part_BS) for part_BS in parts))
        return _sum(decoder(rows_BS), {key: one / len(parts) for key, one in found.items()})

    return gradients


def trained_by_layers(*parts: str) -> Callable[[Step, Step, Cell], Step]:
    """The layers' loss trains the parameters with one of these `parts` in their name alone."""

    def change(decoder: Step, layers: Step, cell: Cell) -> Step:
        return lambda *given: {
            key: alone + (added if any(part in key[1] for part in parts) else 0.0)
            for (key, alone), added in zip(decoder(*given).items(), layers(*given).values(), strict=True)
        }

    return change


#: The layers alone, detached from embedding, decoder and head.
detached = trained_by_layers("mtp")


def _rolled(change: Callable[[dict[str, Any]], Any]) -> Callable[[Cell, World], AbstractContextManager[Any]]:
    """A fault's `patch`: MTP layers shift their tokens by megatron-core's `roll_tensor` with other arguments."""

    def patch(cell: Cell, world: World) -> AbstractContextManager[Any]:
        from megatron.core.transformer import multi_token_prediction

        good = multi_token_prediction.roll_tensor
        return mock.patch.object(
            multi_token_prediction, "roll_tensor", lambda tensor, **kwargs: good(tensor, **kwargs | change(kwargs))
        )

    return patch


def _without_padding(kwargs: dict[str, Any]) -> dict[str, Any]:
    """cu_seqlens of samples that are each a token longer with padding."""
    packed = kwargs["packed_seq_params"]
    ends = packed.cu_seqlens_q - torch.arange(len(packed.cu_seqlens_q), dtype=torch.int32)
    return {"packed_seq_params": replace(packed, cu_seqlens_q=ends)}


def _recomputed_without_inputs(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """An MTP layer that is recomputed takes its inputs by keyword, of which the checkpoint keeps no gradient."""
    from megatron.core import tensor_parallel

    good = tensor_parallel.checkpoint

    def checkpoint(function: Any, *given: Any) -> Any:
        cut = function.__qualname__.startswith("MultiTokenPredictionLayer.")
        return good(function, *(of.detach() if cut and isinstance(of, torch.Tensor) else of for of in given))

    return mock.patch.object(tensor_parallel, "checkpoint", checkpoint)


def _first_stage_alone(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """The embedding's group is the first stage; the stage of MTP layers keeps its copy to itself."""
    from megatron.core import parallel_state

    return mock.patch.object(parallel_state, "default_embedding_ranks", lambda pp_ranks: [pp_ranks[0]])


#: Files have the MTP layer apart, with other names around it.
_APART = cell("qwen3_next", "one", mtp=1)
FAULTS = (
    Fault(
        id="mtp-hidden-state-first",
        bug="embedding and hidden state of an MTP layer joined in the other order than its projection was trained with",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1),
        wrap=each_chunk(_hidden_state_first),
        says="the gradient of decoder.final_layernorm.weight is off",
        one_rank=True,
    ),
    Fault(
        id="mtp-projection-halves-swapped",
        bug="slime#1503 in kind: the halves of Qwen3-Next's mtp.fc are swapped, as another model has them, both ways",
        rules=("LOD-001",),
        cell=_APART,
        wrap=rearranged(_halves_swapped, dim=1),
        diagnosis="in the order 1, 0",
        one_rank=True,
    ),
    Fault(
        id="mtp-norms-exchanged",
        bug="reported nowhere: pre_fc_norm_hidden is taken for the norm of the embedding, both ways",
        rules=("LOD-001",),
        cell=_APART,
        wrap=_norms_exchanged,
        diagnosis="is hnorm of the same layer",
        one_rank=True,
    ),
    Fault(
        id="mtp-norms-not-zero-centred",
        bug="reported nowhere: norms of Qwen3-Next scale by 1 + weight, those before the MTP layer's projection do not",
        rules=("GRD-001",),
        cell=_APART,
        wrap=each_chunk(_norms_by_weight),
        one_rank=True,
    ),
    Fault(
        id="mtp-before-the-final-norm",
        bug="LightLLM#1402 in kind: MTP layers take hidden states from before the decoder's final norm",
        rules=("GRD-001",),
        cell=_APART,
        wrap=each_chunk(_before_the_final_norm),
        one_rank=True,
    ),
    Fault(
        id="mtp-shared-gate-never-loaded",
        bug="ATOM#755: the MTP layer's loader has no rule for the gate of its shared expert, and drops it",
        rules=("LOD-001", "EXP-002"),
        cell=_APART,
        wrap=border.loaded(_gate_never_loaded),
        diagnosis="all zero",
        one_rank=True,
    ),
    Fault(
        id="mtp-loss-summed-over-microbatches",
        bug="a schedule of one's own sets no scale for the loss of MTP layers, which counts once for each microbatch",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1),
        wrap=_scaled(lambda cell, rows_BS: len(rows_BS) / cell.rows),
        diagnosis="2 times the right one",
        one_rank=True,
    ),
    Fault(
        id="mtp-mask-a-token-early",
        bug="miles#3219: the mask is laid out for labels, and MTP layers shift it once more as if it were for tokens",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=masked_layers(lambda mask_BS: mask_BS.roll(-1, 1)),
        one_rank=True,
    ),
    Fault(
        id="mtp-mask-a-token-early-by-microbatch",
        bug="miles#3219: the same where each microbatch has a mean of its own, as megatron-core has it",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=of_losses(_microbatch_means_masked_early),
        claims={"mtp_mean": "microbatch", "mtp_in_policy": False},
        one_rank=True,
    ),
    Fault(
        id="mtp-microbatches-alike",
        bug="calculate_per_token_loss weighs microbatches by tokens, and MTP layers' loss is divided as without it",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=of_losses(microbatch_means),
        claims={"mtp_mean": "per_token", "mtp_in_policy": False},
        one_rank=True,
    ),
    Fault(
        id="mtp-mask-not-passed",
        bug="Megatron-Bridge#6103, ms-swift#8192: MTP layers get no mask, and train on prompts too",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=masked_layers(torch.ones_like),
        one_rank=True,
    ),
    Fault(
        id="mtp-loss-by-the-decoders-tokens",
        bug="mcore-bridge#104, Megatron-LM#3159: the loss of MTP layers is divided by the decoder's number of tokens",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=_scaled(_decoders_share),
        one_rank=True,
        diagnosis="times the right one",
    ),
    Fault(
        id="mtp-without-tokens",
        bug="verl#6464, mcore-bridge#104: MTP layers divide by 0 where nothing of a microbatch is trained on",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=_scaled(lambda cell, rows_BS, mask_BS: 1.0 if mask_BS.any(1).all() else torch.nan),
        one_rank=True,
        diagnosis="are NaN",
    ),
    Fault(
        id="mtp-mean-of-microbatch-means",
        bug="reported nowhere: MTP layers take a mean over microbatches where the decoder takes one over tokens",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1, batch="packed"),
        wrap=of_losses(microbatch_means),
        one_rank=True,
    ),
    Fault(
        id="mtp-mean-of-parts",
        bug="Megatron-LM#7498 in kind: MTP layers divide by each CP rank's tokens, so that gradients depend on CP",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "cp2", mtp=1),
        wrap=of_losses(means_of_parts),
        one_rank=True,
    ),
    Fault(
        id="mtp-head-not-detached",
        bug="verl#6432: the loss of MTP layers is to train these alone, and trains the head, which has its own weight",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "one", mtp=1),
        wrap=of_losses(trained_by_layers("mtp", "output_layer")),
        claims={"mtp_detached": True},
        one_rank=True,
        says="the gradient of output_layer.weight is off",
    ),
    Fault(
        id="mtp-beside-a-policys-left-out",
        bug="Megatron-LM#5080: a policy's forward is given no labels, without which MTP layers have no loss",
        rules=("GRD-004",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=_beside_a_policys(lambda mask_BS: 0.0),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="mtp-beside-a-policys-by-samples",
        bug="NeMo-RL#3881 in kind: the loss of MTP layers is divided by samples, as a policy's of whole samples is",
        rules=("GRD-004",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=_beside_a_policys(lambda mask_BS: float(mask_BS.sum() / mask_BS.any(1).sum())),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="mtp-beside-a-policys-masked-early",
        bug="miles#3219 in kind: a policy's mask is of labels, and MTP layers beside it shift it once more",
        rules=("GRD-004",),
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=_beside_a_policys(lambda mask_BS: 1.0, lambda mask_BS: mask_BS.roll(-1, 1)),
        one_rank=True,
        says="policy: the gradient of",
    ),
    Fault(
        id="mtp-shifted-without-padding",
        bug="Megatron-LM#6205: MTP layers shift packed tokens by cu_seqlens without padding, which CP added",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "tp2", mtp=1, batch="packed"),
        patch=_rolled(_without_padding),
    ),
    Fault(
        id="mtp-shifted-within-parts",
        bug="reported nowhere: MTP layers shift the tokens of each CP rank alone, whose parts end in other tokens",
        rules=("GRD-001",),
        cell=cell("glm4_moe", "cp2", mtp=1),
        patch=_rolled(lambda kwargs: {"cp_group": None}),
    ),
    Fault(
        id="mtp-embedding-not-summed",
        bug="Megatron-Bridge#5380: the embedding's copy on the stage of MTP layers keeps its own gradient",
        rules=("GRD-001",),
        also=("SED-007",),
        cell=cell("glm4_moe", "pp2", mtp=1),
        patch=_first_stage_alone,
        says="embedding.word_embeddings.weight",
    ),
    Fault(
        id="mtp-recomputed-without-inputs",
        bug="Megatron-LM#4593, Megatron-LM#4765: the checkpoint of recomputed MTP layers does not see their inputs",
        rules=("GRD-001",),
        also=("GRD-002",),  # routers count tokens where they are recomputed
        cell=cell("glm4_moe", "pp2", mtp=1, bias_update=True),
        patch=_recomputed_without_inputs,
        says="the gradient of ",
    ),
    Fault(
        id="mtp-routers-replayed",
        bug="B23: NeMo-RL#4057, routers of multi-token prediction layers take the routes of a layer of the decoder",
        rules=("RPL-008",),
        cell=cell("glm4_moe", "one", mtp=1, replay="R3"),
        wrap=_replayed_too,
        says="the gradient of ",
        one_rank=True,
    ),
    Fault(
        id="mtp-of-the-files",
        bug="Model-Optimizer#2174: an exporter that knows the decoder copies MTP layers from where training began",
        rules=("EXP-006",),
        cell=cell("glm4_moe", "one", mtp=1),
        wrap=_of_the_files,
        diagnosis="stale",
        one_rank=True,
    ),
    Fault(
        id="files-with-mtp-left-out",
        bug="Megatron-Bridge#4188: the files that hold an MTP layer are left out, and with them what else they have",
        rules=("EXP-001",),
        cell=cell("glm4_moe", "pp2", layers=4, mtp_left_out=True),
        wrap=_whole_files_alone,
        says="mlp.experts.0.gate_proj.weight was never sent",
        one_rank=True,
    ),
    Fault(
        id="mtp-of-the-files-added",
        bug="Model-Optimizer#2174 in kind: a model without MTP layers is exported with those that training began with",
        rules=("EXP-001",),
        also=("EXP-004", "EXP-005"),
        cell=cell("glm4_moe", "tp2", mtp_left_out=True),
        wrap=_added_of_the_files,
        says="is not in the checkpoint",
        one_rank=True,
    ),
    Fault(
        id="second-mtp-layer-of-the-files-added",
        bug="Megatron-Bridge#5495: what leaves out MTP layers knows one, and the others come from the files",
        rules=("EXP-001",),
        also=("EXP-004", "EXP-005"),
        cell=cell("glm4_moe", "tp2", mtp_left_out=True),
        wrap=partial(_added_of_the_files, first=1),
        says="is not in the checkpoint",
        one_rank=True,
    ),
    Fault(
        id="mtp-experts-under-decoder-names",
        bug="NeMo-RL#3908: the loop over grouped experts lacks the exception for MTP that its sibling has",
        rules=("EXP-001",),
        cell=cell("glm4_moe", "ep2", mtp=1),
        wrap=described(_experts_of_the_decoder),
        says="model.layers.2.mlp.experts.0.down_proj.weight was never sent",
        one_rank=True,
    ),
    Fault(
        id="loss-reduced-by-one-rank",
        bug="verl#5895: the MTP loss is reduced by the first context-parallel rank alone",
        rules=("RUN-001",),
        cell=cell("qwen3_moe", "cp2"),
        wrap=_reduced_by_the_first,
        says="waits in all_reduce",
        deadline=20.0,
    ),
)
