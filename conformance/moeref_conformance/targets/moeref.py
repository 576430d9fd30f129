"""moeref as a target. No other file of the kit imports moeref."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moeref import bridge, config, delta, dispatcher, families, record, replay, seeds, sync
from moeref import vllm as engines
from moeref.bridge import adapters, loader
from moeref.config import core
from moeref.dispatcher import padding, reference, routing
from moeref.exporter import plan, quantise, stream
from moeref.layout import Layout
from moeref.replay import align
from moeref_conformance.contract import api as facets
from moeref_conformance.contract.api import Cell, Claims, Info, NameRow, Request, TensorMeta, TokenLogprobs, Turn, World
from moeref_conformance.contract.cells import (
    ADAPTER_MODULES,
    BIAS_UPDATE_RATE,
    ROUTER_LOSS_COEFFICIENT,
    ROUTER_LOSSES,
)
from moeref_conformance.contract.results import version_of

if TYPE_CHECKING:
    import torch

    from moeref.megatron import Built, Lora, Snapshot
    from moeref.megatron.optimizer import Trainer

Row = TypeVar("Row")


class _Tables:
    """The facets `names` and `plan`, which need no model."""

    def __init__(self, shards: bridge.ShardMap) -> None:
        self._shards, self._plan = shards, plan.Plan(shards)
        #: Rows by position: data-parallel replicas share them.
        self._rows: dict[tuple[int, ...], tuple[NameRow, ...]] = {}

    def table(self, rank: int) -> Sequence[NameRow]:
        position = self._shards.position(rank)
        if position not in self._rows:
            self._rows[position] = tuple(map(_row, self._shards.local_shards(rank)))
        return self._rows[position]

    def tensors(self) -> Sequence[TensorMeta]:
        return [_meta(t) for t in self._plan.tensors]


def _row(shard: bridge.LocalShard) -> NameRow:
    return NameRow(
        chunk=shard.chunk,
        local=shard.local_name,
        global_name=shard.param.name,
        hf=tuple(t.name for t in shard.param.hf) if shard.param.exports else (),
        shape=shard.shape,
        dtype=shard.param.dtype,
    )


def _meta(tensor: bridge.HFTensor) -> TensorMeta:
    return TensorMeta(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype)


class _Model:
    """The facets of a built model: `export`, `forward`, `logprobs`, `gradients`, `policy` and `replay`.

    `shards` maps the exported format.
    """

    def __init__(self, built: Built, shards: bridge.ShardMap, rank: int, cell: Cell) -> None:
        self._built, self._plan, self.rank = built, plan.Plan(shards), rank
        self._batch, self._size, self._moves_bias = cell.batch, cell.rows, cell.bias_update
        self._recorded: list[replay.Routes] = []
        #: Called after each load.
        self.loaded: Callable[[], None] = lambda: None

    def chunks(self) -> Sequence[torch.nn.Module]:
        return self._built.chunks

    def load(self, checkpoint: Path) -> None:
        loader.load(self._built.shard_map, self.rank, self._built.chunks, checkpoint)
        self.loaded()

    def plan(self) -> Sequence[TensorMeta]:
        loader.bind(self._plan.shard_map, self.rank, self._built.chunks)
        return [_meta(t) for t in self._plan.tensors]

    def stream(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        for tensor, full in stream.export(self._plan, self.rank, self._built.chunks):
            yield _meta(tensor), full
            del full

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        from moeref import megatron

        chunks, shards = self._built.chunks, self._built.shard_map
        if self._batch != "packed":
            return megatron.logits(chunks, shards, tokens_BS, self._size)
        found = megatron.packed_logits(chunks, shards, self._packs(tokens_BS))
        return None if found is None else _side_by_side([logits_SV for pack in found for logits_SV in pack])

    def logprobs(
        self, tokens_BS: torch.Tensor, temperature: float, routes: Sequence[Any] | None = None
    ) -> TokenLogprobs | None:
        if routes is None:
            return self._logprobs(tokens_BS, temperature)
        with self._replaying(tokens_BS, routes):
            return self._logprobs(tokens_BS, temperature)

    def _logprobs(self, tokens_BS: torch.Tensor, temperature: float) -> TokenLogprobs | None:
        from moeref import megatron

        chunks, shards = self._built.chunks, self._built.shard_map
        if self._batch != "packed":
            found = megatron.logprobs(chunks, shards, tokens_BS, self._size, temperature=temperature)
            return None if found is None else TokenLogprobs(*found)
        packs = megatron.packed_logprobs(chunks, shards, self._packs(tokens_BS), temperature=temperature)
        if packs is None:
            return None
        samples = [sample for pack in packs for sample in pack]
        return TokenLogprobs(*(_side_by_side(of) for of in zip(*samples, strict=True)))

    def gradients(
        self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor | None = None
    ) -> dict[tuple[int, str], torch.Tensor]:
        from moeref import megatron

        chunks, shards = self._built.chunks, self._built.shard_map
        if self._batch == "packed":
            given = self._packs(tokens_BS), None if mask_BS is None else self._packs(tokens_BS, mask_BS)
            return self._with_bias(functools.partial(megatron.packed_gradients, chunks, shards, *given))
        return self._with_bias(
            functools.partial(megatron.gradients, chunks, shards, tokens_BS, self._size, mask_BS=mask_BS)
        )

    def policy_gradients(
        self,
        tokens_BS: torch.Tensor,
        mask_BS: torch.Tensor,
        advantages_BS: torch.Tensor,
        temperature: float,
        entropy: float,
        routes: Sequence[Any] | None = None,
    ) -> dict[tuple[int, str], torch.Tensor]:
        given = tokens_BS, mask_BS, advantages_BS, temperature, entropy
        if routes is None:
            return self._policy_gradients(*given)
        with self._replaying(tokens_BS, routes, self._total(tokens_BS)):
            return self._policy_gradients(*given)

    def _policy_gradients(
        self,
        tokens_BS: torch.Tensor,
        mask_BS: torch.Tensor,
        advantages_BS: torch.Tensor,
        temperature: float,
        entropy: float,
    ) -> dict[tuple[int, str], torch.Tensor]:
        from moeref import megatron

        if self._batch == "packed":
            packs, masks, advantages = (self._packs(tokens_BS, of_BS) for of_BS in (tokens_BS, mask_BS, advantages_BS))
            of_packs = self._built.chunks, self._built.shard_map, packs, masks, advantages
            step = functools.partial(megatron.packed_policy_gradients, *of_packs)
            return self._with_bias(functools.partial(step, temperature=temperature, entropy=entropy))
        given = self._built.chunks, self._built.shard_map, tokens_BS, mask_BS, advantages_BS, self._size
        step = functools.partial(megatron.policy_gradients, *given)
        return self._with_bias(functools.partial(step, temperature=temperature, entropy=entropy))

    def _with_bias(
        self, gradients: Callable[..., dict[tuple[int, str], torch.Tensor]]
    ) -> dict[tuple[int, str], torch.Tensor]:
        """The gradients of a step, with the updated experts' bias where a cell updates it."""
        if not self._moves_bias:
            return gradients()
        held = {
            (number, name): bias
            for number, chunk in enumerate(self._built.chunks)
            for name, bias in chunk.named_buffers()
            if name.endswith(".expert_bias")
        }
        before = {key: bias.clone() for key, bias in held.items()}
        found = gradients(bias_rate=BIAS_UPDATE_RATE)
        found |= {key: bias.clone() for key, bias in held.items()}
        for key, bias in held.items():
            bias.copy_(before[key])
        return found

    def _given(self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None, total: int) -> list[replay.Routes]:
        """This rank's rows and layers of every microbatch. `total` is the padded length of packed samples."""
        if routes is None:
            return self._recorded
        if len(routes) != len(tokens_BS):
            raise replay.RouteError(f"routes of {len(routes)} samples for {len(tokens_BS)}")
        layout, model = self._built.shard_map.layout, self._built.shard_map.model
        lengths = (tokens_BS >= 0).sum(1).tolist()
        rows = [_whole(sample, length, model) for sample, length in zip(routes, lengths, strict=True)]
        if self._batch == "packed":
            padded = padding.plan(layout)
            total = max([total, *(padded.pack(of).total for of in _groups(lengths, self._size))])
            joined = [replay.packed(of, padded, total=total) for of in _groups(rows, self._size)]
        else:
            joined = [replay.batched(group) for group in _groups(rows, self._size)]
        pp, vps = layout.coords(self.rank).pp, range(layout.vpp)
        layers = sorted(i for vp in vps for i in align.stage_layers(layout, model.moe_layers, pp, vp))
        found = [replay.select_layers(replay.shard_to_rank(of, layout, self.rank), layers) for of in joined]
        return found + found[-1:] * (-len(found) % (layout.pp if layout.vpp > 1 else 1))

    def record(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        from moeref.megatron import replay as controller

        with controller.recording(self._built.chunks) as recorded:
            logits = self.logits(tokens_BS)
        self._recorded = [recorded.routes(number) for number in range(recorded.microbatches)]
        return logits

    def replay(self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None) -> torch.Tensor | None:
        with self._replaying(tokens_BS, routes):
            return self.logits(tokens_BS)

    def step(self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None) -> dict[tuple[int, str], torch.Tensor]:
        with self._replaying(tokens_BS, routes, self._total(tokens_BS)):
            return self.gradients(tokens_BS)

    def _total(self, tokens_BS: torch.Tensor) -> int:
        """The length to which a training step pads packed samples; 0 of others."""
        from moeref import megatron

        if self._batch != "packed":
            return 0
        return megatron.packed_total(self._built.chunks, self._built.shard_map, self._packs(tokens_BS))

    def _packs(self, tokens_BS: torch.Tensor, of_BS: torch.Tensor | None = None) -> list[Sequence[torch.Tensor]]:
        """The samples of each microbatch, rows without what stands behind their end; or the same parts `of_BS`."""
        rows = zip(tokens_BS, tokens_BS if of_BS is None else of_BS, strict=True)
        return _groups([of_S[row_S >= 0] for row_S, of_S in rows], self._size)

    def _replaying(
        self, tokens_BS: torch.Tensor, routes: Sequence[Any] | None, total: int = 0
    ) -> AbstractContextManager[object]:
        from moeref.megatron import replay as controller

        return controller.replaying(self._built.chunks, self._given(tokens_BS, routes, total))


def _whole(sample: Any, tokens: int, model: families.Model) -> replay.Routes:
    """The routes of a sample's tokens from those of an engine."""

    def sent(turn: Turn) -> replay.Routes:
        return replay.from_engine(turn.routes, replay.Spec.of(model), start=turn.start)

    turns = sample if isinstance(sample, list) else [Turn(0, sample)]
    return replay.to_tokens(functools.reduce(replay.join_turns, map(sent, turns)), tokens)[0]


def _groups(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    """Each `size` rows that follow each other."""
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def _side_by_side(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.nn.utils.rnn.pad_sequence(list(logits), batch_first=True)


class _Optimizer:
    """moeref's trainer, whose master weights are made anew after each load."""

    _trainer: Trainer
    _reference: Snapshot

    def __init__(self, model: _Model, built: Built) -> None:
        self._model, self._built = model, built

    def make(self, settings: Mapping[str, float | str] | None = None) -> None:
        from moeref.megatron.optimizer import Schedule, Trainer

        given: dict[str, Any] = {"lr": 0.0, "clip_grad": 0.0, **(settings or {})}
        names = {"end": "lr_decay_iters", "warmup": "lr_warmup_iters", "style": "lr_decay_style", "min_lr": "min_lr"}
        schedule = {field: given.pop(name) for field, name in names.items() if name in given}
        self._trainer = Trainer(self._built, schedule=Schedule(**schedule) if schedule else None, **given)
        self._model.loaded = self._loaded

    def _loaded(self) -> None:
        from moeref import megatron

        self._trainer.reload()
        self._reference = megatron.Snapshot(self._built.chunks)

    def step(self, tokens_BS: torch.Tensor, rate: float | None) -> float | None:
        import torch

        from moeref.megatron.optimizer import NotFiniteError

        labels_BS = tokens_BS.roll(-1, 1)

        def loss(logits_BSV: torch.Tensor, rows: Sequence[int], at_S: torch.Tensor) -> torch.Tensor:
            wanted_BS = labels_BS.to(logits_BSV.device)[list(rows)][:, at_S]
            total = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten(), reduction="sum")
            return total / labels_BS.shape[1]

        if rate is not None:
            for group in self._trainer.optimizer.param_groups:
                group["lr"] = rate
        try:
            self._trainer.step(tokens_BS, loss)
        except NotFiniteError:
            return math.nan
        # Where gradients are not clipped, this is their norm as the step took them.
        return float(self._trainer.optimizer.get_grad_norm())

    def reference(self, tokens_BS: torch.Tensor) -> torch.Tensor | None:
        with self._reference.in_place():
            return self._model.logits(tokens_BS)

    def save(self, folder: Path) -> None:
        self._trainer.save(folder)

    def restore(self, folder: Path) -> None:
        self._trainer.restore(folder)

    def offload(self) -> None:
        self._trainer.offload()

    def onload(self, weights_only: bool) -> None:
        self._trainer.onload(weights_only=weights_only)


class _Adapters:
    """moeref's LoRA on the session's own model."""

    _lora: Lora

    def __init__(self, model: _Model, built: Built) -> None:
        self._model, self._built = model, built

    def attach(self, checkpoint: Path, rank: int, alpha: float, modules: Sequence[str]) -> None:
        from moeref import megatron

        self._model.load(checkpoint)
        known = adapters.modules(self._built.shard_map.model)
        asked = [name for name in modules if name in known]
        self._lora = megatron.Lora(self._built, self._model.rank, r=rank, alpha=alpha, modules=asked)

    def stream(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for tensor, full in self._lora.stream():
            yield tensor.name, full
            del full

    def merged(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        with self._lora.merged():
            yield from self._model.stream()

    def base(self) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
        with self._lora.off():
            yield from self._model.stream()

    def save(self, folder: Path) -> None:
        self._lora.save(_of_first(folder))

    def restore(self, checkpoint: Path, folder: Path) -> None:
        from moeref import megatron

        self._lora.detach()
        self._model.load(checkpoint)
        self._lora = megatron.Lora.saved(self._built, self._model.rank, _of_first(folder))

    def logits(self, tokens_BS: torch.Tensor, base: bool = False) -> torch.Tensor | None:
        with self._lora.off() if base else nullcontext():
            return self._model.logits(tokens_BS)

    def step(self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rate: float) -> None:
        gradients = self._model.gradients(tokens_BS, mask_BS)
        for key, parameter in self._lora.parameters().items():
            parameter.data -= rate * gradients[key]

    def chunks(self) -> Sequence[torch.nn.Module]:
        return self._built.chunks


def _of_first(folder: Path) -> Path:
    """The folder of rank 0."""
    import torch.distributed as dist

    given = [folder]
    dist.broadcast_object_list(given, src=0)
    return given[0]


class _Quantised:
    def __init__(self, model: _Model) -> None:
        self._model = model

    def stream(self, config: Path) -> Iterator[tuple[str, torch.Tensor | None]]:
        return quantise.quantised(((meta.name, tensor) for meta, tensor in self._model.stream()), config)


class _Seeds:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def planned(self, rank: int, seed: int, per_dp: bool) -> dict[str, int]:
        return seeds.rank_seeds(self._layout, rank, seed, per_dp=per_dp).generators

    def install(self, seed: int, per_dp: bool) -> None:
        from moeref.megatron import seeding

        seeding.seed_rank(self._layout, seed, per_dp=per_dp)

    def save(self) -> Any:
        from moeref.megatron import seeding

        return seeding.save()

    def restore(self, states: Any) -> None:
        from moeref.megatron import seeding

        seeding.restore(states)


class _Sender:
    def __init__(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._sender = delta.Sender(version, weights.items())

    def delta(self, version: int, weights: Mapping[str, torch.Tensor]) -> Sequence[bytes]:
        return self._sender.delta(version, weights.items())

    def acknowledge(self, receipt: Any) -> None:
        self._sender.acknowledge(receipt.version, receipt.hash)


class _Receiver:
    def __init__(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._receiver = weights, delta.Receiver(version, weights)

    def apply(self, messages: Sequence[bytes]) -> delta.State:
        return self._receiver.apply(messages)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._weights


class _Delta:
    def sender(self, version: int, weights: Mapping[str, torch.Tensor]) -> facets.DeltaSender:
        return _Sender(version, weights)

    def receiver(self, version: int, weights: Mapping[str, torch.Tensor]) -> facets.DeltaReceiver:
        return _Receiver(version, weights)


class _Dispatch:
    def __init__(self, layout: Layout, name: str) -> None:
        self._layout, self._name, self._core = layout, name, importlib.metadata.version("megatron-core")

    def padded(self, request: facets.PadRequest) -> facets.Padding:
        recipe = None if request.precision == "bf16" else request.precision
        made = padding.plan(self._layout, recipe=recipe, dispatcher=request.dispatcher)
        samples = tuple(made.pack(lengths).samples for lengths in request.lengths)
        return facets.Padding(samples=samples, totals=made.group([sum(padded) for padded in samples]))

    def settings(self, request: facets.DispatcherRequest) -> dict[str, Any]:
        # Not as training: under 0.16 the table refuses ETP at EP=1 for its gradients, which moeref's model corrects.
        setup = dispatcher.Setup(
            layout=self._layout,
            sequence_parallel=self._layout.tp > 1,
            experts=8 * self._layout.ep,
            precision=request.precision,  # type: ignore[arg-type]
            equal_rows=request.equal_rows,
            training=False,
        )
        there = dispatcher.Environment(core=self._core, packages=request.packages, gpu=request.gpu)
        return dispatcher.select(request.dispatcher, setup, there).settings

    def round_trip(
        self, rows: facets.RoutedRows, expert: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> facets.RoundTrip:
        import torch
        from megatron.core import parallel_state

        groups = reference.Groups(
            ep=parallel_state.get_expert_model_parallel_group(),
            etp=parallel_state.get_expert_tensor_parallel_group(),
            etp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
        )
        experts_TK, weights_TK = routing.pad_rows(rows.experts_TK, rows.weights_TK, rows.padding_T, rows.experts)
        map_TE = reference.routing_map(experts_TK, rows.experts)
        weights_TE = weights_TK.new_zeros(map_TE.shape).scatter(1, experts_TK, weights_TK)
        found = reference.DISPATCH[self._name](rows.x_TH, weights_TE, map_TE, groups)
        pieces = torch.split(found.rows_RH, found.counts_L.tolist())
        numbered = zip(groups.experts(rows.experts), pieces, strict=True)
        outputs_RH = torch.cat([expert(*one) for one in numbered]) * found.weights_R[:, None]
        counts_E = routing.expert_counts(map_TE, rows.padding_T)
        return facets.RoundTrip(y_TH=found.combine(outputs_RH), counts_E=counts_E)


class _Config:
    """The settings that moeref makes of requests, read from a real TransformerConfig."""

    def __init__(self, model: families.Model, layout: Layout, cell: Cell, built: Built | None, device: str) -> None:
        self._model, self._layout, self._built, self._cell = model, layout, built, cell
        self._device = device.partition(":")[0]
        # A cell's dispatcher and replay are passed as fields, so that a request's fields replace them.
        chosen = dispatcher.settings(dispatcher.Choice(cell.dispatcher))
        self._fields = {name: value for name, value in chosen.items() if value is not None}
        if cell.replay != "off":
            self._fields["moe_enable_routing_replay"] = True
        self._fields, self._through = _with_loss(cell, self._fields)

    def given(self) -> dict[str, Any]:
        return dict(self._built.settings.values) if self._built else self._settings(self._asked(Request()))

    def resolve(self, request: Request, role: str) -> dict[str, Any]:
        policy = self._asked(request)
        return self._settings(policy if role == "policy" else config.for_reference(policy))

    def _asked(self, request: Request) -> config.MoEConfig:
        through = {"transformer_config_kwargs": {**self._through, **request.overrides}}
        return config.MoEConfig.from_mapping({**self._fields, **request.fields, **through})

    def _settings(self, asked: config.MoEConfig) -> dict[str, Any]:
        from moeref import megatron

        named = {**asked.fields, **asked.transformer_config_kwargs}
        free = ("dispatcher", "replay", *(["experts"] if "moe_grouped_gemm" in named else []))
        options = {name: value for name, value in _options(self._cell).items() if name not in free}
        made = record.Record.of(self._model, self._layout, asked, record.Options(**options))
        return dict(megatron.transformer_config(made, self._device)[1].values)


def _options(cell: Cell) -> dict[str, Any]:
    """moeref's options for a cell, besides the model and the layout."""
    names = ("dispatcher", "replay", "kernels", "norms", "experts")
    return {**{name: getattr(cell, name) for name in names}, "precision": cell.precision or None}


def _with_loss(cell: Cell, fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of MoEConfig, and what goes through it, with the loss of the routers that a cell asks for."""
    if not cell.router_loss:
        return dict(fields), {}
    if cell.router_loss == "z_loss":
        return dict(fields), {"moe_z_loss_coeff": ROUTER_LOSS_COEFFICIENT}
    kind = {"moe_router_load_balancing_type": cell.router_loss}
    return {**fields, **kind}, {"moe_aux_loss_coeff": ROUTER_LOSS_COEFFICIENT}


class _Engine:
    """vLLM in a process of its own. `mode` is what an update does to requests that are under way."""

    def __init__(self, process: engines.Process, checkpoint: Path, mode: str) -> None:
        self._model = families.read(checkpoint, "float32")
        size = {"max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
        process.start(engines.engine_args(checkpoint, self._model, max_model_len=256, routes=True, **size))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = engines.Place("127.0.0.1", free.getsockname()[1], 2, seconds=20)
        self._process, self._mode = process, mode
        self._engine = engines.Engine(process, place, mode=mode)  # type: ignore[arg-type]
        # Many buckets, so that failures come between them.
        self._sync = sync.WeightSync(self._engine, bucket_bytes=1 << 18)

    def _alive(self) -> None:
        if self._sync.state is sync.State.DEAD:
            raise sync.EngineDead(self._sync.reason)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        during: Callable[[], None] | None = None,
        temperature: float = 1.0,
    ) -> list[facets.Sampled]:
        self._alive()
        # vLLM has no routes of requests that end early, and those of an update's samples are of two versions.
        routes = during is None
        sampling = engines.sampling(tokens, ignore_eos=True, temperature=temperature)
        self._process.call("submit", prompts=prompts, sampling=sampling)
        if during:
            self._process.call("advance", tokens=1)
            during()
        if not during or self._mode != "abort":
            self._process.call("advance")
        return [
            facets.Sampled(
                tokens=tuple(one.tokens_T[one.prompt :].tolist()),
                logprobs=tuple(one.logprobs_G.tolist()),
                versions=tuple(one.versions_G.tolist()),
                routes=_rows(one.routes) if one.routes else None,
            )
            for one in self._process.call("collect", model=self._model, routes=routes)
        ]

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self._sync.update(tensors, version)

    def version(self) -> int:
        self._alive()
        return self._engine.version()

    def pids(self) -> Sequence[int]:
        return [] if self._process.pid is None else [self._process.pid]


def _rows(routes: replay.Routes) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The rows of all tokens but the last, of which moeref makes one of its own."""
    return tuple(tuple(tuple(taken) for taken in row) for row in routes.idx_TLK[:-1].tolist())


class _Sync:
    """Engines one after the other, under one process that imports vllm once."""

    def __init__(self) -> None:
        self._process: engines.Process | None = None

    def modes(self) -> Sequence[str]:
        return ("abort", "keep")

    @contextmanager
    def open(self, checkpoint: Path, mode: str) -> Iterator[_Engine]:
        self._process = self._process or engines.Process()
        try:
            yield _Engine(self._process, checkpoint, mode)
        finally:
            self._process.stop()

    def close(self) -> None:
        if self._process:
            self._process.close()


class _Serving:
    """The session of a cell with an engine."""

    names = config = seeds = dispatch = plan = delta = export = None
    forward = logprobs = replay = gradients = policy = optimizer = adapters = quantised = None

    def __init__(self, engine: _Sync) -> None:
        self.sync = engine


class _Session:
    sync = None

    def __init__(
        self, shards: bridge.ShardMap, cell: Cell, device: str, built: Built | None = None, model: _Model | None = None
    ) -> None:
        layout = shards.layout
        self.names = self.plan = _Tables(shards)
        self.delta = _Delta()
        self.seeds, self.dispatch = _Seeds(layout), _Dispatch(layout, cell.dispatcher)
        self.config = _Config(shards.model, layout, cell, built, device)
        self.export = self.forward = self.logprobs = self.gradients = self.policy = self.replay = model
        self.quantised = None if model is None else _Quantised(model)
        trained = None if model is None or built is None else (model, built)
        self.optimizer = _Optimizer(*trained) if trained else None
        self.adapters = _Adapters(*trained) if trained else None


#: Whether megatron-core is 0.19 or newer.
_IS_OF_019 = tuple(int(part) for part in record.installed_core().split(".")[:2]) >= (0, 19)
#: Families with sparse attention, whose indexers have settings of their own since 0.19.
_SPARSE = frozenset(
    name for name, family in families.FAMILIES.items() if any(one.where == "indexer" for one in family.mappings)
)


def _limits() -> dict[str, int]:
    """Of Qwen3-Next and Qwen3.5 before megatron-core 0.19.

    Gated delta nets take what a CP rank holds for a whole sequence, and no packed samples. TP ranks that share a KV
    group keep the gates of all its heads.
    """
    if _IS_OF_019:
        return {}
    packed = {f"{family}.rows": 2 for family in ("qwen3_next", "qwen3_5_moe_text")}
    return {"qwen3_next.cp": 1, "qwen3_next.shared_groups": 0, **packed}


class MoerefTarget:
    """moeref, judged like any other target. The vocabulary is padded to a multiple of `divisible_by` times TP."""

    def __init__(self, divisible_by: int = bridge.VOCAB_DIVISIBLE_BY) -> None:
        self._divisible_by = divisible_by

    info = Info(name="moeref", version=version_of("moeref") or "from source")
    claims = Claims(
        facets=frozenset(facets.FACETS),
        families=frozenset({*families.FAMILIES, *families.ALIASES}) - (frozenset() if _IS_OF_019 else _SPARSE),
        backends=frozenset({"static", "gloo", "gloo-cuda", "nccl", "engine"}),
        expert_formats=frozenset({"per_expert", "fused", "fused_decoder"}),
        norms=frozenset({"separate", "fused"}),
        engine_routes=True,
        mtp=2,
        mtp_in_policy=True,
        leaves_mtp_out=True,
        reads_fp8=True,
        reads_int4=True,
        reads_mxfp4=True,
        experts=frozenset({"sequential", "grouped"}),
        dispatchers=frozenset(dispatcher.Choice),
        kernels=frozenset({"torch", "te"}),
        precisions=frozenset({"", "delayed", "tensorwise", "blockwise", "mxfp8"}),
        replay=frozenset({"off", "R2", "R3"}),
        batches=frozenset({"single", "pairs", "packed"}),
        # Megatron's global one is divided by the number of replicas twice (Megatron-LM#3672).
        router_losses=frozenset({"", *ROUTER_LOSSES} - {"global_aux_loss"}),
        bias_updates=True,
        loss_masks=True,
        limits=_limits(),
        optimizer_steps=True,
        optimizer_offloads=True,
        optimizer_reference=True,
        optimizer_saves=True,
        optimizer_schedules=True,
        sends_int4=True,
        optimizer_settings=True,
        optimizer_skips=True,
        adapter_modules=frozenset(ADAPTER_MODULES),
        adapter_base=True,
        adapter_saves=True,
    )

    def preload(self) -> None:
        """Import what uses megatron-core, and read its version and fields, once instead of in every rank."""
        for name in ("megatron", "megatron.replay", "megatron.seeding", "megatron.optimizer"):
            importlib.import_module(f"moeref.{name}")
        # What torch and Megatron import in the first optimizer or the first step: more than a second in each rank.
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch.utils.serialization.config")  # of torch.save
        with suppress(ImportError):  # older versions of torch
            importlib.import_module("torch.profiler._cupti_monitor")
        with suppress(ImportError):  # and of megatron-core lack them
            importlib.import_module("megatron.core.models.hybrid.hybrid_block")
            importlib.import_module("megatron.core.models.mimo.optimizer")
        for mla in (False, True):
            core.transformer_config(record.installed_core(), mla=mla)

    @contextmanager
    def open(self, cell: Cell, world: World) -> Iterator[_Session | _Serving]:
        if world.backend == "engine":
            with closing(_Sync()) as engine:
                yield _Serving(engine)
            return
        layout, model = Layout.parse(cell.layout.text), families.read(world.hf_config, cell.dtype)
        model = model.with_mtp(0) if cell.mtp_left_out else model
        if world.backend == "static":
            names = families.SpecNames(norms=cell.norms, experts=cell.experts)  # type: ignore[arg-type]
            shards = bridge.ShardMap(model, layout, names, cell.expert_format)  # type: ignore[arg-type]
            yield _Session(shards, cell, world.device)
            return
        from moeref import megatron

        rank = megatron.initialise(layout, tied=model.tied)
        try:
            options = record.Options(**_options(cell), divisible_by=self._divisible_by)
            fields, through = _with_loss(cell, {})
            asked = config.MoEConfig(**fields, transformer_config_kwargs=through)
            built = megatron.build(record.Record.of(model, layout, asked, options), rank, world.device)
            shards = built.shard_map.in_format(cell.expert_format)  # type: ignore[arg-type]
            yield _Session(shards, cell, world.device, built, _Model(built, shards, rank, cell))
        finally:
            megatron.shut_down()


#: What `--target moeref` names.
target = MoerefTarget


def unpadded() -> MoerefTarget:
    """moeref with no more vocabulary rows than TP needs, as bridges build it, to compare shards with theirs."""
    return MoerefTarget(divisible_by=1)


__all__ = ["MoerefTarget", "target", "unpadded"]
