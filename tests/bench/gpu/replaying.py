"""What recording and replaying routes cost on the device, over the forward of the routers themselves.

Routes given by hand must be the ones each router then takes. The costs are those of copies to and from the host: moeref
copies the choices of each layer when a microbatch ends, and the targets of all layers at once before it. Next to them
stand the same with copies that wait once a schedule, with targets that are on the device already, and the copies alone,
since what a whole forward takes more may be lost in its own spread.
megatron-core's fused router (`moe_router_fusion`, a kernel of Transformer Engine) goes round RouterReplay: refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu import models
from tests.bench.gpu.figures import Disagreement, Figure, Timing, ratio, timed

REPLAY = {"moe_enable_routing_replay": True}
#: Sequences of a microbatch: short ones, so that attention does not hide what is measured.
ROWS = 8


def bench(device: torch.device, sizes: models.Sizes, folder: Path, *, spoil: bool = False) -> list[Figure]:
    """Ratios of a schedule's forwards with and without replay, and the share of the routers' own time."""
    from moeref.megatron import replay

    model = sizes.model(layers=sizes.layers, vocab_size=1024)
    built = models.made(model, device, overrides=REPLAY)
    chunk = built.chunks[0].eval()
    schedule = partial(
        _schedule, chunk, [_batch(sizes, model.vocab, device, seed) for seed in range(sizes.microbatches)]
    )
    idx_MTLK = torch.stack([_routes(sizes, model, seed) for seed in range(sizes.microbatches)])
    given = [_as_routes(idx_TLK, model.experts) for idx_TLK in idx_MTLK]
    if spoil:
        idx_MTLK = idx_MTLK.roll(1, dims=0)
    _check(chunk, schedule, given, idx_MTLK)

    walked = [router.replay for router in replay.routers(chunk)]
    pinned = [torch.empty(idx_MTLK[:, :, 0].shape, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in walked]
    targets = idx_MTLK.to(device)

    hidden = torch.randn(sizes.tokens, 1, model.hidden, device=device).to(next(chunk.parameters()).dtype)
    modules = [router.module for router in replay.routers(chunk)]
    ways: dict[str, Callable[[], Any]] = {
        "recording": partial(_inside, lambda: replay.recording([chunk]), schedule),
        "recording, one wait a schedule": partial(_recording_at_once, walked, pinned, schedule, device),
        "replaying": partial(_inside, lambda: replay.replaying([chunk], given), schedule),
        "replaying, targets on the device": partial(_replaying_from_device, walked, targets, schedule),
    }
    calls: list[Callable[[], Any]] = [schedule, partial(_route, modules, hidden, sizes.microbatches), *ways.values()]
    native, routed, *others = timed(device, *calls, rounds=sizes.rounds)
    found = [ratio("routers alone", routed, native, "the forwards of the schedule")]
    for name, taken in zip(ways, others, strict=True):
        found += [ratio(name, taken, native, "the same without"), _share(name, taken, native, routed)]
    return [*found, *_copies(targets, pinned, routed, sizes), *_fused(chunk, modules, hidden, sizes)]


def _inside(context: Callable[[], AbstractContextManager[Any]], schedule: Callable[..., None]) -> None:
    with context():
        schedule()


def _recording_at_once(
    walked: list[Any], pinned: list[torch.Tensor], schedule: Callable[..., None], device: torch.device
) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def after(microbatch: int) -> None:
        for router, into in zip(walked, pinned, strict=True):
            into[microbatch].copy_(router.get_recorded_indices(), non_blocking=True)

    _directly(walked, RouterReplayAction.RECORD, lambda microbatch: None, after, schedule)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _replaying_from_device(walked: list[Any], targets: torch.Tensor, schedule: Callable[..., None]) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    def before(microbatch: int) -> None:
        for layer, router in enumerate(walked):
            router.set_target_indices(targets[microbatch, :, layer])

    _directly(walked, RouterReplayAction.REPLAY_FORWARD, before, lambda microbatch: None, schedule)


def _batch(sizes: models.Sizes, vocab: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, positions = models.tokens(sizes, vocab, device, seed)
    return tokens.view(ROWS, -1), positions[:, : sizes.tokens // ROWS].expand(ROWS, -1)


def _copies(targets: torch.Tensor, pinned: list[torch.Tensor], routed: Timing, sizes: models.Sizes) -> list[Figure]:
    """What a schedule copies, without anything around it, over the time of its routers."""
    device, on_host = targets.device, targets.cpu()
    pieces = [(m, layer) for m in range(len(targets)) for layer in range(targets.shape[2])]
    there = [targets[m, :, layer].contiguous() for m, layer in pieces]
    here = [on_host[m, :, layer].contiguous() for m, layer in pieces]

    def at_once() -> None:
        for (m, layer), idx_TK in zip(pieces, there, strict=True):
            pinned[layer][m].copy_(idx_TK, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    ways: dict[str, Callable[[], Any]] = {
        "copies of recording alone": lambda: [idx_TK.cpu() if device.type == "cuda" else +idx_TK for idx_TK in there],
        "copies of recording alone, one wait a schedule": at_once,
        "copies of replaying alone": lambda: [idx_TK.to(device, copy=True) for idx_TK in here],
    }
    times = timed(device, *ways.values(), rounds=sizes.rounds)
    return [ratio(name, taken, routed, "the routers alone") for name, taken in zip(ways, times, strict=True)]


def _schedule(
    chunk: Any,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    before: Callable[[int], None] = lambda microbatch: None,
    after: Callable[[int], None] = lambda microbatch: None,
) -> None:
    with torch.no_grad():
        for microbatch, given in enumerate(batches):
            before(microbatch)
            chunk(*given, None)
            after(microbatch)


def _route(modules: list[Any], hidden: torch.Tensor, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            for module in modules:
                module(hidden)


def _routes(sizes: models.Sizes, model: Any, seed: int) -> torch.Tensor:
    """Random distinct experts [T, L, K], none of them the router's own choice but by chance."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sizes.tokens, sizes.layers, model.experts, generator=generator).topk(model.top_k).indices


def _as_routes(idx_TLK: torch.Tensor, experts: int) -> Any:
    from moeref.replay import routes

    return replace(routes(idx_TLK.numpy(), layers=range(idx_TLK.shape[1]), experts=experts), batch=ROWS)


def _check(chunk: Any, schedule: Callable[..., None], given: Any, idx_MTLK: torch.Tensor) -> None:
    """What the routers answer under `replaying` is what was given, seen by hooks of the bench's own."""
    from moeref.megatron import replay

    seen: list[torch.Tensor] = []
    walked = [router.module for router in replay.routers(chunk)]
    hooks = [m.register_forward_hook(lambda _, __, answer: seen.append(answer[1].flatten(0, -2))) for m in walked]
    try:
        with replay.replaying([chunk], given):
            schedule()
    finally:
        for hook in hooks:
            hook.remove()
    for number, map_TE in enumerate(seen):
        microbatch, layer = divmod(number, len(walked))
        wanted_TK = idx_MTLK[microbatch, :, layer].to(map_TE.device)
        if not (map_TE.gather(1, wanted_TK).all() and int(map_TE.sum()) == wanted_TK.numel()):
            raise Disagreement(f"layer {layer}, microbatch {microbatch}: other routes than those given were taken")
    if len(seen) != idx_MTLK.shape[0] * len(walked):
        raise Disagreement(f"{len(seen)} router forwards were seen, {idx_MTLK.shape[0] * len(walked)} were to be")


def _directly(
    walked: list[Any], action: Any, before: Callable[[int], None], after: Callable[[int], None], schedule: Any
) -> None:
    """A schedule under one action of RouterReplay, without moeref's controller."""
    for router in walked:
        router.set_router_replay_action(action)
    try:
        schedule(before, after)
    finally:
        for router in walked:
            router.clear_indices()
            router.clear_router_replay_action()


def _share(name: str, taken: Timing, native: Timing, routed: Timing) -> Figure:
    """What `name` adds to the forwards, over the routers' own time; no figure where their spread hides it."""
    what, added = f"{name}, what it adds", taken.seconds - native.seconds
    spread = max(one.spread * one.seconds for one in (taken, native))
    if added < spread:
        return Figure(what, None, note=f"less than the spread of the forwards, {spread * 1e3:.2g} ms")
    return Figure(what, added / routed.seconds, "× time", "the routers alone", f"{added * 1e3:.3g} ms more")


def _fused(chunk: Any, modules: list[Any], hidden: torch.Tensor, sizes: models.Sizes) -> list[Figure]:
    """The controller refuses a fused router; where there is one, it does go round RouterReplay. Leaves it fused."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from moeref.megatron import replay
    from moeref.replay import RouteError

    unfused = partial(_route, modules, hidden, sizes.microbatches)
    before = timed(hidden.device, unfused, rounds=sizes.rounds)[0]
    for module in modules:
        module.config.moe_router_fusion = True
    try:
        with replay.recording([chunk]):
            pass
    except RouteError:
        found = [Figure("fused router: recording is refused", 1.0, "yes")]
    else:
        raise Disagreement("a fused router was taken for one that can be recorded")
    if hidden.device.type == "cpu" or not HAVE_TE:
        return [*found, Figure("fused routers alone", None, note="needs Transformer Engine and a CUDA device")]
    walked = [module.router_replay for module in modules]
    recorded: list[Any] = []
    note = lambda microbatch: recorded.extend(router.get_recorded_indices() for router in walked)  # noqa: E731
    _directly(walked, RouterReplayAction.RECORD, lambda microbatch: None, note, lambda _, after: (unfused(), after(0)))
    if any(indices is not None for indices in recorded):
        raise Disagreement("a fused router recorded its choice; the refusal is no longer needed")
    return [
        *found,
        ratio("fused routers alone", timed(hidden.device, unfused, rounds=sizes.rounds)[0], before, "unfused"),
    ]
