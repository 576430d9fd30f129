"""Owns the preflight itself: every room asked in turn, no question left out because an earlier one failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref import families, seeds
from moeref.bridge import BridgeError, Table
from moeref.check.report import Padding, Problem, Report, Stage
from moeref.check.splits import splits
from moeref.config import ConfigError, MoEConfig, Record, resolve
from moeref.dispatcher import AUTO, Choice, DispatcherError, Environment, Setup, refusals, select
from moeref.dispatcher import read as read_choice
from moeref.dispatcher.padding import RECIPES, PaddingError, plan
from moeref.dispatcher.setup import PACKAGES
from moeref.families import FamilyError, Model, Spelling
from moeref.layout import Layout, LayoutError
from moeref.layout import text as layout_text
from moeref.replay import index_dtype

#: Precisions that can be asked for: two plain ones, and the recipes of quantised GEMMs.
PRECISIONS = ("bf16", "fp32", *RECIPES)
REPLAY = ("off", "R2", "R3")
_PACKAGES = {
    "deep_ep": "the package deep_ep",
    "hybrid_ep": "deep_ep's hybrid-ep branch",
    "transformer_engine": "Transformer Engine",
}
_BYTES = {"bfloat16": 2, "float32": 4}


class CheckError(ValueError):
    """Input that cannot be checked at all: an unknown model, key or value. A layout that cannot work is a verdict."""


def model_of(model: str | Path | Mapping[str, Any], dtype: str = "bfloat16") -> tuple[str, Model]:
    """(title, Model) of a published name, a folder or file with a Hugging Face config, or such a config.

    Raises CheckError for a name that is neither known nor a path, and for a config that no family reads.
    """
    try:
        if isinstance(model, Mapping):
            return str(model.get("model_type", "config")), families.read(model, dtype)
        path = Path(model)
        if path.exists():
            return path.name if path.is_dir() else path.parent.name or path.name, families.read(path, dtype)
        if path.suffix == ".json" or len(path.parts) > 1:
            raise CheckError(f"{model}: no such file or folder")
        return str(model), families.read(families.known(str(model)), dtype)
    except FamilyError as error:
        raise CheckError(str(error)) from error


def check(
    model: str | Path | Mapping[str, Any],
    layout: str,
    *,
    dispatcher: str = AUTO,
    precision: str = "bf16",
    replay: str = "off",
    seq_length: int | None = None,
    asked: MoEConfig | None = None,
    seed: int = 1234,
    core: str = "0.19.2",
) -> Report:
    """Everything that can be said of a run before it is started.

    model: as `model_of`. layout: the text form of `Layout`. dispatcher: `auto`, or a choice (`flex-deepep`;
    `flex:deepep` is read too). precision: one of PRECISIONS. replay: `off`, `R2` or `R3`. seq_length: of one packed
    sequence. asked: further settings. core: the version of megatron-core; a GPU and the
    packages that a dispatcher needs are taken to be there, and are listed.

    Raises CheckError for input that means nothing. All that means something and will not work is a Problem of the
    report, as many as there are.
    """
    title, read = model_of(model, "float32" if precision == "fp32" else "bfloat16")
    _one_of("precision", precision, PRECISIONS)
    _one_of("replay", replay, REPLAY)
    if seq_length is not None and seq_length < 1:
        raise CheckError(f"seq_length={seq_length} must be at least 1")
    try:
        sizes = layout_text.read(layout)
    except LayoutError as error:
        raise CheckError(str(error)) from error
    base = Report(title, read, layout, None, replay=replay)
    try:
        made = Layout(**sizes)
    except LayoutError as error:
        return replace(base, problems=(Problem("layout", str(error)),))
    report = replace(base, layout=made.text, world=made.world)
    problems: list[Problem] = []
    notes: list[str] = []
    report = _layers(report, made, problems)
    report = _settings(report, made, asked, precision, replay, dispatcher, core, problems)
    report = _padding(report, made, precision, seq_length, problems)
    report = _seeds(report, made, seed, problems, notes)
    if replay != "off":
        moe = sum(read.moe_layers)
        report = replace(report, route_bytes=moe * read.top_k * index_dtype(read.experts).itemsize)
    return replace(report, problems=tuple(problems), notes=tuple(notes))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CheckError(f"{name}={value!r} is none of {', '.join(allowed)}")


def _layers(report: Report, layout: Layout, problems: list[Problem]) -> Report:
    """Stages, experts, and the weights that each rank holds."""
    model = report.model
    try:
        stages = layout.stages(model.num_layers, mtp=model.mtp_layers or None)
    except LayoutError as error:
        better = splits(layout, model.num_layers, mtp=model.mtp_layers)
        fix = "; ".join(f"{s.text} ({'·'.join(map(str, s.per_rank))} layers)" for s in better)
        problems.append(Problem("layout", str(error), f"splits that work: {fix}" if fix else ""))
        return report
    found = [
        Stage(pp, vp, layers, tuple(what for what, here in _ends(layout, stages.mtp, pp, vp) if here))
        for (pp, vp), layers in stages.layers.items()
    ]
    report = replace(report, stages=tuple(found))
    try:
        report = replace(report, experts=(model.experts, len(layout.experts(0, model.experts))))
        table = Table(model, layout, Spelling(norms="fused", experts="grouped"))
        weights = {pp: _bytes(table, layout, pp) for pp in range(layout.pp)}
    except (LayoutError, BridgeError) as error:
        problems.append(Problem("bridge", str(error)))
        return report
    tensors = [t for unit in table.units if unit.exports for t in unit.hf]
    return replace(report, weights=weights, tensors=len(tensors), parameters=sum(math.prod(t.shape) for t in tensors))


def _ends(layout: Layout, mtp: tuple[int, int] | None, pp: int, vp: int) -> tuple[tuple[str, bool], ...]:
    return (
        ("embedding", layout.has_embedding(pp, vp)),
        ("mtp", mtp == (pp, vp)),
        ("head", layout.has_head(pp, vp)),
    )


def _bytes(table: Table, layout: Layout, pp: int) -> int:
    """Bytes of weights on a rank of pipeline rank `pp`: equal shards, so one rank speaks for all."""
    rank = layout.rank_of(tp=0, pp=pp)
    return sum(math.prod(placed.shape) * _BYTES[placed.unit.dtype] for placed in table.placed(rank))


def _settings(
    report: Report,
    layout: Layout,
    asked: MoEConfig | None,
    precision: str,
    replay: str,
    dispatcher: str,
    core: str,
    problems: list[Problem],
) -> Report:
    """The dispatcher and Megatron's effective settings."""
    model, asked = report.model, asked or MoEConfig()
    wanted = dispatcher.replace(":", "-")
    if wanted not in (AUTO, *Choice):
        raise CheckError(f"dispatcher={dispatcher!r} is none of {AUTO}, {', '.join(Choice)}")
    try:
        environment = Environment(core=core, packages=frozenset(PACKAGES), gpu=True)
    except ValueError as error:
        raise CheckError(str(error)) from error
    setup = Setup(
        layout=layout,
        sequence_parallel=layout.tp > 1,
        experts=model.experts,
        topk=model.top_k,
        precision=_kind(precision),
        balancing="none",
        variable_lengths=True,
        shared_experts=model.shared_ffn > 0,
    )
    chosen: dict[str, Any] = {}
    fields = {**asked.fields, **asked.transformer_config_kwargs}
    try:
        if wanted == AUTO and fields.get("moe_token_dispatcher_type"):
            wanted = read_choice(fields)
        selection = select(wanted, setup, environment)
        # megatron-core reads the backend under flex only, and a value there would look as if it were asked for.
        choice = selection.choice
        chosen = {"moe_token_dispatcher_type": choice.dispatcher}
        chosen |= {"moe_flex_dispatcher_backend": choice.backend} if choice.backend else {}
        taken = replace(setup, dispatcher=choice.dispatcher, backend=choice.backend)
        report = replace(report, dispatcher=str(choice), dispatcher_why=selection.why, needs=_needs(taken, environment))
    except DispatcherError as error:
        problems.append(Problem("dispatcher", str(error)))
    if replay != "off":
        chosen["moe_enable_routing_replay"] = True
    try:
        record = _resolved(model, layout, asked, chosen)
    except ConfigError as error:
        problems.append(Problem("config", str(error)))
        return report
    return replace(report, record=record)


def _needs(setup: Setup, environment: Environment) -> tuple[str, ...]:
    """What the machine has to have: what the table refuses to do without."""
    without = {name: replace(environment, packages=environment.packages - {name}) for name in PACKAGES}
    found = [said for name, said in _PACKAGES.items() if refusals(setup, without[name])]
    return (*found, *(("a GPU",) if refusals(setup, replace(environment, gpu=False)) else ()))


def _kind(precision: str) -> Any:
    if precision in ("bf16", "fp32"):
        return precision
    return "fp4" if precision == "nvfp4" else "fp8"


def _resolved(model: Model, layout: Layout, asked: MoEConfig, chosen: Mapping[str, Any]) -> Record:
    """`asked`, with what the preflight's own options choose where it leaves that open."""
    given = {**asked.fields, **{k: v for k, v in chosen.items() if k not in asked.fields}}
    return resolve(model, layout, MoEConfig(**given, transformer_config_kwargs=asked.transformer_config_kwargs))


def _padding(report: Report, layout: Layout, precision: str, length: int | None, problems: list[Problem]) -> Report:
    recipe = precision if precision in RECIPES else None
    try:
        made = plan(layout, recipe=recipe, dispatcher=report.dispatcher or Choice.ALLTOALL)
    except PaddingError as error:
        problems.append(Problem("padding", str(error)))
        return report
    padded = None if length is None else made.padded(length)
    rows = None if padded is None else padded // (made.cp * made.tp)
    return replace(report, padding=Padding(made, length, padded, rows))


def _seeds(report: Report, layout: Layout, seed: int, problems: list[Problem], notes: list[str]) -> Report:
    try:
        found = seeds.collisions(layout, seed)
    except seeds.SeedError as error:
        raise CheckError(str(error)) from error
    if found.refused:
        problems.append(Problem("seeds", found.text, "seed with formula='distinct'"))
    elif found.collisions:
        notes.append(f"seeds coincide under Megatron's formula: {found.text}; formula='distinct' avoids it")
    return replace(report, seeds=found)
