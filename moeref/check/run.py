"""The preflight: checks run in turn, also after an earlier one has found a problem."""

from __future__ import annotations

import functools
import math
import os.path
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from moeref import families, seeds
from moeref.bridge import BridgeError, LocalShard
from moeref.check.cost import costed, held, spread, synced
from moeref.check.report import CheckError, Padding, Problem, Report, Stage, UnmappedError
from moeref.check.settings import problem_and_fix, quantised, settled
from moeref.check.splits import splits
from moeref.check.verified import verified
from moeref.config import ConfigError, MoEConfig
from moeref.config.errors import nearest
from moeref.config.precision import FORMATS, unfit_widths
from moeref.costs import CostError, Training
from moeref.dispatcher import Choice
from moeref.dispatcher.padding import PaddingError, plan
from moeref.dispatcher.setup import CORE
from moeref.dtypes import DTYPES, NAMES, index_bytes
from moeref.families import FamilyError, Model, UnmappedModelError
from moeref.layout import Layout, LayoutError
from moeref.layout import text as layout_text
from moeref.record import Draft, Options

#: The most ranks of a run: seeds and stages are computed for each.
MOST_RANKS = 65_536
OPTIONS = tuple(field.name for field in fields(Options))


def model_of(model: str | Path | Mapping[str, Any], dtype: str = "bfloat16") -> tuple[str, Model]:
    """(title, Model) of a published model's name, a folder or file with a Hugging Face config, or such a config.

    Raises UnmappedError for a config that moeref does not map (exit code 3); CheckError, of which that is a subclass,
    for a name that is neither known nor a path, and for a config with a missing key or a wrong value (exit code 2).
    """
    try:
        if isinstance(model, Mapping):
            return str(model.get("model_type", "config")), families.read(model, dtype)
        path = Path(model)
        if os.path.exists(path):  # noqa: PTH110 -- it may be no name of a file, where Path raises
            return path.name if path.is_dir() else path.parent.name or path.name, families.read(path, dtype)
        if path.suffix == ".json" or len(path.parts) > 2:
            raise CheckError(f"{model}: no such file or folder")
        return str(model), families.read(families.known(str(model)), dtype)
    except UnmappedModelError as error:
        raise UnmappedError(str(error)) from error
    except FamilyError as error:
        raise CheckError(str(error)) from error


def check(
    model: str | Path | Mapping[str, Any],
    layout: str,
    *,
    seq_length: int | None = None,
    pad_to: int | None = None,
    asked: MoEConfig | None = None,
    core: str = CORE,
    precision: str = "bf16",
    verify: bool | None = None,
    training: Training | Mapping[str, Any] | None = None,
    hbm: float | None = None,
    gpus_per_node: int | None = None,
    lengths: Mapping[int, int] | None = None,
    engine: str | None = None,
    density: float | None = None,
    **options: Any,
) -> Report:
    """The report of a run before it starts, with the record that its model is built from.

    model: as in `model_of`. layout: the text form of `Layout`. seq_length: tokens of one packed sequence. pad_to: the
    length of all of them. asked: Megatron's settings; none may contradict an option. core, precision and options: the
    fields of `moeref.record.Options`. A GPU and the packages that a dispatcher needs are assumed to exist; see `needs`.
    verify: construct megatron-core's own config in a process of its own; None does so where no rule covers a setting.
    training: `moeref.costs.Training`, or its fields, which decide memory. hbm: GiB of a GPU that a rank must fit in, by
    default 512. gpus_per_node: tells which groups have ranks on several nodes. lengths: numbers of samples by their
    tokens. engine: the inference engine, such as `vllm:tp=8,ep=8`. density: the share of elements that change between
    syncs.

    Raises CheckError for input that cannot be read. The report has a Problem for everything that will not work.
    """
    chosen = _options(precision=precision, core=core, **options)
    trained = _training(training, hbm)
    title, read = model_of(model, NAMES.get(precision, "bfloat16"))
    for name, length in (("seq_length", seq_length), ("pad_to", pad_to)):
        if length is not None and (type(length) is not int or length < 1):
            raise CheckError(f"{name}={length!r} must be an integer and at least 1")
    draft = Draft(read, Layout(), asked or MoEConfig(), chosen)
    try:
        draft.check_names()
        sizes = layout_text.read(layout)
    except (ConfigError, LayoutError) as error:
        raise CheckError(str(error)) from error
    _check_sizes(layout, sizes)
    notes = (*_of_files(read, draft.model), *_of_name(model, read))
    base = Report(title, draft.model, layout, None, replay=chosen.replay, notes=notes, training=trained, hbm=hbm)
    try:
        made = Layout(**sizes)
    except LayoutError as error:
        return replace(base, problems=(Problem("layout", str(error)),))
    _check_sizes(layout, {"world": made.world})
    base, draft = replace(base, layout=made.text, world=made.world), replace(draft, layout=made)
    report = spread(_checked(base, draft, seq_length, pad_to), made, gpus_per_node, lengths)
    report = synced(report, made, engine, density)
    return verified(report, chosen.core, verify)


def _of_files(published: Model, model: Model) -> tuple[str, ...]:
    """Notes on what loading does to the published files: what it skips, FP8, INT4 and MXFP4 weights."""
    number, block, group = published.most_mtp_layers - model.mtp_layers, model.fp8_block, model.int4_group
    notes = []
    if number:
        notes.append(f"{number} MTP layers are left out: stages lack them, and loading skips their tensors")
    elif model.ignored:
        named = " and ".join(f"{prefix}*" for prefix in model.ignored)
        notes.append(f"tensors {named} are left out where files have them: loading skips them, and no export has them")
    if block is not None:
        notes.append(f"FP8 files, blocks of {block[0]} × {block[1]}: loading makes them bf16, and export sends bf16")
    if group is not None:
        notes.append(f"INT4 files, groups of {group} columns: loading makes them bf16, and export sends bf16")
    if model.mxfp4:
        notes.append("MXFP4 files, blocks of 32 inputs: loading makes experts bf16, and export sends bf16")
    return tuple(notes)


def _of_name(name: str | Path | Mapping[str, Any], model: Model) -> tuple[str, ...]:
    """A note where a model is given by its name and the files of its repository are MXFP4: their config says more."""
    if isinstance(name, Mapping) or model.mxfp4 or families.weights(str(name)) != "mxfp4":
        return ()
    return (
        f"files of {name} are published in MXFP4; by name its weights count as bf16, so load and send with its config",
    )


def _check_sizes(layout: str, sizes: Mapping[str, Any]) -> None:
    """Raise CheckError for a size below 1 or of more ranks than a check can go through."""
    for axis in ("tp", "pp", "vpp", "ep", "etp", "cp"):
        if sizes.get(axis, 1) < 1:
            raise CheckError(f"layout {layout}: {axis}={sizes[axis]} must be at least 1")
    for axis, size in sizes.items():
        if type(size) is int and size > MOST_RANKS:
            raise CheckError(f"layout {layout}: {axis}={size} is more than {MOST_RANKS}, the most that can be checked")


def _training(training: Training | Mapping[str, Any] | None, hbm: float | None) -> Training:
    """Raises CheckError for values that mean nothing."""
    if hbm is not None and not (type(hbm) in (int, float) and 0 < hbm < math.inf):
        raise CheckError(f"hbm={hbm!r} must be a number of GiB above 0")
    try:
        return training if isinstance(training, Training) else Training.from_mapping(training or {})
    except CostError as error:
        raise CheckError(str(error)) from error


def _options(**options: Any) -> Options:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise CheckError(f"unknown option {unknown[0]!r}{nearest(unknown[0], OPTIONS)}")
    try:
        return Options(**options)
    except ConfigError as error:
        raise CheckError(str(error)) from error


def _checked(report: Report, draft: Draft, seq_length: int | None, pad_to: int | None) -> Report:
    """The report of a valid layout. Every check runs, also after one has found a problem."""
    problems: list[Problem] = []
    notes = list(report.notes)
    report = _layers(report, draft.layout, problems)
    shards: Mapping[str, tuple[int, ...]] = {}
    if report.stages:
        report, shards = _weights(report, draft.layout, draft.options.divisible_by, problems)
    report = settled(report, draft, problems, notes)
    recipe = quantised(report, str(draft.options.precision))
    if recipe in FORMATS and (wrong := unfit_widths(shards.items(), recipe)):
        problems.append(Problem("config", *problem_and_fix(wrong)))
    report = replace(report, padding=_padding(report, draft.layout, recipe, (seq_length, pad_to), problems))
    if report.weights:
        report = costed(report, draft, problems)
    report = _seeds(report, draft, problems, notes)
    if draft.options.replay != "off":
        model = draft.model
        a_layer = model.top_k * index_bytes(model.experts)
        report = replace(report, route_bytes=sum(model.moe_layers) * a_layer)
    record = None if problems else report.record
    return replace(report, problems=tuple(problems), notes=tuple(notes), record=record)


def _layers(report: Report, layout: Layout, problems: list[Problem]) -> Report:
    """The report with stages."""
    model = report.model
    try:
        stages = layout.stages(model.num_layers, mtp=model.mtp_layers)
    except LayoutError as error:
        better = splits(layout, model.num_layers, mtp=model.mtp_layers)
        fix = "; ".join(f"{s.text} ({'·'.join(map(str, s.per_rank))} layers)" for s in better)
        problems.append(Problem("layout", str(error), f"splits that work: {fix}" if fix else ""))
        return report
    found = [
        Stage(pp, vp, layers, tuple(what for what, here in _ends(layout, stages.mtp, pp, vp) if here))
        for (pp, vp), layers in stages.layers.items()
    ]
    return replace(report, stages=tuple(found))


def _weights(
    report: Report, layout: Layout, divisible_by: int, problems: list[Problem]
) -> tuple[Report, Mapping[str, tuple[int, ...]]]:
    """The report with experts and weights, and the shapes of a rank's shards by name. TP and EP ranks hold the same."""
    model = report.model
    try:
        report = replace(report, experts=(model.experts, len(layout.experts(0, model.experts))))
        sizes, shapes = _sizes(model, layout, divisible_by)
    except (LayoutError, BridgeError) as error:
        problems.append(Problem("bridge", str(error)))
        return report, {}
    return replace(report, **sizes), shapes


@functools.lru_cache(maxsize=8)  # a run's policy and reference share them, and so do runs that differ in settings
def _sizes(model: Model, layout: Layout, divisible_by: int) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """Fields of the report that follow from all tensors, and the shapes of shards by name. Raises BridgeError."""
    shard_map, by_stage = held(model, layout, divisible_by)
    tensors, parameters, exported = shard_map.hf_sizes()
    weights = MappingProxyType({pp: sum(map(_bytes, shards)) for pp, shards in by_stage.items()})
    shapes = {shard.local_name: shard.shape for shards in by_stage.values() for shard in shards}
    found = {"weights": weights, "tensors": tensors, "parameters": parameters, "exported": exported}
    return found, MappingProxyType(shapes)


def _ends(layout: Layout, mtp: tuple[int, int] | None, pp: int, vp: int) -> tuple[tuple[str, bool], ...]:
    return (
        ("embedding", layout.has_embedding(pp, vp)),
        ("mtp", mtp == (pp, vp)),
        ("head", layout.has_head(pp, vp)),
    )


def _bytes(shard: LocalShard) -> int:
    return math.prod(shard.shape) * DTYPES[shard.param.dtype].bytes


def _padding(
    report: Report, layout: Layout, recipe: str | None, lengths: tuple[int | None, int | None], problems: list[Problem]
) -> Padding | None:
    """The padding of packed sequences of a length, all of them to another if it is given: (seq_length, pad_to)."""
    length, pad_to = lengths
    values: Mapping[str, Any] = report.settings.values if report.settings else {}
    staged = layout.pp > 1 and values.get("variable_seq_lengths") is False
    why = "asked for" if pad_to else "stages exchange one shape without variable_seq_lengths" if staged else ""
    length = length or pad_to
    try:
        made = plan(
            layout,
            recipe=recipe,
            fused_attention=values.get("attention_backend") == "fused",
            dispatcher=report.dispatcher or Choice.ALLTOALL,
            fixed=(pad_to or length) if why else None,
        )
        padded = None if length is None else made.padded(length)
    except PaddingError as error:
        problems.append(Problem("padding", str(error)))
        return None
    rows = None if padded is None else padded // (made.cp * made.tp)
    return Padding(made, length, padded, rows, why)


def _seeds(report: Report, draft: Draft, problems: list[Problem], notes: list[str]) -> Report:
    asked = draft.options
    formula = cast(seeds.Formula, asked.seed_formula)
    try:
        found = seeds.collisions(draft.layout, asked.seed, per_dp=asked.seed_per_dp, formula=formula)
    except seeds.SeedError as error:
        raise CheckError(str(error)) from error
    if found.refused:
        problems.append(Problem("seeds", found.text, "seed by the formula 'distinct' (--seed-formula)"))
    elif found.collisions:
        notes.append(
            f"seeds coincide under Megatron's formula: {found.text}; the formula 'distinct' (--seed-formula) avoids it"
        )
    return replace(report, seed=asked.seed, seed_formula=formula, seeds=found)
