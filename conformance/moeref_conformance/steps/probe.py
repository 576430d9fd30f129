"""What every rank does with a session: fixed steps, each written down before and after it runs.

The probe compares nothing. It drives the target's session through the same steps on every rank, looks into its modules
by the back door `export.chunks()`, and writes events and tensors for the judges to read.
"""

from __future__ import annotations

import json
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import (
    Cell,
    Dispatch,
    Export,
    Forward,
    Gradients,
    Layout,
    NameRow,
    Seeds,
    Session,
    Target,
    TensorMeta,
    World,
    to_plain,
)
from moeref_conformance.contract.records import EVENTS, free_key
from moeref_conformance.contract.requests.export import CHANGE, UNMAPPED
from moeref_conformance.steps import config, dispatch, exchange, facet_of, gradients, replay, seeds


class StepRaised(Exception):
    """A step raised; the event is written. The rank's main turns this into exit code 3."""


class _Log:
    """Writes `events.jsonl`, each line flushed at once so that a killed rank still tells where it was."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / EVENTS).open("a", encoding="utf-8")

    def write(self, step: str, phase: str, began: float, **more: Any) -> None:
        now = time.time()
        event = {"step": step, "phase": phase, "at": now, "seconds": round(now - began, 6), **more}
        self._file.write(json.dumps(to_plain(event)) + "\n")
        self._file.flush()

    def step(self, name: str, action: Callable[[], Any], refusal: bool = False) -> Any:
        """Run one step. An error is recorded; unless `refusal`, it ends the rank with StepRaised."""
        began = time.time()
        self.write(name, "begin", began)
        try:
            value = action()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of a target is an outcome of the step as well
            what = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            self.write(name, "raised", began, error=what)
            if refusal:
                return None
            raise StepRaised(f"step {name}: {type(error).__name__}: {error}") from error
        self.write(name, "ok", began, value=value if _is_plain(value) else None)
        return value

    def save(self, step: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of a step; nothing if there are none."""
        if tensors:
            save_file({k: _copy(v) for k, v in tensors.items()}, self.folder / f"{step}.safetensors")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on CPU that shares no memory with anything."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_rank(target: Target, cell: Cell, world: World, inputs: Mapping[str, str], record_dir: Path) -> None:
    """Drive one session of `target` through all steps its claimed facets allow, writing records to `record_dir`.

    Call it in the rank's process, after torch.distributed is initialised. Raises StepRaised if a step failed.
    `inputs` gives the folders `hf_config`, `checkpoint`, `checkpoint_extra` and `checkpoint_missing`, and the file
    `tokens`.
    """
    log = _Log(record_dir)
    facets = target.claims.facets
    opened: list[AbstractContextManager[Session]] = []

    def enter() -> Session:
        opened.append(target.open(cell, world))
        return opened[0].__enter__()

    session: Session = log.step("open", enter)
    manager = opened[0]
    try:
        if "export" in facets:
            log.step("topology", _topology)
        if "names" in facets:
            log.step("names", lambda: plain_rows(facet_of(session, "names").table(world.rank), NameRow))
        if "config" in facets:
            log.step("config", lambda: _config(session, chunks="export" in facets))
        if "seeds" in facets:
            _seed_steps(log, facet_of(session, "seeds"), world.rank)
        if "dispatch" in facets:
            _dispatch_steps(log, facet_of(session, "dispatch"), cell, world)
        if "export" in facets:
            trained = cell.layout if "gradients" in facets and gradients.asked(cell) else None
            has_plan = target.claims.has_plan
            routed = _replay(log, session, cell, inputs) if "replay" in facets and cell.replay != "off" else None
            _export_steps(log, session, inputs, routed, trained, forward="forward" in facets, plan=has_plan)
    except BaseException as error:
        # The outcome is already on record; a second error on the way out must not hide it.
        try:
            manager.__exit__(type(error), error, error.__traceback__)
        except Exception as second:
            log.write("close", "raised", time.time(), error={"type": type(second).__name__, "message": str(second)})
        raise
    log.step("close", lambda: bool(manager.__exit__(None, None, None)))


def plain_rows(rows: Any, kind: type) -> list[dict[str, Any]]:
    """A target's answer as plain values. Raises TypeError that names what came instead of rows of `kind`."""
    return [to_plain(row) for row in checked_rows(rows, kind)]


def checked_rows(rows: Any, kind: type) -> list[Any]:
    """A target's answer as a list. Raises TypeError that names what came instead of rows of `kind`."""
    if not isinstance(rows, Iterable):
        raise TypeError(f"expected rows of api.{kind.__name__}, the target gave {rows!r}")
    made = list(rows)
    for row in made:
        if not isinstance(row, kind):
            raise TypeError(
                f"expected rows of api.{kind.__name__}, the target gave a {type(row).__name__}: {row!r:.80}"
            )
    return made


def _topology() -> dict[str, Any] | None:
    """This rank's place in megatron-core's process groups, or None if the target initialised none."""
    from megatron.core import parallel_state as ps

    if not ps.model_parallel_is_initialized():
        return None
    groups = {
        "tp": ps.get_tensor_model_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "cp": ps.get_context_parallel_group(),
        "dp": ps.get_data_parallel_group(),
        "ep": ps.get_expert_model_parallel_group(),
        "etp": ps.get_expert_tensor_parallel_group(),
        "edp": ps.get_expert_data_parallel_group(),
        "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
        "tp_cp": ps.get_tensor_and_context_parallel_group(),
        "mp": ps.get_model_parallel_group(),
        "etp_ep": ps.get_expert_tensor_and_model_parallel_group(),
        "emp": ps.get_expert_tensor_model_pipeline_parallel_group(),
    }
    members = {axis: torch.distributed.get_process_group_ranks(group) for axis, group in groups.items()}
    axes = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")
    place: dict[str, Any] = {axis: torch.distributed.get_rank(groups[axis]) for axis in axes}
    return {**place, "groups": members}


def held_tensors(chunks: Any) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """(chunk, local name, "parameter" or "buffer", tensor) of every parameter and persistent buffer."""
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield i, name, "parameter", parameter
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield i, f"{prefix}.{name}" if prefix else name, "buffer", buffer


def _config(session: Session, chunks: bool) -> dict[str, Any]:
    return config.recorded(facet_of(session, "config"), facet_of(session, "export").chunks() if chunks else None)


def _seed_steps(log: _Log, facet: Seeds, rank: int) -> None:
    log.step("seeds_planned", lambda: seeds.planned(facet, rank))
    log.step("seeds", lambda: seeds.installed(facet))
    log.step("seeds_resumed", lambda: seeds.resumed(facet))


def _dispatch_steps(log: _Log, facet: Dispatch, cell: Cell, world: World) -> None:
    log.step("padding", lambda: dispatch.padded(facet, cell.layout))
    log.step("dispatchers", lambda: dispatch.chosen(facet))
    log.step("exchange", lambda: exchange.exchanged(facet, cell, world.rank, log.save, world.device))


def _replay(log: _Log, session: Session, cell: Cell, inputs: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    facet, forward, export = (facet_of(session, name) for name in ("replay", "forward", "export"))
    return partial(replay.run, facet, forward, export, cell, Path(inputs["tokens"]), inputs.get("routes"), log.save)


def _export_steps(
    log: _Log,
    session: Session,
    inputs: Mapping[str, str],
    routed: Callable[[], Any] | None,
    trained: Layout | None,
    *,
    forward: bool,
    plan: bool,
) -> None:
    log.step("inventory", lambda: _inventory(facet_of(session, "export")))
    export: Export = facet_of(session, "export")
    log.step("load", lambda: export.load(Path(inputs["checkpoint"])))
    log.step("shards", lambda: log.save("shards", {f"{c}:{n}": t for c, n, _, t in held_tensors(export.chunks())}))
    log.step("plan", lambda: plain_rows(export.plan(), TensorMeta) if plan else None)
    log.step("export", lambda: _stream(log, "export", export))
    if forward:
        log.step("forward", lambda: _forward(log, facet_of(session, "forward"), Path(inputs["tokens"])))
    if routed is not None:
        log.step("replay", routed)
    if trained is not None:
        log.step("gradients", lambda: _gradients(log, facet_of(session, "gradients"), Path(inputs["tokens"]), trained))
    log.step("change", lambda: _change(export))
    log.step("export_changed", lambda: _stream(log, "export_changed", export))
    log.step("own", lambda: _own(log, export))
    log.step("refuse_parameter", lambda: _export_unmapped(export, plan), refusal=True)
    for step, key in (("refuse_extra", "checkpoint_extra"), ("refuse_missing", "checkpoint_missing")):
        log.step(step, partial(export.load, Path(inputs[key])), refusal=True)


def _inventory(export: Export) -> list[dict[str, Any]]:
    return [
        {"chunk": c, "local": n, "shape": list(t.shape), "dtype": _dtype(t.dtype), "kind": kind}
        for c, n, kind, t in held_tensors(export.chunks())
    ]


def _stream(log: _Log, step: str, export: Export) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    kept: dict[str, torch.Tensor] = {}
    earlier: list[weakref.ref[torch.Tensor]] = []
    stream = iter(export.stream())
    while (item := next(stream, None)) is not None:
        meta, tensor = item
        if not isinstance(meta, TensorMeta) or not (tensor is None or isinstance(tensor, torch.Tensor)):
            what = f"{type(meta).__name__}, {type(tensor).__name__}"
            raise TypeError(f"stream() gave ({what}), expected (api.TensorMeta, torch.Tensor or None)")
        alive = sum(1 for ref in earlier if ref() is not None)
        rows.append({**to_plain(meta), "materialised": tensor is not None, "alive": alive})
        if tensor is not None:
            kept[free_key(kept, meta.name)] = _copy(tensor)
            earlier.append(weakref.ref(tensor))
        # Our own references go before the next tensor is asked for: what is alive then, the target keeps alive.
        del item, tensor
    log.save(step, kept)
    return rows


def _forward(log: _Log, forward: Forward, tokens_file: Path) -> dict[str, bool]:
    logits = forward.logits(load_file(tokens_file)["tokens"])
    if logits is not None:
        log.save("forward", {"logits": logits})
    return {"has": logits is not None}


def _gradients(log: _Log, facet: Gradients, tokens_file: Path, layout: Layout) -> None:
    log.save("gradients", gradients.step(facet, tokens_file, layout))


def _change(export: Export) -> None:
    seen: set[int] = set()
    with torch.no_grad():
        for _, _, _, tensor in held_tensors(export.chunks()):
            # One storage under two names (a tied head next to its embedding) is changed once.
            if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.mul_(CHANGE)


def _bytes_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_copy(a).reshape(-1).view(torch.uint8), _copy(b).reshape(-1).view(torch.uint8))


def _own(log: _Log, export: Export) -> dict[str, list[str]]:
    """Zero every tensor of a further stream: what changed in the model, and which later tensors came out changed."""
    before = {(c, n): _copy(t) for c, n, _, t in held_tensors(export.chunks())}
    file = log.folder / "export_changed.safetensors"
    was = load_file(file) if file.exists() else {}
    later = []
    stream = iter(export.stream())
    while (item := next(stream, None)) is not None:
        meta, tensor = item
        if tensor is not None:
            if meta.name in was and not _bytes_equal(tensor, was[meta.name]):
                later.append(meta.name)
            # inference_mode may also write to inference tensors, which no_grad may not.
            with torch.inference_mode():
                tensor.detach().zero_()
        del item, tensor
    changed = []
    with torch.no_grad():
        for c, n, _, tensor in held_tensors(export.chunks()):
            if not _bytes_equal(tensor, before[c, n]):
                changed.append(f"{c}:{n}")
                tensor.copy_(before[c, n])
    return {"changed": changed, "later": later}


def _export_unmapped(export: Export, plan: bool) -> None:
    """Export while chunk 0 has a parameter that no table can know; the stream is drained if the plan does not raise."""
    chunk, holder = export.chunks()[0], torch.nn.Module()
    like = next(chunk.parameters(), torch.empty(0))
    holder.register_parameter("weight", torch.nn.Parameter(torch.ones(2, 3, dtype=like.dtype, device=like.device)))
    chunk.add_module(UNMAPPED, holder)
    try:
        if plan:
            export.plan()
        for _ in export.stream():
            pass
    finally:
        delattr(chunk, UNMAPPED)
