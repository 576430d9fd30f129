"""Correct but different targets: designs that real frameworks have, which no MUST may call wrong.

`benign:<id>` runs one; `tests/kit/test_benign.py` runs all. Faults that turn SHOULD rules alone red are of this kind
too.
"""

from __future__ import annotations

import logging
import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from moeref_conformance.contract.api import (
    Cell,
    DispatcherRequest,
    NameRow,
    Padding,
    PadRequest,
    Request,
    RoundTrip,
    RoutedRows,
    Session,
    TensorMeta,
    TokenLogprobs,
    Turn,
    World,
)
from moeref_conformance.contract.requests.mxfp4 import BLOCKS, SCALES
from moeref_conformance.selftest import plain_fp8, plain_int4
from moeref_conformance.selftest.border import (
    Pair,
    Tensors,
    checkpoint,
    collected,
    copied,
    described,
    each,
    each_chunk,
    facet,
    inventory,
    loading,
    names,
    placed,
    stream,
)
from moeref_conformance.selftest.faults import adapters
from moeref_conformance.selftest.faults.base import Variant, cell
from moeref_conformance.selftest.faults.config import always
from moeref_conformance.selftest.faults.delta import Differences
from moeref_conformance.selftest.faults.loading import padded_with, unknown_skipped
from moeref_conformance.selftest.faults.masks import where_none
from moeref_conformance.selftest.faults.mtp import (
    detached,
    masked_layers,
    means_by_tokens,
    means_of_parts,
    microbatch_means,
    of_losses,
)
from moeref_conformance.selftest.faults.optimizer import nothing_between, read_again
from moeref_conformance.selftest.faults.quantised import PowersOfTwo
from moeref_conformance.selftest.faults.roles import aliases, everywhere, in_turn
from moeref_conformance.selftest.faults.stream import one_buffer, reading
from moeref_conformance.selftest.faulty import FaultyTarget
from moeref_conformance.selftest.plain_delta import Receiver, Sender, design
from moeref_conformance.selftest.slicing import walked

#: Computes one expert, by its number, for rows [R, H].
Expert = Callable[[int, torch.Tensor], torch.Tensor]


class _Bf16Scales(plain_fp8.Quantiser):
    """Quotients and scales pass through bf16, all scales come first, and small blocks have the scale of larger ones."""

    def scale(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return part.abs().max().clamp_min(1e-4) / plain_fp8.LARGEST

    def rounded(self, part: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (part.bfloat16() / scale.bfloat16()).to(plain_fp8.FP8)

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.bfloat16()

    def ordered(self, stream: Iterable[plain_fp8.Named]) -> Iterable[plain_fp8.Named]:
        return sorted(stream, key=lambda pair: not pair[0].endswith("weight_scale_inv"))


class _Sevens(plain_int4.Packer):
    """Divides the largest magnitude by 7.5, half of the width of the sixteen numbers, as its observer does."""

    divisor = 7.5

    def shape(self, tensor: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return super().shape(tensor, words).long()


@dataclass(frozen=True, kw_only=True)
class Benign(Variant):
    """One design. `why` says who has it or what it is good for, and `should` are the SHOULD rules that it does not
    follow, all of them."""

    why: str
    should: tuple[str, ...] = ()
    one_rank: bool = True


#: The numbers of MXFP4, twice as large.
_TWICE = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def _turned_into_bf16_first(session: Session, cell: Cell, world: World) -> Any:
    def bf16(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        twice = torch.stack([_TWICE[(blocks & 15).int()], _TWICE[(blocks >> 4).int()]], -1).flatten(-2)
        return (twice * 2.0 ** (scales.float() - 128)[..., None]).flatten(-2).mT.bfloat16().contiguous()

    def change(tensors: Tensors) -> Tensors:
        made = {name: of for name, of in tensors.items() if not name.endswith((BLOCKS, SCALES))}
        packed = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
        return made | {name: bf16(tensors[name + BLOCKS], tensors[name + SCALES]) for name in packed}

    return loading(session, world, change)


def _made_by_its_first_step(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.optimizer
    made = iter([good.make])

    def step(tokens_BS: torch.Tensor, rate: float) -> None:
        for make in made:
            make()
        good.step(tokens_BS, rate)

    return facet(session, "optimizer", make=lambda: None, step=step)


def _at_other_addresses(call: str) -> Callable[[Any, Cell, World], Any]:
    """What a `call` of the optimizer leaves is cut from larger buffers, where it begins at no multiple of 16 bytes."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good: Any = session.optimizer

        def moved(*given: Any, **named: Any) -> None:
            getattr(good, call)(*given, **named)
            for chunk in session.export.chunks():
                for number, of in enumerate(chunk.parameters()):
                    memory = of.data.new_empty(of.numel() + 8)
                    of.data = memory[number % 4 * 2 + 1 :][: of.numel()].view(of.shape).copy_(of.data)

        return facet(session, "optimizer", **{call: moved})

    return wrap


def _made_anew(session: Any, cell: Cell, world: World) -> Any:
    """Optimizers wait in files; what comes back is other parameters, and an optimizer that is made around them."""
    good: Any = session.optimizer
    folder = world.workdir / f"offloaded-{world.rank}"
    given, steps, saved = list[Any](), list[float | None](), list[Path]()

    def make(*settings: Any) -> None:
        given[:] = settings
        steps.clear()
        good.make(*settings)

    def step(tokens_BS: torch.Tensor, rate: float | None) -> Any:
        steps.append(rate)
        return good.step(tokens_BS, rate)

    def offload() -> None:
        if steps and not saved:
            folder.mkdir(exist_ok=True)
            good.save(folder)
            saved.append(folder)

    def onload(weights_only: bool) -> None:
        _replace_parameters(session)
        if not weights_only:
            good.make(*given)
            while saved:
                good.restore(saved.pop())

    return facet(session, "optimizer", make=make, step=step, offload=offload, onload=onload)


def _all_at_once(session: Any, cell: Cell, world: World) -> Any:
    """Everything comes back, whatever is asked for, and what is away may not go once more."""
    good: Any = session.optimizer
    away = list[bool]()

    def offload() -> None:
        if away:
            raise RuntimeError("offloaded already")
        away.append(True)
        good.offload()

    def onload(weights_only: bool) -> None:
        away.remove(True)
        good.onload(False)

    return facet(session, "optimizer", offload=offload, onload=onload)


def _apart_by_rounding(session: Any, cell: Cell, world: World) -> Any:
    """Logits are off by most of what rounding may leave, each time by the same; so are a reference policy's."""

    def off(logits: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def computed(tokens_BS: torch.Tensor) -> torch.Tensor | None:
            found_BSV = logits(tokens_BS)
            if found_BSV is None:
                return None
            odd_V = torch.arange(found_BSV.shape[-1], device=found_BSV.device) % 2
            return found_BSV + 1.4e-5 * (2 * odd_V - 1)

        return computed

    told = facet(session, "forward", logits=off(session.forward.logits))
    return facet(told, "optimizer", reference=off(session.optimizer.reference))


@contextmanager
def _vectors_decay(cell: Cell, world: World) -> Iterator[None]:
    """Every group of parameters decays as the one that decays most, whatever its shapes are."""
    good = torch.optim.Adam.step

    def step(self: Any, closure: Any = None) -> Any:
        decay = max(group["weight_decay"] for group in self.param_groups)
        for group in self.param_groups:
            group["weight_decay"] = decay
        return good(self, closure)

    with mock.patch.object(torch.optim.Adam, "step", step):
        yield


def _one_step_ahead(cell: Cell, world: World) -> AbstractContextManager[Any]:
    """A schedule moves on before the first step is taken."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    good: Any = OptimizerParamScheduler.__init__

    def make(self: Any, *given: Any, **named: Any) -> None:
        good(self, *given, **named)
        self.step(1)

    return mock.patch.object(OptimizerParamScheduler, "__init__", make)


def _refusing_what_is_not_finite(session: Session, cell: Cell, world: World) -> Any:
    """Such a step ends the run: on all ranks an error says so, and nothing can be asked of this optimizer any more."""
    good: Any = session.optimizer
    ended = list[str]()

    def make(*settings: Any) -> None:
        ended.clear()
        good.make(*settings)

    def step(tokens_BS: torch.Tensor, rate: float) -> float | None:
        norm: float | None = good.step(tokens_BS, rate) if not ended else None
        if norm is None or not math.isfinite(norm):
            ended.append(f"found NaN or Inf in the gradients: the norm is {norm}")
            raise RuntimeError(ended[-1])
        return norm

    return facet(session, "optimizer", make=make, step=step)


def _saved_in_memory(session: Session, cell: Cell, world: World) -> Any:
    """Nothing is left in the folder, a restore makes the optimizer itself, and it writes the weights too."""
    good: Any = session.optimizer
    files, weights = dict[Path, bytes](), dict[Path, list[torch.Tensor]]()

    def parameters() -> Iterator[torch.Tensor]:
        return (of.data for chunk in session.export.chunks() for of in chunk.parameters())  # type: ignore[union-attr]

    def save(folder: Path) -> None:
        good.save(folder)
        for file in [*folder.iterdir()]:
            files[file] = file.read_bytes()
            file.unlink()
        weights[folder] = [of.clone() for of in parameters()]

    def restore(folder: Path) -> None:
        for file, content in files.items():
            file.write_bytes(content)
        for of, kept in zip(parameters(), weights[folder], strict=True):
            of.copy_(kept)
        good.make()
        good.restore(folder)

    return facet(session, "optimizer", save=save, restore=restore)


def _without_entropies(session: Session, cell: Cell, world: World) -> Any:
    good: Any = session.logprobs

    def logprobs(*asked: Any) -> TokenLogprobs | None:
        found: TokenLogprobs | None = good.logprobs(*asked)
        return None if found is None else replace(found, entropies_BS=None)

    return facet(session, "logprobs", logprobs=logprobs)


def _in_buckets(session: Session, cell: Cell, world: World) -> Any:
    """Tensors come as views of a buffer of up to 256 KiB, which has another memory each time."""

    def flushed(bucket: list[tuple[TensorMeta, torch.Tensor]]) -> Iterator[Pair]:
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
        ends = list(accumulate(tensor.nbytes for _, tensor in bucket))
        for (meta, like), part in zip(bucket, torch.tensor_split(flat, ends[:-1]), strict=True):
            yield meta, part.view(like.dtype).view(like.shape)

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        bucket: list[tuple[TensorMeta, torch.Tensor]] = []
        for meta, tensor in pairs:
            if tensor is None:
                yield meta, None
                continue
            bucket.append((meta, tensor))
            if sum(kept.nbytes for _, kept in bucket) > 2**18:
                yield from flushed(bucket)
                bucket.clear()
        if bucket:
            yield from flushed(bucket)

    return stream(session, rewrite)


def _surplus_warned_of(session: Session, cell: Cell, world: World) -> Any:
    """A tensor of the checkpoint that the model lacks is left out with a warning."""
    planned = {meta.name for meta in session.plan.tensors()} if session.plan else set()

    def load(folder: Path) -> None:
        if surplus := sorted(checkpoint(folder).keys() - planned):
            if world.rank == 0:
                logging.getLogger("transformers").warning("weights of the checkpoint were not used: %s", surplus)
            folder = copied(folder, world, lambda tensors: {n: t for n, t in tensors.items() if n in planned})
        session.export.load(folder)  # type: ignore[union-attr]

    return facet(session, "export", load=load)


def _contradiction_refused(session: Any, cell: Cell, world: World) -> Any:
    """A setting that is given as a field and passed through with another value is refused."""
    good = session.config

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        twice = request.fields.keys() & request.overrides.keys()
        if apart := sorted(name for name in twice if request.fields[name] != request.overrides[name]):
            raise ValueError(f"given twice with different values: {', '.join(apart)}")
        resolved: Mapping[str, Any] = good.resolve(request, role)
        return resolved

    return facet(session, "config", resolve=resolve)


def _experts(change: Callable[[Expert, int, torch.Tensor], torch.Tensor]) -> Callable[[Session, Cell, World], Any]:
    """Experts are computed by `change(expert, number, rows_RH)`."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good = session.dispatch

        def round_trip(rows: RoutedRows, expert: Expert) -> RoundTrip:
            sent: RoundTrip = good.round_trip(rows, lambda number, rows_RH: change(expert, number, rows_RH))
            return sent

        return facet(session, "dispatch", round_trip=round_trip)

    return wrap


def _recomputed(expert: Expert, number: int, rows_RH: torch.Tensor) -> torch.Tensor:
    output_RH: torch.Tensor = torch.utils.checkpoint.checkpoint(expert, number, rows_RH, use_reentrant=False)
    return output_RH


def _filled_to_16(expert: Expert, number: int, rows_RH: torch.Tensor) -> torch.Tensor:
    """An expert computes a multiple of 16 rows, of which the last are zero."""
    filled_FH = torch.nn.functional.pad(rows_RH, (0, 0, 0, -len(rows_RH) % 16))
    return expert(number, filled_FH)[: len(rows_RH)]


def _type_alone(session: Any, cell: Cell, world: World) -> Any:
    """A backend is given for flex alone."""
    good = session.dispatch

    def settings(request: DispatcherRequest) -> dict[str, Any]:
        return {name: value for name, value in good.settings(request).items() if value is not None}

    return facet(session, "dispatch", settings=settings)


def _without_none(session: Any, cell: Cell, world: World) -> Any:
    """Settings that are None are left out, which is what Megatron's config has without them."""
    good = session.config

    def there(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in settings.items() if value is not None}

    return facet(
        session,
        "config",
        given=lambda: there(good.given()),
        resolve=lambda request, role: there(good.resolve(request, role)),
    )


def _routed_in_fp64(session: Any, cell: Cell, world: World) -> Any:
    """The router computes in fp64 where nobody asks for a dtype."""
    good = session.config

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        asked = request.overrides.get("moe_router_dtype", "fp64")
        return {**good.resolve(request, role), "moe_router_dtype": asked}

    return facet(session, "config", given=lambda: {**good.given(), "moe_router_dtype": "fp64"}, resolve=resolve)


def _scale_and_rotation_said(session: Any, cell: Cell, world: World) -> Any:
    """The config has the share of a head that is rotated, and the scale of its attention."""
    scale = session.config.given()["kv_channels"] ** -0.5
    rope = {"position_embedding_type": "rope", "rope_scaling": False, "seq_len_interpolation_factor": None}
    return always(rotary_percent=0.75, softmax_scale=scale, **rope)(session, cell, world)


def _padding_stays(session: Any, cell: Cell, world: World) -> Any:
    """Padding rows are sent to no expert."""
    good = session.dispatch

    def round_trip(rows: RoutedRows, expert: Callable[[int, torch.Tensor], torch.Tensor]) -> RoundTrip:
        kept_T = ~rows.padding_T
        mine = RoutedRows(
            x_TH=rows.x_TH[kept_T],
            weights_TK=rows.weights_TK[kept_T],
            experts_TK=rows.experts_TK[kept_T],
            padding_T=rows.padding_T[kept_T],
            experts=rows.experts,
        )
        sent = good.round_trip(mine, expert)
        y_TH = torch.zeros_like(rows.x_TH).masked_scatter(kept_T[:, None], sent.y_TH)
        return RoundTrip(y_TH=y_TH, counts_E=sent.counts_E)

    return facet(session, "dispatch", round_trip=round_trip)


def _silent(session: Session, cell: Cell, world: World) -> Any:
    """Ranks other than the writer take part in the export and yield nothing."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if world.rank == 0:
                yield meta, tensor
            del tensor

    return stream(session, rewrite)


def _each_stage_sends_its_own(session: Session, cell: Cell, world: World) -> Any:
    """The first rank of a stage yields the tensors of its layers, and no other names."""
    mine = {name for row in session.names.table(world.rank) for name in row.hf}  # type: ignore[union-attr]

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            if meta.name in mine:
                yield meta, tensor
            del tensor

    return stream(everywhere(session, cell, world), rewrite)


def _logprobs_on_every_stage(session: Session, cell: Cell, world: World) -> Any:
    """The last stage broadcasts logprobs and entropies to the others."""
    good: Any = session.logprobs

    def logprobs(tokens_BS: torch.Tensor, temperature: float) -> TokenLogprobs:
        found = good.logprobs(tokens_BS, temperature)
        given = [found]
        dist.broadcast_object_list(given, src=world.size - 1)
        whole: TokenLogprobs = found or given[0]
        return whole

    return facet(session, "logprobs", logprobs=logprobs)


def _bias_still_under_routes(session: Session, cell: Cell, world: World) -> Any:
    """Steps under routes answer with the experts' bias of the model."""
    good: Any = session.replay

    def step(*given: Any) -> Any:
        own = {key: tensor.clone() for key, tensor in inventory(session).items() if key[1].endswith("expert_bias")}
        return {**good.step(*given), **own}

    return facet(session, "replay", step=step)


def _replayed_by_own_hooks(session: Session, cell: Cell, world: World) -> Any:
    """Routes are replayed, and Megatron's flag for that is off."""
    for chunk in session.export.chunks() if session.export else ():
        for module in chunk.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "moe_enable_routing_replay"):
                config.moe_enable_routing_replay = False
    good: Any = session.config
    return facet(session, "config", given=lambda: {**good.given(), "moe_enable_routing_replay": False})


def _deepep_not_named(session: Any, cell: Cell, world: World) -> Any:
    """Flex for DeepEP is given no backend."""
    good = session.dispatch

    def settings(request: DispatcherRequest) -> dict[str, Any]:
        return {name: value for name, value in good.settings(request).items() if value != "deepep"}

    return facet(session, "dispatch", settings=settings)


def _forbidden(made: Mapping[str, Any], epsilon: float) -> Iterator[str]:
    """What validators say of settings."""
    if made["moe_token_dispatcher_type"] == "allgather":
        yield "Token dispatcher type: allgather does not support variable sequence length"
    if made["moe_token_dispatcher_type"] == "flex":
        yield "HybridEP is supported for Ampere, Hopper, B200 and B300 GPUs"
    if made["layernorm_epsilon"] != epsilon:
        yield f"rms_norm_eps in hf config {epsilon} is not equal to layernorm_epsilon {made['layernorm_epsilon']}"
    if made["deterministic_mode"]:
        yield "NCCL_ALGO must be one of Tree, Ring under deterministic_mode"
    if made["moe_shared_expert_overlap"]:
        yield "moe_shared_expert_overlap without shared experts"
    if made["moe_token_drop_policy"] != "probs":
        yield "moe_token_drop_policy without moe_expert_capacity_factor"
    if made["moe_enable_routing_replay"]:
        yield "moe_enable_routing_replay: there is no replay here"
    if made["moe_grouped_gemm"]:
        yield "moe_grouped_gemm: grouped_gemm is not installed"


def _validated(session: Any, cell: Cell, world: World) -> Any:
    """Settings that the model, the machine or the other settings forbid are refused by name."""
    good, own = session.config, {"variable_seq_lengths": True}
    epsilon = good.given()["layernorm_epsilon"]

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        made = {**good.resolve(request, role), **own}
        for said in _forbidden(made, epsilon):
            raise ValueError(said)
        return made

    return facet(session, "config", given=lambda: {**good.given(), **own}, resolve=resolve)


def _reference_for_logits_alone(session: Any, cell: Cell, world: World) -> Any:
    """The reference model has no MTP layers, replays no routes and fuses no sums of gradients."""
    good, fusion = session.config, "gradient_accumulation_fusion"
    reference = {"mtp_num_layers": None, "moe_enable_routing_replay": False, fusion: False}

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        made = {**good.resolve(request, role), fusion: True}
        return made if role == "policy" else {**made, **reference}

    return facet(session, "config", given=lambda: {**good.given(), fusion: True}, resolve=resolve)


def _data_in_one_order(session: Any, cell: Cell, world: World) -> Any:
    """Python's and numpy's generators have the seed of the run on all stages."""
    good = session.seeds

    def planned(rank: int, seed: int, per_dp: bool) -> dict[str, int]:
        return {**good.planned(rank, seed, per_dp), "python": seed, "numpy": seed}

    def install(seed: int, per_dp: bool) -> None:
        good.install(seed, per_dp)
        random.seed(seed)
        np.random.seed(seed)

    return facet(session, "seeds", planned=planned, install=install)


class _E8M0(plain_fp8.Quantiser):
    """Scales are powers of two, of which the exponents are sent."""

    def packed(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.to(torch.float8_e8m0fnu)


class _XorOnce(Receiver):
    """Takes differences, of its own version alone, and looks at what came of them."""

    def write(self, held: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
        held[where] ^= values


class _AllWhole(Sender):
    """Sends every tensor whole."""

    def whole(self, changed: int, elements: int) -> bool:
        return True


def _no_missing_rows(session: Any, cell: Cell, world: World) -> Any:
    """Rows of -1 are refused: the engine never sends any."""
    good = session.replay

    def checked(routes: Any) -> Any:
        for sample in routes or ():
            for turn in sample if isinstance(sample, list) else [Turn(0, sample)]:
                if (turn.routes < 0).any():
                    raise ValueError("a negative expert")
        return routes

    return facet(
        session,
        "replay",
        replay=lambda tokens_BS, routes: good.replay(tokens_BS, checked(routes)),
        step=lambda tokens_BS, routes: good.step(tokens_BS, checked(routes)),
    )


def _backwards(session: Session, cell: Cell, world: World) -> Any:
    """Plan and stream go from the last tensor to the first, under every layout."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        metas, tensors = collected(pairs)
        for meta in reversed(metas):
            yield meta, tensors.pop(meta.name, None)

    planned = facet(session, "export", plan=lambda: list(session.export.plan())[::-1])  # type: ignore[union-attr]
    return stream(planned, rewrite)


def _written_by_the_last_rank(session: Session, cell: Cell, world: World) -> Any:
    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype)) if tensor is None else tensor
            dist.broadcast(full, src=0)
            # A copy: gloo's thread lets go of what it sent a little later.
            yield meta, full.clone() if world.rank == world.size - 1 else None
            del tensor, full

    return stream(session, rewrite)


def _read_ahead(session: Session, cell: Cell, world: World) -> Any:
    """The next tensor is gathered before the last one is handed out."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        ahead = next(pairs)
        for pair in pairs:
            yield ahead
            ahead = pair
        yield ahead

    return stream(session, rewrite)


def _strided(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    """A matrix is handed out as the transpose of a contiguous one."""
    return meta, tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def _collectives_between(session: Session, cell: Cell, world: World) -> Any:
    """All ranks meet after every tensor, and agree on what was sent."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        for meta, tensor in pairs:
            yield meta, tensor
            del tensor
            sent = torch.tensor([len(meta.name)])
            dist.all_reduce(sent)
            dist.barrier()

    return stream(session, rewrite)


def _without_a_plan(session: Session, cell: Cell, world: World) -> Any:
    def plan() -> list[TensorMeta]:
        raise NotImplementedError("known once everything was sent")

    return facet(session, "export", plan=plan)


def _padded_to_128(session: Any, cell: Cell, world: World) -> Any:
    """All is padded to one multiple, which suits every dispatcher and recipe."""
    good = session.dispatch
    multiple = 128 * cell.layout.tp * cell.layout.cp * 2

    def padded(request: PadRequest) -> Padding:
        made = good.padded(request)
        samples = tuple(tuple(-(-n // multiple) * multiple for n in lengths) for lengths in made.samples)
        longest = max(max(made.totals), *(sum(lengths) for lengths in samples))
        return Padding(samples=samples, totals=(-(-longest // multiple) * multiple,) * len(samples))

    return facet(session, "dispatch", padded=padded)


def _in_shared_memory(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return meta, tensor.clone().share_memory_()  # type: ignore[no-untyped-call]


def _with_autograd(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    return meta, torch.nn.Parameter(tensor)


def _shapes_of_torch(session: Any, cell: Cell, world: World) -> Any:
    """Shapes are torch.Size, and the plan is a tuple."""
    told = described(lambda meta: replace(meta, shape=torch.Size(meta.shape)))(session, cell, world)
    return facet(told, "export", plan=lambda: tuple(told.export.plan()))


def _loaded_again(session: Any, cell: Cell, world: World) -> Any:
    """Every load is done twice."""

    def load(folder: Path) -> None:
        session.export.load(folder)
        session.export.load(folder)

    return facet(session, "export", load=load)


def _in_one_storage(session: Any, cell: Cell, world: World) -> Any:
    """The parameters of a chunk are views of one flat buffer, from before loading on."""
    for chunk in session.export.chunks():
        mine = list(chunk.parameters())
        flat = torch.cat([parameter.data.reshape(-1) for parameter in mine])
        for parameter, part in zip(mine, torch.split(flat, [parameter.numel() for parameter in mine]), strict=True):
            parameter.data = part.view(parameter.shape)
    return session


def _from_built_memory(session: Any, cell: Cell, world: World) -> Any:
    """Every stream and forward reads the memory in which the parameters were built."""
    good, parameters = session.forward, [of for chunk in session.export.chunks() for of in chunk.parameters()]
    memory = {parameter: parameter.data for parameter in parameters}

    def logits(tokens_BS: torch.Tensor) -> Any:
        with placed(memory):
            return good.logits(tokens_BS)

    return facet(reading(session, dict(memory)), "forward", logits=logits)


def _unset(session: Any, cell: Cell, world: World) -> Any:
    """Memory is allocated when the model is built, and nothing is drawn."""
    for chunk in session.export.chunks():
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    return session


def _caching(session: Any, cell: Cell, world: World) -> Any:
    """A forward makes a buffer that no state dict has, and replaces it where a longer one is needed."""
    good = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        length = tokens_BS.shape[1]
        for chunk in session.export.chunks():
            if len(getattr(chunk, "cos_cached", ())) < length:
                chunk.register_buffer("cos_cached", torch.arange(length).cos(), persistent=False)
        found_BSV: torch.Tensor | None = good.logits(tokens_BS)
        return found_BSV

    return facet(session, "forward", logits=logits)


def _row_by_row(session: Any, cell: Cell, world: World) -> Any:
    """A forward for each row, in place of one with a microbatch for each."""

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        rows = [session.forward.logits(row_1S) for row_1S in torch.split(tokens_BS, 1)]
        return None if rows[0] is None else torch.cat(rows)

    return facet(session, "forward", logits=logits)


def _last_microbatch_first(session: Any, cell: Cell, world: World) -> Any:
    good = session.gradients
    return facet(session, "gradients", gradients=lambda tokens_BS: good.gradients(tokens_BS.flip(0)))


def _last_microbatch_replayed_first(session: Any, cell: Cell, world: World) -> Any:
    """Rows go through a forward and a step from the last to the first, and their routes with them."""
    good = session.replay

    def replay(tokens_BS: torch.Tensor, routes: Any) -> torch.Tensor | None:
        found_BSV = good.replay(tokens_BS.flip(0), routes[::-1])
        return None if found_BSV is None else found_BSV.flip(0)

    def step(tokens_BS: torch.Tensor, routes: Any) -> Mapping[tuple[int, str], torch.Tensor]:
        found: Mapping[tuple[int, str], torch.Tensor] = good.step(tokens_BS.flip(0), routes[::-1])
        return found

    return facet(session, "replay", replay=replay, step=step)


def _last_microbatch_recorded_first(session: Any, cell: Cell, world: World) -> Any:
    """Rows are recorded and replayed from the last to the first."""
    good = session.replay

    def turned(call: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def called(tokens_BS: torch.Tensor, *routes: Any) -> torch.Tensor | None:
            found_BSV = call(tokens_BS.flip(0), *routes)
            return None if found_BSV is None else found_BSV.flip(0)

        return called

    def step(tokens_BS: torch.Tensor, routes: None) -> Mapping[tuple[int, str], torch.Tensor]:
        found: Mapping[tuple[int, str], torch.Tensor] = good.step(tokens_BS.flip(0), routes)
        return found

    return facet(session, "replay", record=turned(good.record), replay=turned(good.replay), step=step)


def _flex_with_its_needs(session: Any, cell: Cell, world: World) -> Any:
    """Where flex is asked for, so is what it needs: weights in fp32, and no overlap of shared experts."""
    good = session.config

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = good.resolve(request, role)
        if settings.get("moe_token_dispatcher_type") != "flex":
            return settings
        return {**settings, "moe_router_dtype": "fp32", "moe_shared_expert_overlap": False}

    return facet(session, "config", resolve=resolve)


def _on_of_itself(session: Any, cell: Cell, world: World) -> Any:
    """Shared experts overlap unless that is asked for otherwise, and the loss is one by tokens, which is said."""
    good, own = session.config, {"moe_shared_expert_overlap": True, "calculate_per_token_loss": True}

    def resolve(request: Request, role: str) -> Mapping[str, Any]:
        asked = {**request.fields, **request.overrides}
        if asked.get("calculate_per_token_loss", True) is False:
            raise ValueError("calculate_per_token_loss: the loss here is a sum over tokens")
        return {**good.resolve(request, role), **{name: asked.get(name, value) for name, value in own.items()}}

    return facet(session, "config", given=lambda: {**good.given(), **own}, resolve=resolve)


def _gradients_as_views(session: Any, cell: Cell, world: World) -> Any:
    """Gradients come from the last parameter to the first, those of matrices as transposes of contiguous ones."""
    good = session.gradients

    def gradients(tokens_BS: torch.Tensor) -> Mapping[tuple[int, str], torch.Tensor]:
        found = reversed(list(good.gradients(tokens_BS).items()))
        return {key: one.t().contiguous().t() if one.dim() == 2 else one for key, one in found}

    return facet(session, "gradients", gradients=gradients)


def _logits_as_views(session: Any, cell: Cell, world: World) -> Any:
    """Logits are those of a larger tensor [S, B, V + 1], and still have their graph."""
    good = session.forward

    def logits(tokens_BS: torch.Tensor) -> torch.Tensor | None:
        found_BSV = good.logits(tokens_BS)
        if found_BSV is None:
            return None
        wider_SBV = torch.nn.functional.pad(found_BSV, (0, 1)).transpose(0, 1).contiguous().requires_grad_()
        return (wider_SBV * 1)[..., :-1].transpose(0, 1)

    return facet(session, "forward", logits=logits)


def _draws(session: Any, cell: Cell, world: World) -> Any:
    """Every forward and step draws numbers, on each rank one more than on the rank before."""
    forward, training = session.forward, session.gradients

    def drawn(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def called(tokens_BS: torch.Tensor) -> Any:
            torch.rand(world.rank + 1)
            return call(tokens_BS)

        return called

    session = facet(session, "forward", logits=drawn(forward.logits))
    return facet(session, "gradients", gradients=drawn(training.gradients))


@contextmanager
def _deterministic(cell: Cell, world: World) -> Iterator[None]:
    """torch's deterministic algorithms, and process groups of one's own beside Megatron's, made backwards."""
    torch.use_deterministic_algorithms(True)
    for rank in reversed(range(world.size)):
        dist.new_group([rank])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _state_restored(session: Any, cell: Cell, world: World) -> Any:
    """An export draws numbers and works in eval(), without gradients, and leaves all as it was."""

    def rewrite(pairs: Iterator[Pair]) -> Iterator[Pair]:
        modules = [module for chunk in session.export.chunks() for module in chunk.modules()]
        modes, numbers = [module.training for module in modules], torch.get_rng_state()
        try:
            for module in modules:
                module.training = False
            torch.rand(1)
            with torch.no_grad():
                yield from pairs
        finally:
            torch.set_rng_state(numbers)
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    return stream(session, rewrite)


def _in_another_default_dtype(session: Any, cell: Cell, world: World) -> Any:
    """A load sets torch's default dtype and restores it, and logs from a thread of its own."""

    def load(folder: Path) -> None:
        before, said = torch.get_default_dtype(), logging.getLogger("target").info
        thread = threading.Thread(target=said, args=("loading %s", folder))
        thread.start()
        torch.set_default_dtype(torch.float64)
        try:
            session.export.load(folder)
        finally:
            torch.set_default_dtype(before)
            thread.join()

    return facet(session, "export", load=load)


def _numbers_of_numpy(session: Any, cell: Cell, world: World) -> Any:
    """Seeds, padded lengths, shapes and settings are numbers of numpy."""
    seeds, config, dispatch = session.seeds, session.config, session.dispatch

    def padded(request: PadRequest) -> Padding:
        made: Padding = dispatch.padded(request)
        return replace(made, totals=tuple(np.array(made.totals)))

    def settings(given: Mapping[str, Any]) -> dict[str, Any]:
        return {name: np.array(value)[()] if type(value) in (int, float) else value for name, value in given.items()}

    session = facet(session, "seeds", planned=lambda *asked: {k: np.int64(v) for k, v in seeds.planned(*asked).items()})
    session = facet(
        session,
        "config",
        given=lambda: settings(config.given()),
        resolve=lambda request, role: settings(config.resolve(request, role)),
    )
    session = described(lambda meta: replace(meta, shape=tuple(np.array(meta.shape))))(session, cell, world)
    return facet(session, "dispatch", padded=padded)


def _all_of_the_config(session: Any, cell: Cell, world: World) -> Any:
    """Settings are `vars` of a config: functions, dtypes and objects among them, others with every call."""
    config = session.config

    def every(settings: Mapping[str, Any]) -> dict[str, Any]:
        besides = {"params_dtype": torch.float32, "init_method": lambda tensor: tensor, "timers": object()}
        return {**settings, **besides, "activation_func": torch.nn.functional.silu}

    return facet(
        session,
        "config",
        given=lambda: every(config.given()),
        resolve=lambda request, role: every(config.resolve(request, role)),
    )


def _loads_once(session: Any, cell: Cell, world: World) -> Any:
    """A model that has its weights takes no others."""
    loaded: list[Path] = []

    def load(folder: Path) -> None:
        if loaded:
            raise RuntimeError("the model is loaded already")
        session.export.load(folder)
        loaded.append(folder)

    return facet(session, "export", load=load)


def _rows_from_the_end(rows: Sequence[NameRow], rank: int) -> Iterable[NameRow]:
    return reversed(rows)


class _Wrapper(torch.nn.Module):
    """A module that runs another one, and has its config, as megatron-core's DistributedDataParallel does."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.config = module, module.config


def _wrapped(session: Any, cell: Cell, world: World) -> Any:
    """Chunks are wrapped twice, and local names say so."""
    chunks = [_Wrapper(_Wrapper(chunk)) for chunk in session.export.chunks()]

    def inside(method: Callable[..., Mapping[tuple[int, str], torch.Tensor]]) -> Callable[..., Any]:
        return lambda *asked: {(n, f"module.module.{local}"): one for (n, local), one in method(*asked).items()}

    session = names(session, lambda rows, _: (replace(row, local=f"module.module.{row.local}") for row in rows))
    session = facet(session, "gradients", gradients=inside(session.gradients.gradients))
    if cell.replay != "off":
        session = facet(session, "replay", step=inside(session.replay.step))
    return facet(session, "export", chunks=lambda: chunks)


def _parameters(chunk: Any) -> list[tuple[Any, str]]:
    """Every module of a chunk with each name of its own parameters."""
    modules = [(module, dict(module.named_parameters(recurse=False))) for module in chunk.modules()]
    return [(module, name) for module, own in modules for name in own]


def _on_meta(session: Any, cell: Cell, world: World) -> Any:
    """Parameters have no memory until they are loaded."""
    places = [place for chunk in session.export.chunks() for place in _parameters(chunk)]
    built = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, parameter in built:
        setattr(owner, name, torch.nn.Parameter(torch.empty_like(parameter, device="meta")))

    def load(folder: Path) -> None:
        for owner, name, parameter in built:
            setattr(owner, name, parameter)
        session.export.load(folder)

    return facet(session, "export", load=load)


def _replace_parameters(session: Any) -> None:
    """Give modules other parameters with the same values and attributes; tied ones stay tied."""
    new: dict[int, Any] = {}
    for chunk in session.export.chunks():
        for owner, name in _parameters(chunk):
            old = getattr(owner, name)
            made = new.setdefault(id(old), torch.nn.Parameter(old.detach().clone(), old.requires_grad))
            vars(made).update(vars(old))
            setattr(owner, name, made)


def _assigned(session: Any, cell: Cell, world: World) -> Any:
    """Every load gives modules other parameters, as `load_state_dict(assign=True)` does."""

    def load(folder: Path) -> None:
        session.export.load(folder)
        _replace_parameters(session)

    return facet(session, "export", load=load)


def _inferred(meta: TensorMeta, tensor: torch.Tensor) -> Pair:
    with torch.inference_mode():
        return meta, tensor.clone()


def _merges_alone(session: Any, cell: Cell, world: World) -> Any:
    """Neither the base is sent beside adapters, nor are adapters saved."""

    def refuse(*asked: Any) -> Any:
        raise NotImplementedError("weights are sent merged")

    return facet(session, "adapters", base=refuse, save=refuse, restore=refuse)


def _shared(part: str, factor: str) -> Callable[[Session, Cell, World], Any]:
    """A factor of linears of a layer is one: of those whose names are alike but for what `part` finds. On one rank."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        good, groups = session.adapters, list[list[Any]]()

        def attach(*asked: Any) -> None:
            good.attach(*asked)
            groups.extend(_grouped(session, part, factor))
            for first, *others in groups:
                for other in others:
                    other.data.copy_(first.data)

        def restore(*asked: Any) -> None:
            good.restore(*asked)
            groups[:] = _grouped(session, part, factor)

        def step(*asked: Any) -> None:
            before = [[of.data.clone() for of in group] for group in groups]
            good.step(*asked)
            for group, was in zip(groups, before, strict=True):
                moved = torch.stack([of.data - old for of, old in zip(group, was, strict=True)]).sum(0)
                for of, old in zip(group, was, strict=True):
                    of.data.copy_(old + moved)

        return facet(session, "adapters", attach=attach, restore=restore, step=step)

    return wrap


def _grouped(session: Any, part: str, factor: str) -> Iterator[list[Any]]:
    """The parameters of adapters that are to be one, found by marking each with a number."""
    parameters, found = [*adapters.trained(session).values()], dict[str, list[Any]]()
    held = [of.data.clone() for of in parameters]
    for number, of in enumerate(parameters):
        of.data.fill_(number + 1)
    for name, tensor in session.adapters.stream():
        if f"{factor}." in name and re.search(part, name):
            found.setdefault(re.sub(part, "", name), []).append(parameters[int(tensor.max()) - 1])
    for of, values in zip(parameters, held, strict=True):
        of.data.copy_(values)
    yield from found.values()


def _where_none(change: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, Cell, World], Any]:
    """Steps that train on no token are `change(gradients, rows_BS)`, of the plain loss and of a policy's."""

    def wrap(session: Any, cell: Cell, world: World) -> Any:
        def policy_gradients(tokens_BS: torch.Tensor, mask_BS: torch.Tensor, *more: Any) -> Any:
            if mask_BS.any():
                return session.policy.policy_gradients(tokens_BS, mask_BS, *more)
            return change(session.gradients, tokens_BS)

        return facet(where_none(change)(session, cell, world), "policy", policy_gradients=policy_gradients)

    return wrap


def _factor_behind_experts(chunk: Any) -> None:
    """Routers weigh without the factor of the config, by which what the routed experts give is multiplied."""

    def weighed(router: Any, given: Any, found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = found
        return probs / router.config.moe_router_topk_scaling_factor, routing_map

    def multiplied(experts: Any, given: Any, found: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        output, bias = found
        return output * experts.config.moe_router_topk_scaling_factor, bias

    for module in chunk.modules():
        if hasattr(module, "experts") and hasattr(module, "router"):
            module.router.register_forward_hook(weighed)
            module.experts.register_forward_hook(multiplied)


def _zeros(good: Any, rows_BS: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    return {key: 0 * one for key, one in good.gradients(rows_BS, rows_BS >= 0).items()}


def _refused_behind_it(good: Any, rows_BS: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """The step is taken, and leaves its gradients; then it is refused."""
    good.gradients(rows_BS, rows_BS >= 0)
    raise ValueError("no token to divide the loss by")


_DESIGNS = (
    Benign(
        id="last-microbatch-replayed-first",
        why="samples are ordered by their length, and their routes with them: verl's dynamic batches, slime",
        cell=cell("qwen3_moe", "tp2", batch="pairs", replay="R3"),
        wrap=_last_microbatch_replayed_first,
    ),
    Benign(
        id="last-microbatch-recorded-first",
        why="the same where the trainer itself records the routes",
        cell=cell("qwen3_moe", "ep2", replay="R2"),
        wrap=_last_microbatch_recorded_first,
    ),
    Benign(
        id="flex-with-its-needs",
        why="DeepEP takes weights in fp32 alone, and Megatron-Bridge's apply_flex_dispatcher_backend ends the overlap",
        cell=cell("qwen3_moe", "tp2", backend="static"),
        wrap=_flex_with_its_needs,
    ),
    Benign(
        id="factor-behind-the-experts",
        why="vLLM's DeepseekV2MoE multiplies what the routed experts give by routed_scaling_factor, not their weights",
        cell=cell("glm4_moe", "one", dtype="bfloat16", replay="R3"),
        wrap=each_chunk(_factor_behind_experts),
    ),
    Benign(
        id="one-lora-a-for-q-k-v",
        why="a fused linear has one lora_A for its parts, which is sent for each: Megatron-Bridge, mcore-bridge",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_shared(r"\.[qkv]_proj\.", "lora_A"),
    ),
    Benign(
        id="one-lora-a-for-experts",
        why="experts share the factor that meets the hidden state: Megatron-Bridge's SharedOuterGroupedExpertAdapter",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_shared(r"\.experts\.\d+\.(gate|up)_proj\.", "lora_A"),
    ),
    Benign(
        id="one-lora-b-for-experts",
        why="the other half of the same design: one lora_B for all down projections of a layer",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_shared(r"\.experts\.\d+\.down_proj\.", "lora_B"),
    ),
    Benign(
        id="adapters-on-all-ranks",
        why="engines that share the trainer's ranks load adapters on each of them: verl, SkyRL",
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=adapters.everywhere,
        claims={"receivers": "all"},
    ),
    Benign(
        id="adapters-merged-alone",
        why="a framework that sends merged weights to engines has no base to send beside adapters",
        cell=cell("qwen3_moe", "tp2", loss_mask=True),
        wrap=_merges_alone,
        claims={"adapter_base": False, "adapter_saves": False},
    ),
    Benign(
        id="adapters-merged-in-bf16",
        why="PEFT multiplies factors in the dtype of a base in bf16, and adds the product in it",
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", loss_mask=True),
        wrap=adapters.merged_in_bf16,
    ),
    Benign(
        id="base-lent-beside-adapters",
        why="the base's weights are whole on each rank, and an engine that copies them may read the model's own",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=adapters.lent("base"),
        claims={"lends": True},
    ),
    Benign(
        id="adapters-of-attention-alone",
        why="most engines load adapters of attention alone for a model with experts",
        cell=cell("qwen3_moe", "ep2", loss_mask=True),
        claims={"adapter_modules": frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})},
    ),
    Benign(
        id="chunks-wrapped-twice",
        why="DistributedDataParallel around Float16Module around GPTModel: local names begin with module.module.",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_wrapped,
    ),
    Benign(
        id="replayed-in-wrapped-chunks",
        why="routes are replayed in the model that trains, which is wrapped",
        cell=cell("qwen3_moe", "ep2", replay="R3"),
        wrap=_wrapped,
    ),
    Benign(
        id="mtp-detached",
        why="what trains a draft leaves the policy alone: megatron-core's mtp_detach_heads, slime#709",
        cell=cell("glm4_moe", "pp2", mtp=1),
        wrap=of_losses(detached),
        claims={"mtp_detached": True},
    ),
    Benign(
        id="mtp-where-all-up-to-it-are-trained-on",
        why="slime#751: a layer trains where every token from the next to the one it predicts is an answer's",
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=masked_layers(lambda mask_BS: mask_BS & mask_BS.roll(1, 1)),
        claims={"mtp_mask": "path", "mtp_in_policy": False},
    ),
    *(
        Benign(
            id=f"mtp-mean-of-{of}",
            why="megatron-core's own: each rank divides the loss of MTP layers by its tokens of a microbatch",
            cell=at,
            wrap=of_losses(change),
            claims={"mtp_mean": "microbatch", "mtp_in_policy": False},
        )
        for of, at, change in (
            ("packs", cell("glm4_moe", "one", mtp=1, batch="packed"), microbatch_means),
            ("trained-tokens", cell("glm4_moe", "one", mtp=1, loss_mask=True), microbatch_means),
            ("parts", cell("glm4_moe", "cp2", mtp=1), means_of_parts),
        )
    ),
    Benign(
        id="mtp-mean-per-token",
        why="calculate_per_token_loss: megatron-core's means of microbatches count by the decoder's tokens",
        cell=cell("glm4_moe", "one", mtp=1, loss_mask=True),
        wrap=of_losses(means_by_tokens),
        claims={"mtp_mean": "per_token", "mtp_in_policy": False},
    ),
    Benign(
        id="no-token-no-gradient",
        why="a batch without a signal makes an empty step: Megatron-LM clamps the number of tokens to 1",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_where_none(_zeros),
    ),
    Benign(
        id="no-token-refused-behind-its-step",
        why="the tokens of all ranks are counted after the backward pass, where gradients are divided by them",
        cell=cell("qwen3_moe", "one", loss_mask=True),
        wrap=_where_none(_refused_behind_it),
    ),
    Benign(
        id="no-memory-until-loaded",
        why="a model is built on torch's meta device, and gets memory as it is loaded: init_model_with_meta_device",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_on_meta,
        claims={"begins": "unset"},
    ),
    Benign(
        id="parameters-replaced-by-loading",
        why="load_state_dict(assign=True) keeps what it is given, and drops the parameters that were built",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_assigned,
    ),
    Benign(
        id="tensors-of-inference-mode",
        why="torch.inference_mode around an export costs less than no_grad, and forbids writes outside of it",
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_inferred),
    ),
    Benign(
        id="all-ranks-receive",
        why="engines that share the trainer's ranks load on each of them: mcore-bridge, mbridge, Megatron-Bridge",
        cell=cell("qwen3_moe", "pp2"),
        wrap=everywhere,
        claims={"receivers": "all"},
    ),
    Benign(
        id="each-rank-its-share",
        why="ranks that save or send on in parallel: each tensor goes to one of them",
        cell=cell("qwen3_moe", "pp2"),
        wrap=in_turn,
        claims={"receivers": "share"},
    ),
    Benign(
        id="live-parameters-lent",
        why="engines that share the trainer's memory copy what they are lent: Megatron-Bridge, mbridge, mcore-bridge",
        cell=cell("qwen3_moe", "pp2"),
        wrap=aliases,
        claims={"lends": True},
        should=("EXP-005",),
    ),
    Benign(
        id="sent-in-one-buffer",
        why="an engine that copies each tensor as it comes needs no memory for a second one: checkpoint engines",
        cell=cell("qwen3_moe", "pp2"),
        wrap=one_buffer,
        claims={"lasts": "next"},
    ),
    Benign(
        id="sent-in-buckets",
        why="few large transfers instead of many small ones: verl, slime",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_in_buckets,
    ),
    Benign(
        id="non-writers-yield-nothing",
        why="mcore-bridge with only_master_rank: the other ranks have nothing to pass on",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_silent,
        claims={"non_writers": "nothing"},
    ),
    Benign(
        id="each-stage-its-own",
        why="slime's update_weight_from_distributed: the first rank of each pipeline stage broadcasts what it holds",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_each_stage_sends_its_own,
        claims={"receivers": "share", "non_writers": "nothing"},
    ),
    Benign(
        id="logprobs-on-every-stage",
        why="verl and NeMo-RL broadcast them from the last stage to the others",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_logprobs_on_every_stage,
    ),
    Benign(
        id="bias-still-under-routes",
        why="no router chose the experts of given routes, and none is corrected for them: prime-rl#2953 (review)",
        cell=cell("glm4_moe", "ep2", batch="packed", replay="R3", bias_update=True),
        wrap=_bias_still_under_routes,
    ),
    Benign(
        id="replayed-by-own-hooks",
        why="slime and verl wrap the router's top-k, and leave Megatron's flag alone",
        cell=cell("qwen3_moe", "ep2", replay="R3"),
        wrap=_replayed_by_own_hooks,
    ),
    Benign(
        id="routes-without-holes",
        why="vLLM and SGLang return a route for every token that they run, so a negative expert is a mistake",
        cell=cell("qwen3_moe", "cp2", replay="R3"),
        wrap=_no_missing_rows,
        claims={"missing_rows": False},
    ),
    Benign(
        id="sent-backwards",
        why="a stream may have any order that all ranks and layouts share",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_backwards,
    ),
    Benign(
        id="written-by-the-last-rank",
        why="the writer is the rank nearest to the engine, which need not be rank 0",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_written_by_the_last_rank,
    ),
    Benign(
        id="read-ahead",
        why="the gather of the next tensor overlaps with the use of this one",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_read_ahead,
    ),
    Benign(
        id="strided-tensors",
        why="transposes are free as long as they are views: Megatron-Bridge's fused experts",
        cell=cell("qwen3_moe", "ep2"),
        wrap=each(_strided),
    ),
    Benign(
        id="collectives-between-tensors",
        why="ranks that meet after each tensor cannot run apart",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_collectives_between,
    ),
    Benign(
        id="no-plan",
        why="none of the released bridges announces what it will send",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_without_a_plan,
        claims={"has_plan": False},
    ),
    Benign(
        id="no-entropies",
        why="SkyRL computes none of packed logits, and a loss without a bonus for entropy needs none",
        cell=cell("qwen3_moe", "tp2"),
        wrap=_without_entropies,
        claims={"entropies": False},
    ),
    Benign(
        id="routers-by-walk",
        why="verl finds the routers by walking each chunk, and cuts the routes for them itself",
        cell=cell("qwen3_moe", "pp2-vpp2", layers=4, replay="R3"),
        wrap=walked,
        claims={"missing_rows": False},
        should=("RPL-009",),
    ),
    Benign(
        id="routes-cut-by-the-trainer",
        why="slime cuts the rows over CP and then over TP itself, and fills the row of the last token",
        cell=cell("qwen3_moe", "tp2-cp2", replay="R3"),
        wrap=walked,
        claims={"missing_rows": False},
        should=("RPL-009",),
    ),
    Benign(
        id="deltas-of-differences",
        why="SkyRL sends the exclusive or of two versions: versions and a hash keep it from being applied twice",
        cell=cell("qwen3_moe", "one", backend="static"),
        wrap=design(Differences, _XorOnce),
    ),
    Benign(
        id="deltas-of-whole-tensors",
        why="a transport may send all weights each time under the rules of deltas",
        cell=cell("qwen3_moe", "one", backend="static"),
        wrap=design(_AllWhole),
        should=("DLT-010",),
    ),
    Benign(
        id="fp8-of-another-design",
        why="a quantiser of its own, in fp32 and in the order of the stream, whose other ranks give nothing",
        cell=cell("deepseek_v3", "tp2", layers=3, dtype="bfloat16"),
        wrap=plain_fp8.design(),
    ),
    Benign(
        id="fp8-scales-in-bf16",
        why="Qwen's files have scales in bf16; DeepSeek's kernels take 1e-4 for the least magnitude of a block",
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16"),
        wrap=plain_fp8.design(_Bf16Scales),
    ),
    Benign(
        id="fp8-scales-as-powers-of-two",
        why="DeepSeek-V3.1's files have them, and Blackwell's tensor cores take no others",
        cell=cell("qwen3_moe", "one", dtype="bfloat16"),
        wrap=plain_fp8.design(PowersOfTwo),
        should=("QNT-006",),
    ),
    Benign(
        id="fp8-scales-in-e8m0",
        why="a power of two is its exponent, which kernels for scale_fmt ue8m0 take as it is",
        cell=cell("deepseek_v3", "one", layers=3, dtype="bfloat16"),
        wrap=plain_fp8.design(_E8M0),
    ),
    Benign(
        id="fp8-without-int4",
        why="who sends FP8 alone is asked for no INT4, which this design cannot read from a config",
        cell=cell("kimi_k25", "tp2", dtype="bfloat16"),
        wrap=plain_fp8.design(),
        claims={"sends_int4": False},
    ),
    Benign(
        id="int4-as-compressed-tensors-makes-it",
        why="its scales are the largest magnitude / 7.5 in the weight's dtype, and its shapes int64",
        cell=cell("kimi_k25", "tp2", dtype="bfloat16"),
        wrap=plain_fp8.design(_Sevens),
    ),
    Benign(
        id="mxfp4-turned-into-bf16-first",
        why="a script makes bf16 files before anything is loaded, with whole numbers, of which zero has no sign",
        cell=cell("gpt_oss", "tp2-ep2-etp1", dtype="bfloat16", mxfp4_checkpoint=True),
        wrap=_turned_into_bf16_first,
    ),
    Benign(
        id="optimizer-made-by-its-first-step",
        why="made after the weights are loaded it has no older copies of them, and norms are for clipping alone",
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_made_by_its_first_step,
        claims={
            "optimizer_offloads": False,
            "optimizer_reference": False,
            "optimizer_saves": False,
            "optimizer_schedules": False,
            "optimizer_settings": False,
            "optimizer_skips": False,
        },
    ),
    Benign(
        id="schedule-begins-with-a-rate",
        why="a step at the rate 0 moves nothing, and Megatron-Bridge#5399 asks that the first one has the next rate",
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        patch=_one_step_ahead,
    ),
    Benign(
        id="reference-read-from-its-files",
        why="a reference that is read when it is asked takes no memory; in fp32 weights are their own masters",
        cell=cell("glm4_moe", "one", optimizer_step=True),
        wrap=read_again(nothing_between, lambda chunk, name: True),
    ),
    Benign(
        id="vectors-decay-too",
        why="torch.optim.AdamW of all parameters decays norms and biases; Megatron's groups leave them out",
        cell=cell("gpt_oss", "one", layers=4, optimizer_step=True),
        patch=_vectors_decay,
    ),
    Benign(
        id="steps-that-are-not-finite-end-the-run",
        why="Megatron-LM's training ends by default (check_for_nan_in_loss_and_grad), torchtitan#4226's on all ranks",
        cell=cell("qwen3_moe", "ep2", optimizer_step=True),
        wrap=_refusing_what_is_not_finite,
    ),
    Benign(
        id="optimizer-saved-in-memory",
        why="a copy in the host's memory brings a run back without a file system, its weights too: Gemini, dlrover",
        cell=cell("qwen3_moe", "tp2", dtype="bfloat16", optimizer_step=True),
        wrap=_saved_in_memory,
    ),
    Benign(
        id="onloaded-to-other-addresses",
        why="verl and Relax bring parameters back as parts of flat buffers: a CPU's sums depend on where they begin",
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_at_other_addresses("onload"),
    ),
    Benign(
        id="restored-to-other-addresses",
        why="verl offloads what it has read of a checkpoint, and its first step has it in new memory",
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_at_other_addresses("restore"),
    ),
    Benign(
        id="onloaded-as-another-optimizer",
        why="what waits in files needs no memory of the host; parameters and optimizer are made anew around it",
        cell=cell("qwen3_moe", "ep2", dtype="bfloat16", optimizer_step=True),
        wrap=_made_anew,
    ),
    Benign(
        id="onloaded-all-at-once",
        why="torch_memory_saver without tags maps all memory again, and ends where none of it was unmapped",
        cell=cell("qwen3_moe", "pp2", optimizer_step=True),
        wrap=_all_at_once,
    ),
    Benign(
        id="logits-of-other-kernels",
        why="a head in three products of bf16, or another order of sums, is off transformers' by some 1e-5",
        cell=cell("qwen3_moe", "one", optimizer_step=True),
        wrap=_apart_by_rounding,
    ),
    Benign(
        id="padded-to-one-multiple",
        why="one multiple for every recipe and dispatcher: rows are wasted, and nothing has to be looked up",
        cell=cell("qwen3_moe", "tp2-cp2-ep2", backend="static"),
        wrap=_padded_to_128,
        should=("DSP-002",),
    ),
    Benign(
        id="surplus-warned-of",
        why="transformers' from_pretrained lists unexpected weights in a warning and goes on",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_surplus_warned_of,
    ),
    Benign(
        id="modules-read-when-built",
        why="a bridge that maps and checks all parameters once, as it builds the model, and exports by that map",
        cell=cell("qwen3_moe", "pp2"),
        wrap=unknown_skipped,
        claims={"unmapped": "built"},
    ),
    Benign(
        id="contradiction-refused",
        why="of two values for one setting none is better: a launcher may refuse to choose",
        cell=cell("glm4_moe", "tp1", backend="static"),
        wrap=_contradiction_refused,
        should=("CFG-010",),
    ),
    Benign(
        id="experts-recomputed",
        why="Megatron's moe_layer_recompute computes experts once more in the backward pass",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_experts(_recomputed),
    ),
    Benign(
        id="experts-filled-with-zero-rows",
        why="grouped GEMMs take so many rows, as do experts under moe_pad_expert_input_to_capacity",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_experts(_filled_to_16),
    ),
    Benign(
        id="backend-for-flex-alone",
        why="without flex Megatron reads no backend",
        cell=cell("qwen3_moe", "tp2-cp2-ep2", backend="static"),
        wrap=_type_alone,
    ),
    Benign(
        id="deepep-by-default",
        why="megatron-core's default backend of flex is deepep",
        cell=cell("qwen3_moe", "tp2-cp2-ep2", backend="static"),
        wrap=_deepep_not_named,
    ),
    Benign(
        id="settings-refused-by-name",
        why="validators of megatron-core, Megatron-LM, Megatron-Bridge and slime refuse loudly what cannot work here",
        cell=cell("qwen3_moe", "tp1", backend="static"),
        wrap=_validated,
        claims={"replay": frozenset({"off"}), "experts": frozenset({"sequential"})},
    ),
    Benign(
        id="on-unless-turned-off",
        why="Megatron-Bridge's providers overlap shared experts of themselves; NeMo-RL's loss is one by tokens",
        cell=cell("glm4_moe", "tp1", backend="static"),
        wrap=_on_of_itself,
    ),
    Benign(
        id="reference-for-logits-alone",
        why="slime and verl replay in the policy alone, and a reference needs no MTP layers and takes no step",
        cell=cell("glm4_moe", "tp1", mtp=1, backend="static"),
        wrap=_reference_for_logits_alone,
        should=("CFG-011",),
    ),
    Benign(
        id="expert-tensor-size-unset",
        why="expert_tensor_parallel_size=None is TP to megatron-core",
        cell=cell("qwen3_moe", "tp2", backend="static"),
        wrap=always(expert_tensor_parallel_size=None),
    ),
    Benign(
        id="data-in-one-order",
        why="stages that read the same batch shuffle it alike: python's and numpy's seeds are those of the run",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_data_in_one_order,
        should=("SED-005", "SED-006"),
    ),
    Benign(
        id="none-left-out",
        why="frameworks pass on what is set, and leave None to Megatron's defaults",
        cell=cell("glm4_moe", "tp1", backend="static"),
        wrap=_without_none,
    ),
    Benign(
        id="routed-in-fp64",
        why="the router's matrix is small, and frameworks raise its precision for every model: verl, NeMo-RL",
        cell=cell("glm4_moe", "tp1", backend="static", dtype="bfloat16"),
        wrap=_routed_in_fp64,
    ),
    Benign(
        id="scale-and-rotation-said",
        why="a provider's config holds what others pass to GPTModel, and the scale that Megatron would work out",
        cell=cell("glm4_moe", "tp1", backend="static"),
        wrap=_scale_and_rotation_said,
    ),
    Benign(
        id="rotation-by-rotary-dim",
        why="Megatron-Bridge#2602: MiniMax-M2's provider works the share out of rotary_dim, which files have alone",
        cell=cell("minimax_m2", "tp1", backend="static"),
        wrap=_scale_and_rotation_said,
    ),
    Benign(
        id="softmax-before-a-sigmoid",
        why="recipes of DeepSeek-V3 ask for a softmax before top-k, which a router of sigmoids does not read",
        cell=cell("deepseek_v3", "tp1", layers=3, backend="static"),
        wrap=always(moe_router_pre_softmax=True),
    ),
    Benign(
        id="factor-beside-plain-rope",
        why="Megatron's default of 40 stands beside a rope_type that does not read it",
        cell=cell("glm4_moe_lite", "tp1", layers=4, backend="static"),
        wrap=always(rope_type="rope", rotary_scaling_factor=40.0),
    ),
    Benign(
        id="padding-stays",
        why="a padding row needs no expert: dropping it before the exchange saves its way",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_padding_stays,
        should=("DSP-010",),
    ),
    Benign(
        id="tensors-in-shared-memory",
        why="an engine in another process on the node maps them: verl, SkyRL",
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_in_shared_memory),
    ),
    Benign(
        id="tensors-with-autograd",
        why="an exporter outside of no_grad hands out what requires gradients",
        cell=cell("qwen3_moe", "pp2"),
        wrap=each(_with_autograd),
    ),
    Benign(
        id="shapes-of-torch",
        why="torch.Size is a tuple, and a plan needs no more than an order",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_shapes_of_torch,
    ),
    Benign(
        id="loaded-twice",
        why="a load that is tried again after a failure, or first for the policy and then for the reference",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_loaded_again,
    ),
    Benign(
        id="parameters-in-one-buffer",
        why="megatron-core's distributed optimizer keeps parameters as views of its buffers",
        cell=cell("qwen3_moe", "ep2"),
        wrap=_in_one_storage,
    ),
    Benign(
        id="buffers-exported",
        why="the buffers of DistributedDataParallel hold the weights, and nothing moves them from there",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_from_built_memory,
        claims={"memory": "built"},
    ),
    Benign(
        id="unset-until-loaded",
        why="drawing numbers for a model that is loaded next takes minutes at size: perform_initialization=False",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_unset,
        claims={"begins": "unset"},
    ),
    Benign(
        id="vocabulary-cut",
        why="logits are cut to the vocabulary before anything reads them, so that its padding may hold anything",
        cell=cell("qwen3_moe", "ep2"),
        wrap=padded_with(lambda world: 0.01 * world.rank),
        should=("LOD-005",),
    ),
    Benign(
        id="buffer-made-by-the-first-forward",
        why="megatron-core's YarnRotaryEmbedding makes its tables anew where a longer sequence comes, as buffers",
        cell=cell("qwen3_moe", "one"),
        wrap=_caching,
    ),
    Benign(
        id="forward-row-by-row",
        why="logprobs of long samples are computed one by one",
        cell=cell("qwen3_moe", "tp2"),
        wrap=_row_by_row,
    ),
    Benign(
        id="last-microbatch-first",
        why="balancing by length reorders the samples of a step; sums come out in another order",
        cell=cell("qwen3_moe", "tp2"),
        wrap=_last_microbatch_first,
    ),
    Benign(
        id="gradients-as-views",
        why="DistributedDataParallel fills its buffers from the last layer on, and gradients are views of them",
        cell=cell("qwen3_moe", "tp2"),
        wrap=_gradients_as_views,
    ),
    Benign(
        id="logits-as-views",
        why="logits [S, B, V] are transposed and cut to the vocabulary without a copy, outside of no_grad",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_logits_as_views,
    ),
    Benign(
        id="numbers-drawn",
        why="data loaders and samplers draw between steps, on some ranks more than on others",
        cell=cell("qwen3_moe", "one"),
        wrap=_draws,
    ),
    Benign(
        id="state-restored",
        why="a context that switches to evaluation, and puts modes and generators back at its end",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_state_restored,
    ),
    Benign(
        id="deterministic",
        why="runs that are repeated bit for bit, in an engine that has process groups of its own",
        cell=cell("qwen3_moe", "ep2"),
        patch=_deterministic,
    ),
    Benign(
        id="loaded-in-another-default-dtype",
        why="transformers' from_pretrained sets torch's default dtype while it builds and loads",
        cell=cell("qwen3_moe", "one"),
        wrap=_in_another_default_dtype,
    ),
    Benign(
        id="numbers-of-numpy",
        why="least common multiples, seeds and sizes that numpy has computed are its integers",
        cell=cell("qwen3_moe", "pp2"),
        wrap=_numbers_of_numpy,
    ),
    Benign(
        id="settings-with-functions",
        why="vars(config) is the first that an adapter thinks of, and has what is no plain value",
        cell=cell("qwen3_moe", "tp1", backend="static"),
        wrap=_all_of_the_config,
    ),
    Benign(
        id="loaded-but-once",
        why="weights that an optimizer has copies of are not loaded again: it refuses",
        cell=cell("qwen3_moe", "one"),
        wrap=_loads_once,
        should=("LOD-002", "LOD-004"),
    ),
    Benign(
        id="names-from-the-end",
        why="the rows of a names table have no order that means anything",
        cell=cell("qwen3_moe", "pp2"),
        wrap=lambda session, cell, world: names(session, _rows_from_the_end),
    ),
)
BENIGN: dict[str, Benign] = {design.id: design for design in _DESIGNS}


targets: Mapping[str, FaultyTarget] = {name: FaultyTarget(design, kind="benign") for name, design in BENIGN.items()}

__all__ = ["BENIGN", "Benign", "targets"]
