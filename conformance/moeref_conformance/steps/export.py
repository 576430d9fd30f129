"""Facet `export`: load, export, change the weights, export again, and what must be refused.

The kit reads and changes the modules through `export.chunks()`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moeref_conformance.contract.api import Export, TensorMeta, to_plain
from moeref_conformance.contract.hf_files import weight_files
from moeref_conformance.contract.published_models import TINY
from moeref_conformance.contract.records import digest, free_key
from moeref_conformance.contract.requests.export import CHANGE, UNMAPPED
from moeref_conformance.steps.bystanders import changed, in_training, modes, partly_frozen, state
from moeref_conformance.steps.facet import Context, Facet, Stage, Step, checked_dtype, checked_rows, refusal
from moeref_conformance.steps.tensors import copied, deepest, give_new_memory, module_tensors, same_bytes
from moeref_conformance.steps.topology import process_groups
from moeref_conformance.steps.warned import warned


def inventory(export: Export, context: Context) -> list[dict[str, Any]]:
    """Name, shape, dtype and kind of every tensor of the modules."""
    return [
        {"chunk": c, "local": n, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "kind": kind}
        for c, n, kind, t in module_tensors(export.chunks())
    ]


def begun(export: Export, context: Context) -> list[dict[str, Any]] | None:
    """What every tensor of the modules holds before loading: a digest, and if all is finite, and one value.

    None in cells with replay, which repeat the layouts of others, and for what need not hold anything.
    """
    if context.cell.replay != "off" or context.claims.begins == "unset":
        return None
    rows = []
    for chunk, name, _, tensor in module_tensors(export.chunks()):
        values = copied(tensor)  # a storage that numpy has seen cannot be given new memory later
        ends = [float(end) for end in values.aminmax()] if values.numel() and values.is_floating_point() else [0.0, 0.0]
        row = {"chunk": chunk, "local": name, "shape": list(tensor.shape), "digest": digest(values)}
        rows.append({**row, "finite": all(map(math.isfinite, ends)), "constant": ends[0] == ends[1]})
    return rows


def loading(name: str) -> Callable[[Export, Context], None]:
    """A step that loads an input of the cell. What it changed beside weights, also where it raised, is for `around`."""
    return lambda export, context: _load(export, context, name)


def _load(export: Export, context: Context, name: str) -> None:
    before = modes(export.chunks())
    try:
        export.load(context.input(name))
    finally:
        context.made[f"left by {name}"] = changed(before, modes(export.chunks()))


def around(export: Export, context: Context) -> dict[str, list[list[str]]]:
    """Kind and name of what loads have changed beside weights, by input: none of a first one that builds the model.

    Of a second load of the checkpoint, of which `own` tells, where one was asked for, while parameters were frozen.
    """
    names = ("checkpoint", "checkpoint_extra", "checkpoint_missing", "checkpoint_unlike")
    left = {name: context.made.pop(f"left by {name}") for name in names}
    if (once_more := context.made.pop("left by checkpoint once more", None)) is not None:
        left["checkpoint once more"] = once_more
    built = ("checkpoint", "checkpoint once more") if context.claims.begins == "unset" else ()
    return {name: rows for name, rows in left.items() if name not in built}


def surplus(export: Export, context: Context) -> dict[str, list[str]]:
    """Load a checkpoint with a tensor too many. The value: all that was warned of on the way."""
    with warned() as texts:
        _load(export, context, "checkpoint_extra")
    return {"warned": texts}


def shards(export: Export, context: Context) -> None:
    """Save every tensor of the modules by `chunk:local`."""
    context.save("shards", {f"{c}:{n}": t for c, n, _, t in module_tensors(export.chunks())})


def plan(export: Export, context: Context) -> list[Any] | None:
    """The plan of the export; None if the target claims none."""
    return checked_rows(export.plan(), TensorMeta) if context.claims.has_plan else None


def broken_off(export: Export, context: Context) -> list[list[str]]:
    """Take the first tensor of a stream and no other, on one rank: of several some would wait for the rest.

    Returns what that has changed beside the stream, as `left` does.
    """
    if context.cell.layout.world > 1:
        return []
    chunks = export.chunks()
    with in_training(chunks):
        before = state(chunks)
        stream = iter(export.stream())
        next(stream, None)
        close = getattr(stream, "close", None)
        if close is not None:
            close()
        return changed(before, state(chunks))


@dataclass
class Earlier:
    """Tensors that came before, by weak reference. gloo's threads hold one for a moment after a collective."""

    refs: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    patience: float = 0.5

    def alive(self) -> int:
        """How many are still held, once threads had time to drop them; that is waited for in vain once."""
        until = time.monotonic() + self.patience
        while (number := sum(ref() is not None for ref in self.refs)) and time.monotonic() < until:
            time.sleep(0.001)
        if number:
            self.patience = 0
        return number


def streamed(step: str, keep: bool = False) -> Callable[[Export, Context], list[dict[str, Any]]]:
    """A step that saves the tensors of a whole stream. Its value: metadata, and how many earlier ones are alive.

    With `keep` all are kept to the end, and compared there with what they were; `kept` has the result.
    """

    def stream(export: Export, context: Context) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        copies: dict[str, torch.Tensor] = {}
        kept: dict[str, torch.Tensor] = {}
        earlier = Earlier()
        for meta, tensor in items(export.stream(), "stream"):
            graph = tensor is not None and tensor.grad_fn is not None
            given = {"materialised": tensor is not None, "alive": earlier.alive(), "graph": graph}
            rows.append({**to_plain(meta), **given})
            if tensor is not None:
                key = free_key(copies, meta.name)
                copies[key] = copied(tensor)
                if keep:
                    kept[key] = tensor
                else:
                    earlier.refs.append(weakref.ref(tensor))
            # Drop this function's references: what is alive at the next tensor, the target keeps alive.
            del tensor
        context.made[step] = [name for name, tensor in kept.items() if not same_bytes(tensor, copies[name])]
        context.save(step, copies)
        return rows

    return stream


def streamed_amid_training(step: str, keep: bool = False) -> Callable[[Export, Context], list[dict[str, Any]]]:
    """As `streamed`, amid training, and with `keep` of a part of the model alone.

    What it has changed there is for the step `left`, or `kept`.
    """

    def stream(export: Export, context: Context) -> list[dict[str, Any]]:
        chunks = export.chunks()
        with partly_frozen(chunks) if keep else nullcontext(), in_training(chunks):
            before = state(chunks)
            rows = streamed(step, keep)(export, context)
            context.made[f"left by {step}"] = changed(before, state(chunks))
        return rows

    return stream


def left(export: Export, context: Context) -> list[list[str]]:
    """Kind and name of what the first export has changed beside its stream."""
    rows: list[list[str]] = context.made.pop("left by export")
    return rows


def kept(export: Export, context: Context) -> dict[str, list[Any]]:
    """Tensors of `export_changed` that held other bytes when its stream had ended, and what else it has changed."""
    return {
        "overwritten": context.made.pop("export_changed"),
        "left": context.made.pop("left by export_changed"),
    }


def change(export: Export, context: Context) -> None:
    """Multiply every floating-point tensor of the modules by CHANGE, where it is.

    As an optimizer does, through `.data`, which leaves the version of a tensor as it is.
    """
    seen: set[int] = set()
    for _, _, _, tensor in module_tensors(export.chunks()):
        # One storage under two names (a tied head next to its embedding) is changed once.
        if tensor.is_floating_point() and tensor.numel() and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            tensor.data.mul_(CHANGE)


def move(export: Export, context: Context) -> None:
    """Give every tensor of the modules new memory, as offloading does, and change it once more."""
    give_new_memory(tensor for _, _, _, tensor in module_tensors(export.chunks()))
    change(export, context)


def own(export: Export, context: Context) -> dict[str, list[str] | None]:
    """Zero every tensor of another stream, and say what that has changed: by `chunk:local` of the model in `changed`,
    and by name of the stream in `later`.

    `outdated` are tensors of the stream that for another reason are not what the modules hold since `move`, and `lost`
    those that this rank was given before and not now. `again` are the names of one more stream, before which nothing
    changed, and `stale` the tensors of the model that another load leaves as they are.
    """
    before = {(c, n): copied(t) for c, n, _, t in module_tensors(export.chunks())}
    later, outdated, lost = _zeroed(export, context)
    changed = []
    with torch.no_grad():
        for c, n, _, tensor in module_tensors(export.chunks()):
            if not same_bytes(tensor, before[c, n]):
                changed.append(f"{c}:{n}")
                tensor.copy_(before[c, n])
    again = _again(export, context)
    stale = _stale(export, context)
    of_stream = {"later": later, "outdated": outdated, "lost": lost}
    return {"changed": changed, **of_stream, "again": again, "stale": stale}


def _again(export: Export, context: Context) -> list[str] | None:
    """On one rank the names of a stream of weights that are as they were in the last one."""
    if context.cell.layout.world > 1:
        return None
    return [meta.name for meta, tensor in items(export.stream(), "stream") if tensor is not None]


def _stale(export: Export, context: Context) -> list[str]:
    """Load once more, on a rank or two: the tensors that are not what they were after the first load, or none if it
    raises.

    The first row speaks for a tensor, of which every element was changed; rows at the end may pad the vocabulary.
    """
    file = context.folder / "shards.safetensors"
    if context.cell.layout.world > 2 or not file.exists():
        return []
    with partly_frozen(export.chunks()):
        before = modes(export.chunks())
        refused = refusal(_load_again, export, context)
        context.made["left by checkpoint once more"] = changed(before, modes(export.chunks()))
    if refused:
        return []
    was = load_file(file)
    now = {f"{c}:{n}": copied(t[:1]) for c, n, _, t in module_tensors(export.chunks())}
    return [key for key, row in now.items() if key in was and not same_bytes(row, was[key][:1])]


def _load_again(export: Export, context: Context) -> None:
    """Load the checkpoint; on one rank from a folder whose files held other weights when it was loaded before.

    A trainer that saves to one place replaces what it has loaded from there.
    """
    checkpoint, cell = context.input("checkpoint"), context.cell
    if cell.layout.world > 1 or cell.quantised_checkpoint or cell.size != TINY:
        export.load(checkpoint)
        return
    with tempfile.TemporaryDirectory(dir=context.world.workdir, prefix="replaced-") as name:
        folder = Path(name)
        for file in checkpoint.iterdir():
            shutil.copyfile(file, folder / file.name)
        for file in weight_files(folder):
            others = {key: tensor * CHANGE for key, tensor in load_file(file).items()}
            save_file(others, file, metadata={"format": "pt"})
        export.load(folder)
        for file in weight_files(checkpoint):  # new files: what was mapped into memory stays as it was
            shutil.copyfile(file, folder / f"{file.name}.new")
            (folder / f"{file.name}.new").replace(folder / file.name)
        export.load(folder)


def refuse_parameter(export: Export, context: Context) -> None:
    """Export while the last chunk has a parameter that is in no table."""
    chunk, holder = export.chunks()[-1], torch.nn.Module()
    holder.register_parameter("weight", torch.nn.Parameter(_unmapped(chunk)))
    _export_with(export, context, deepest(chunk), holder)


def refuse_buffer(export: Export, context: Context) -> None:
    """Export while the first chunk has a persistent buffer that is in no table."""
    chunk, holder = export.chunks()[0], torch.nn.Module()
    holder.register_buffer("weight", _unmapped(chunk))
    _export_with(export, context, deepest(chunk), holder)


def _unmapped(chunk: torch.nn.Module) -> torch.Tensor:
    like = next(chunk.parameters(), torch.empty(0))
    return torch.ones(2, 3, dtype=like.dtype, device=like.device)


def _export_with(export: Export, context: Context, module: torch.nn.Module, holder: torch.nn.Module) -> None:
    """Export while `module` holds `holder`; drain the stream if the plan does not raise."""
    module.add_module(UNMAPPED, holder)
    try:
        if context.claims.has_plan:
            export.plan()
        for _ in export.stream():
            pass
    finally:
        delattr(module, UNMAPPED)


def items(pairs: Iterable[Any], name: str) -> Iterator[tuple[TensorMeta, torch.Tensor | None]]:
    """The stream that `name` gave, holding no tensor of it while the next one is made.

    Raises TypeError for items of another type.
    """
    stream = iter(pairs)
    while (item := next(stream, None)) is not None:
        meta, tensor = item
        if not isinstance(meta, TensorMeta) or not (tensor is None or isinstance(tensor, torch.Tensor)):
            what = f"{type(meta).__name__}, {type(tensor).__name__}"
            raise TypeError(f"{name}() gave ({what}), expected (api.TensorMeta, torch.Tensor or None)")
        checked_dtype(meta)
        del tensor
        yield item
        del item


def _zeroed(export: Export, context: Context) -> tuple[list[str], list[str], list[str]]:
    """Zero every tensor of a stream as it comes.

    Returns the names of those that came with zeros in them, of others that are not `export_changed` times CHANGE, and
    of those in `export_changed` that did not come.
    """
    file = context.folder / "export_changed.safetensors"
    was = load_file(file) if file.exists() else {}
    later, outdated, left = list[str](), list[str](), dict.fromkeys(was)
    for meta, tensor in items(export.stream(), "stream"):
        if tensor is not None:
            left.pop(meta.name, None)
            want = was[meta.name] * CHANGE if meta.name in was else tensor
            if not same_bytes(tensor, want):
                (later if _zeros(tensor) > _zeros(want) else outdated).append(meta.name)
            # inference_mode may also write to inference tensors, which no_grad may not.
            if not context.claims.lends:
                with torch.inference_mode():
                    tensor.detach().zero_()
        del tensor
    return later, outdated, [name for name in left if "#" not in name]


def _zeros(tensor: torch.Tensor) -> int:
    return tensor.numel() - int(tensor.count_nonzero())


FACET = Facet(
    name="export",
    protocol=Export,
    steps=(
        Step(name="topology", ask=lambda export, context: process_groups(), stage=Stage.OPENED),
        Step(name="inventory", ask=inventory),
        Step(name="begun", ask=begun),
        Step(name="load", ask=loading("checkpoint"), stage=Stage.LOADED),
        Step(name="shards", ask=shards, stage=Stage.LOADED),
        Step(name="plan", ask=plan, stage=Stage.LOADED),
        Step(name="export", ask=streamed_amid_training("export"), stage=Stage.LOADED),
        Step(name="left", ask=left, stage=Stage.LOADED),
        Step(name="change", ask=change, stage=Stage.CHANGED),
        Step(name="broken_off", ask=broken_off, stage=Stage.CHANGED),
        Step(name="export_changed", ask=streamed_amid_training("export_changed", keep=True), stage=Stage.CHANGED),
        Step(name="kept", ask=kept, stage=Stage.CHANGED),
        Step(name="move", ask=move, stage=Stage.CHANGED),
        Step(name="own", ask=own, stage=Stage.CHANGED),
        Step(name="refuse_parameter", ask=refuse_parameter, stage=Stage.CHANGED, refusal=True),
        Step(name="refuse_buffer", ask=refuse_buffer, stage=Stage.CHANGED, refusal=True),
        Step(name="refuse_extra", ask=surplus, stage=Stage.CHANGED, refusal=True),
        Step(name="refuse_missing", ask=loading("checkpoint_missing"), stage=Stage.CHANGED, refusal=True),
        Step(name="refuse_unlike", ask=loading("checkpoint_unlike"), stage=Stage.CHANGED, refusal=True),
        Step(name="around_loads", ask=around, stage=Stage.CHANGED),
    ),
)
