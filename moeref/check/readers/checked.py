"""The check of a reading: its values go to `check`, and what it could not take is reported."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moeref.check.readers.reading import OPTIMIZER, Reading
from moeref.check.report import CheckError, Problem, Report
from moeref.check.run import OPTIONS, check, model_of
from moeref.check.value import Value
from moeref.config import ConfigError, MoEConfig, transformer_settings
from moeref.config.core import known_fields
from moeref.config.effective import same
from moeref.costs import CostError, Training
from moeref.dtypes import NAMES
from moeref.families import FamilyError, Model, known
from moeref.layout import Layout
from moeref.layout import text as layout_text
from moeref.record import Draft, Options

#: Arguments of the model that TransformerConfig lacks -> (what the model's own config says, whether weights depend).
BESIDE: dict[str, tuple[Callable[[Model], Any], bool]] = {
    "rotary_base": (lambda model: model.rope_theta, False),
    "rotary_percent": (lambda model: model.rotary_percent, False),
    "vocab_size": (lambda model: model.vocab, True),
    "untie_embeddings_and_output_weights": (lambda model: not model.tied, True),
    "position_embedding_type": (lambda model: "yarn" if model.yarn else "rope", False),
    "use_rope_scaling": (lambda model: False, False),
    "rotary_seq_len_interpolation_factor": (lambda model: None, False),
}
#: Of these, what multi-latent attention does not read: it makes its rotary embedding from its own config.
_OF_ROPE = frozenset({"position_embedding_type", "use_rope_scaling", "rotary_seq_len_interpolation_factor"})
_BACKEND = "moe_flex_dispatcher_backend"
_OF_THE_BACKEND = ("moe_flex_dispatcher_num_sms", "moe_permute_fusion_into_hybridep")
#: Rules on Megatron's own sparse attention and gated delta nets, which a spec can replace by layers of its own.
OF_ATTENTION = (
    *("dsa-under-cp-by-all-gather", "dsa-without-rope-fusion", "stages-begin-with-an-indexer"),
    *("gated-delta-heads-divide-over-cp", "gated-delta-under-cp-from-0.19"),
)
#: The positions that are a parameter, which no model of moeref's has: (argument, value, parameter).
_LEARNED = ("position_embedding_type", "learned_absolute", "embedding.position_embeddings.weight")


def check_reading(
    reading: Reading,
    *,
    model: str = "",
    settings: Mapping[str, Any] | None = None,
    layout: str = "",
    **options: Any,
) -> Report:
    """The report of a reading. `model`, `layout`, `settings` and `options` replace what it says.

    Raises CheckError where the reading names no model, or one that is neither a path nor known.
    """
    name = model or _model(reading)
    draft = _draft(name, _options(reading, options))
    if reading.stages and not layout:
        reading.layout["pipeline_layout"] = reading.stages(draft.model, reading.layout)
    text = layout or _layout(reading)
    _of_family(reading, draft.model)
    idle = _idle_backend(reading, options, settings or {})
    given = _options(reading, options)
    trained = {field: value.value for field, value in reading.training.items()} | dict(given.pop("training", {}))
    asked = {field: value.value for field, value in reading.settings.items() if _matters(field, value, draft)}
    through = MoEConfig(transformer_config_kwargs=asked | dict(settings or {}))
    optimizer = _fitting(reading, trained)
    report = check(name, text, asked=through, training=trained, **given)
    report = _stepped(reading, _of_its_optimizer(reading, _of_its_attention(reading, report)))
    problems, notes = _beside(reading, report.model)
    notes += [*_lost(reading, report), *idle]
    problems += [
        *optimizer,
        *_as_files(reading, report.model),
        *_by_layout(reading, report),
        *_by_model(reading, report),
    ]
    for field, value in reading.computed.items():
        _computed(field, value, draft, problems, notes)
    if "world" not in text and "world" not in reading.computed:
        problems.append(Problem("layout", "the number of ranks is not given", "NAME=VALUE, or --layout", refused=False))
    found = tuple(_with_its_place(reading, problem) for problem in report.problems)
    problems = [*reading.problems, *(_unread(value) for value in reading.unread), *problems]
    return replace(
        report,
        problems=(*found, *problems),
        notes=(*report.notes, *notes),
        record=None if problems else report.record,
        read=dict(reading.values),
        elsewhere=tuple(reading.elsewhere),
    )


def _with_its_place(reading: Reading, problem: Problem) -> Problem:
    """A problem of the batch with what the framework calls it."""
    size = reading.training.get("global_batch_size")
    if problem.about != "batch" or size is None or (reading.step and problem.text.startswith(reading.step.name)):
        return problem
    return replace(problem, text=f"{problem.text} ({size.name}, {size.source})")


def _of_its_attention(reading: Reading, report: Report) -> Report:
    """The report with what a spec means for rules on attention: its layers may do otherwise."""
    if not reading.own_attention:
        return report
    rules = tuple(f"[{rule}]" for rule in OF_ATTENTION)
    problems = (
        replace(p, text=f"{p.text}, unless layers of the spec do otherwise", refused=False)
        if p.fix.endswith(rules)
        else p
        for p in report.problems
    )
    return replace(report, problems=tuple(problems))


def _of_its_optimizer(reading: Reading, report: Report) -> Report:
    """The report with what adapters, and an optimizer on the CPU or other than Adam mean for memory, which counts none.

    Of adapters, weights alone are a bound: nothing else is kept of those that are frozen.
    """
    last = {value.name.replace("-", "_").rpartition(".")[2].lstrip("_"): value for value in reading.elsewhere}
    cpu, kind = last.get("optimizer_cpu_offload"), last.get("optimizer")
    notes = []
    if cpu and cpu.value:
        notes.append(f"{cpu.name} ({cpu.source}) keeps optimizer states on the CPU; memory counts them on the GPU")
    if disk := last.get("stream_optimizer_state_to_disk"):
        notes.append(f"{disk.name} ({disk.source}) keeps optimizer states on a disk; memory counts them on the GPU")
    if kind and isinstance(kind.value, str) and "adam" not in kind.value.lower():
        notes.append(f"{kind.name} {kind.value} ({kind.source}): memory counts the states of Adam")
    if adapters := next((p.text for p in reading.problems if p.text.endswith(": adapters")), ""):
        text = "memory counts gradients and optimizer states of all weights, and adapters need few of them"
        notes.append(f"{adapters.removesuffix(': adapters')}: {text}")
    if not notes:
        return report
    problems = (replace(p, refused=False) if p.about == "memory" else p for p in report.problems)
    return replace(report, problems=tuple(problems), notes=(*report.notes, *notes))


def _fitting(reading: Reading, trained: dict[str, Any]) -> list[Problem]:
    """Why settings of the optimizer that a file gives do not go together. They are taken out of `trained`."""
    problems: list[Problem] = []
    while wrong := _wrong_training(trained):
        name = wrong.partition("=")[0]
        value = reading.training.get(name)
        if name not in OPTIMIZER or value is None or trained[name] is not value.value:
            break  # `check` says so
        fix = f"give it too, or drop {value.name}" if " needs " in wrong else "give one of these"
        problems.append(Problem(reading.framework, f"{value.name} ({value.source}): {wrong}", fix))
        for each in (name, *(OPTIMIZER if name == "use_precision_aware_optimizer" else ())):
            if each != "use_distributed_optimizer":
                trained.pop(each, None)
    return problems


def _wrong_training(trained: Mapping[str, Any]) -> str:
    try:
        Training.from_mapping(trained)
    except CostError as error:
        return str(error)
    return ""


def _as_files(reading: Reading, model: Model) -> list[Problem]:
    """Refusals of a framework that compares its arguments with the model's files."""
    theta = model.rope_theta
    theirs: dict[str, Any] = {"rotary_base": int(theta) if theta == int(theta) else theta}
    theirs |= {"layernorm_epsilon": model.norm_eps, "ffn_hidden_size": model.ffn}
    problems = []
    for name, value in sorted(reading.as_files.items()):
        if theirs[name] is not None and not same(value.value, theirs[name]):
            text = f"{value.name} {value.value} ({value.source}) is not {theirs[name]} of the model's own config"
            fix = f"give {value.name} {theirs[name]}"
            problems.append(Problem(reading.framework, f"{text}, and {reading.framework} asserts that it is", fix))
    return problems


def _lost(reading: Reading, report: Report) -> list[str]:
    """Notes on settings that are given and not passed on, where the model gets another value."""
    if report.settings is None:
        return []
    notes, every = [], report.settings.by_name
    for name, value in sorted(reading.lost.items()):
        effective = every[name].value if name in every else None
        if not same(value.value, effective) and not (_nothing(value.value) and _nothing(effective)):
            text = (
                f"{value.name} {value.value} ({value.source}) does not reach the model, which has {name}={effective!r}"
            )
            notes.append(text)
    return notes


def _by_layout(reading: Reading, report: Report) -> list[Problem]:
    """Refusals of the framework that depend on the layout of the run."""
    if report.world is None:
        return []
    layout = Layout(**layout_text.read(report.layout))
    return [problem for refusal in reading.by_layout if (problem := refusal(layout))]


def _by_model(reading: Reading, report: Report) -> list[Problem]:
    """Refusals of the framework that depend on the model."""
    return [problem for refusal in reading.by_model if (problem := refusal(report.model))]


def _stepped(reading: Reading, report: Report) -> Report:
    """The report where a step takes a part of the batch: its samples make the microbatches, and the batch steps."""
    size, step = report.training.global_batch_size, reading.step
    if report.world is None or size is None or step is None:
        return report
    layout = Layout(**layout_text.read(report.layout))
    if size % (report.training.micro_batch_size * layout.dp):
        return report  # refused already
    problems = [problem for problem in report.problems if problem.about != "batch"]
    if wrong := _wrong_step(step, size // layout.dp, report.training.micro_batch_size, layout):
        problems.append(Problem("batch", *wrong))
    return replace(report, problems=tuple(problems), record=None if problems else report.record)


def _wrong_step(step: Value, samples: int, micro: int, layout: Layout) -> tuple[str, str] | None:
    """(what is wrong with a step, fix) for these samples of a replica's batch; None if nothing is."""
    said = f"{step.name} = {step.value} ({step.source})"
    each = step.value // layout.dp
    if each < 1 or samples % each:
        text = f"{said}: a replica's {samples} samples of a batch are no multiple of its {each} of a step"
        return f"{text} (dp={layout.dp})", "give a step that divides the batch"
    made = -(-each // micro)
    if layout.vpp > 1 and made % layout.pp:
        text = f"{said}: {made} microbatches of a step are no multiple of pp={layout.pp}, which vpp={layout.vpp} needs"
        return text, f"use a multiple of {micro * layout.dp * layout.pp}"
    return None


def _options(reading: Reading, options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value.value for option, value in reading.options.items()} | dict(options)


def _of_family(reading: Reading, model: Model) -> None:
    """Put into the reading what its bridge sets for the model's family."""
    if reading.by_family is None:
        return
    if model.family not in reading.by_family:
        text = f"what it sets for {model.family} is not known to this reader"
        reading.problems.append(Problem("not read", text, refused=False))
        return
    reading.settings = {**reading.by_family[model.family], **reading.settings}
    reading.by_family = None
    grouped = reading.settings.get("moe_grouped_gemm")
    if grouped and "experts" not in reading.options:
        kind = "grouped" if grouped.value else "sequential"
        reading.options["experts"] = Value(grouped.name, kind, grouped.source)


def _idle_backend(reading: Reading, options: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Take out the backend of flex where another dispatcher is chosen, which ignores it; notes if a file gives it."""
    kind = reading.settings.get("moe_token_dispatcher_type")
    backend, deepep = reading.settings.get(_BACKEND), reading.settings.get("moe_enable_deepep")
    chosen = {"dispatcher", "moe_token_dispatcher_type", _BACKEND} & {*options, *asked, *reading.computed}
    flex = kind and kind.value == "flex"
    if backend is None or flex or chosen or (deepep and deepep.value):
        return []
    for name in (_BACKEND, *_OF_THE_BACKEND):
        if name in reading.settings and (name == _BACKEND or not reading.settings[name].given):
            del reading.settings[name]
    if not backend.given or backend.value is None:
        return []
    said = kind.value if kind else "allgather, the default,"
    return [f"{backend.name} {backend.value} ({backend.source}) is ignored: the dispatcher {said} has no backend"]


def _draft(name: str, given: Mapping[str, Any]) -> Draft:
    """The run on one rank, which knows the names that moeref sets and the defaults of Megatron's class."""
    options = {option: value for option, value in given.items() if option in OPTIONS}
    _, model = model_of(name, NAMES.get(str(options.get("precision")), "bfloat16"))
    try:
        return Draft(model, Layout(), MoEConfig(), Options(**options))
    except ConfigError as error:
        raise CheckError(str(error)) from error


def _matters(field: str, value: Value, draft: Draft) -> bool:
    """Whether a setting is passed on: a default that is the class's as well, and not replaced by moeref, is not."""
    if value.given or field in draft.own:
        return True
    entry = known_fields(draft.options.core, mla=draft.model.mla is not None).get(field, {})
    if "default" not in entry:
        return not _nothing(value.value)
    return not same(value.value, entry["default"]) and not (_nothing(value.value) and _nothing(entry["default"]))


def _nothing(value: Any) -> bool:
    return value is None or value is False or value == []


def _computed(field: str, value: Value, draft: Draft, problems: list[Problem], notes: list[str]) -> None:
    """Report an argument that is computed: what the model's own config says stands for a setting."""
    where = f"{value.name} {value.value} ({value.source}) is computed by the script, which is not run"
    own = transformer_settings(draft.model, Layout()).get(field)
    if own and own.origin == "hf":
        notes.append(f"{where}; {field} is taken from the model's own config")
    else:
        problems.append(Problem("not read", where, "give its variables on the command line: NAME=VALUE", refused=False))


def _model(reading: Reading) -> str:
    """The model's path if it is there, else the last part of it."""
    text = str(reading.model.value) if reading.model and reading.model.value is not None else ""
    name = text.rstrip("/").rpartition("/")[2]
    if not name or "$" in name or "`" in name:
        why = next((f": {problem.text}" for problem in reading.problems if problem.about == "script"), "")
        raise CheckError(f"the configuration does not name a model{why}; give --model")
    if os.path.exists(text):  # noqa: PTH110 -- it may be no name of a file, where Path raises
        return text
    try:
        known(name)
    except FamilyError as error:
        raise CheckError(f"{error}; or give --model") from error
    return name


def _layout(reading: Reading) -> str:
    axes = {axis: value.value for axis, value in reading.layout.items() if value.value not in (None, False)}
    pattern = axes.pop("pipeline_layout", None)
    text = ",".join(f"{axis}={int(value) if value is True else value}" for axis, value in axes.items())
    return text if pattern is None else f"{text},pipeline_layout={pattern}"


def _unread(value: Value) -> Problem:
    text = f"{value.name} {value.value}".strip()
    return Problem("not read", f"{text} ({value.source}) is not known to this reader", refused=False)


def _beside(reading: Reading, model: Model) -> tuple[list[Problem], list[str]]:
    """Problems and notes on arguments of the model that differ from its own config."""
    problems, notes = [], []
    for name, value in reading.beside.items():
        own, shapes = BESIDE[name]
        if (name, value.value) == _LEARNED[:2]:
            problems.append(_learned(value, own(model)))
            continue
        if same(theirs := own(model), value.value) or (model.mla and name in _OF_ROPE):
            continue
        text = f"{name}={value.value!r} ({value.source}) replaces {theirs!r} of the model's own config"
        if shapes:
            problems.append(Problem("config", f"{text}, whose weights then do not fit", "give the model's config"))
        else:
            notes.append(text)
    return problems, notes


def _learned(value: Value, theirs: str) -> Problem:
    """Why positions that are a parameter are refused, and what to give instead."""
    text = f"{value.name} {value.value} ({value.source}) adds {_LEARNED[2]}, which the model's files lack"
    return Problem("config", text, f"give {value.name} {theirs}")
