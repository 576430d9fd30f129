"""The report as a terminal page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding as Indented
from rich.table import Table
from rich.text import Text

from moeref.check.report import Report, Stage, Verdict
from moeref.costs import GIB, largest

#: Settings shown by default: the ones in which frameworks differ, and `sequence_parallel`.
SHOWN = (
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_router_load_balancing_type",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_grouped_gemm",
    "moe_enable_routing_replay",
    "moe_shared_expert_intermediate_size",
    "mtp_num_layers",
    "sequence_parallel",
    "rotary_base",
)

#: The words of each verdict, and their style.
VERDICTS: dict[Verdict, tuple[str, str]] = {
    "works": ("will work", "bold green"),
    "refused": ("will not work", "bold red"),
    "unknown": ("not known whether it works", "bold yellow"),
}
#: Names of seeds and formulas on the page.
KINDS = {"default": "python, numpy, torch, CUDA", "tp": "TP tracker", "expert": "expert tracker"}
FORMULAS = {"megatron": "Megatron's formula", "distinct": "the formula without collisions"}


def page(report: Report, *, every_setting: bool = False, others: Sequence[Report] = ()) -> RenderableType:
    """The whole report: verdict, problems, facts, pipeline stages, and the settings that Megatron gets.

    `others`: reports of other models of the run, which differ from this one in memory only.
    """
    parts: list[RenderableType] = [_verdict(report)]
    parts += [_problems(report)] if report.problems else []
    parts += [_facts(report, others)]
    if report.stages:
        parts += [_title("Stages"), _indented(_stages(report))]
    if report.read:
        parts += [_title("What the configuration says"), _indented(_read(report, every_setting))]
    if report.settings is not None:
        parts += [_title("What Megatron is given"), _indented(_settings(report, every_setting))]
    return Group(*parts)


def show(
    report: Report, console: Console | None = None, *, every_setting: bool = False, others: Sequence[Report] = ()
) -> None:
    """Print the page of `report`."""
    (console or Console()).print(page(report, every_setting=every_setting, others=others))


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _indented(what: RenderableType) -> Indented:
    return Indented(what, (0, 0, 0, 2))


def _verdict(report: Report) -> Text:
    """The verdict and the model on a line, which 80 columns hold, and the layout on the next."""
    where = f" on {report.world} rank{'s' * (report.world > 1)}" if report.world else ""
    return Text.assemble(VERDICTS[report.verdict], ": ", (report.title, "bold"), where, f"\n  {report.layout}")


def _problems(report: Report) -> Indented:
    table = Table.grid(padding=(0, 2))
    for problem in report.problems:
        table.add_row(Text(problem.about, style="red" if problem.refused else "yellow"), Text(problem.text))
        if problem.fix:
            table.add_row("", Text(problem.fix, style="green"))
    return _indented(table)


def _facts(report: Report, others: Sequence[Report]) -> Indented:
    table = Table.grid(padding=(0, 2))
    for name, text in _lines(report, others):
        table.add_row(Text(name, style="bold"), Text(text))
    return Indented(table, (1, 0, 0, 2))


def _lines(report: Report, others: Sequence[Report]) -> Iterable[tuple[str, str]]:
    model = report.model
    dense = len(model.moe_layers) - sum(model.moe_layers)
    many = f"{report.parameters / 1e9:.1f} B" if report.parameters >= 1e8 else f"{report.parameters / 1e6:.3g} M"
    size = f", {many} parameters in {report.tensors:,} tensors" if report.tensors else ""
    more = f", {model.mtp_layers} MTP" if model.mtp_layers else ""
    yield (
        "model",
        f"{model.family}: {model.num_layers} layers ({dense} dense{more}), {model.experts} experts, "
        f"top-{model.top_k}{size}",
    )
    if report.experts:
        yield "experts", f"{report.experts[1]} of {report.experts[0]} on each rank"
    for one in (report, *others):
        yield from _memory(one)
    if report.dispatcher:
        yield "dispatcher", f"{report.dispatcher} ({report.dispatcher_why})"
    if report.needs:
        yield "", f"needs {', '.join(report.needs)}"
    yield from _spread(report)
    yield from _padding(report)
    yield from _seeds(report)
    if report.replay != "off":
        yield "replay", f"{report.replay}; {report.route_bytes} bytes of routes a token"
    yield from _engine(report)
    if report.verified:
        yield "verified", f"by {report.verified}"
    for note in report.notes:
        yield "note", note


def _memory(report: Report) -> Iterable[tuple[str, str]]:
    if not report.memory:
        return
    pp = largest(report.memory)
    most, found, trained = report.memory[pp], report.memory[pp].states, report.training
    without = "" if most.activations is not None or not trained.trains else ", without activations"
    yield "memory", f"up to {_gib(most.peak)} GiB on a rank (pp {pp}){without}"
    if not trained.trains:
        yield "", f"weights {_gib(found.weights)}; the model runs forward only"
        return
    kind = "distributed" if trained.use_distributed_optimizer else "replicated"
    step = f", {_gib(found.step)} more during its step" if found.step else ""
    parts = f"weights {_gib(found.weights)}, gradients {_gib(found.gradients)}"
    yield "", f"{parts}, {kind} optimizer {_gib(found.optimizer)}{step}"
    if most.activations is not None:
        routes = f", routes {_gib(most.routes)}" if most.routes else ""
        yield "", f"activations {_gib(most.activations)}{routes}, for flash attention and fused kernels"


def _spread(report: Report) -> Iterable[tuple[str, str]]:
    if report.dispatch_bytes is not None:
        size = report.dispatch_bytes / 2**20
        yield "", f"a rank sends {size:,.1f} MiB in a layer's dispatch, and in its combine, each also backward"
    for number, (kind, found) in enumerate(report.nodes.items()):
        across = f"{found.across} of {found.groups} across nodes" if found.across else "each inside one node"
        yield "" if number else "groups", f"{kind}: {found.size} ranks, {across}"


def _engine(report: Report) -> Iterable[tuple[str, str]]:
    if report.engine is None:
        return
    side = report.engine
    sizes = ", ".join(f"{name}={size}" for name, size in side.engine.sizes.items() if size > 1) or "one rank"
    yield "engine", f"{side.engine.name} with {sizes}"
    for fact in side.facts:
        yield "", fact
    delta = f", a delta about {_gib(side.delta_bytes)} GiB" if side.delta_bytes is not None else ""
    yield "", f"a full sync is {_gib(side.full_bytes)} GiB{delta}"
    yield "", f"{side.senders} ranks hold what is sent, {side.engine.ranks} ranks of each instance receive"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _padding(report: Report) -> Iterable[tuple[str, str]]:
    if not report.padding:
        return
    plan = report.padding.plan
    yield "padding", f"packed sequences to a multiple of {plan.multiple}" if plan.multiple > 1 else "none is needed"
    for factor in plan.factors:
        yield "", f"{factor.multiple} per {factor.level}: {factor.why}"
    if report.padding.one_length:
        yield "", f"every packed sequence to one length: {report.padding.one_length}"
    if report.padding.padded is not None:
        yield "", f"{report.padding.length} → {report.padding.padded} tokens, {report.padding.rows} rows on a rank"
    if report.waste is not None:
        found = report.waste
        yield "", f"{found.samples} samples in {found.packs} sequences: {found.share:.1%} of the rows are padding"


def _seeds(report: Report) -> Iterable[tuple[str, str]]:
    if not report.seeds:
        return
    yield "seeds", f"from {report.seed} by {FORMULAS[report.seed_formula]}"
    for kind, (have, want) in report.seeds.counts.items():
        low, high = report.seeds.ranges[kind]
        yield "", f"{KINDS[kind]}: {low}…{high}, {have} distinct of {want}" if want > 1 else f"{KINDS[kind]}: {low}"


def _stages(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("pp", "vp", "layers", "", "GiB a rank"):
        table.add_column(heading, justify="right" if heading in ("pp", "vp", "GiB a rank") else "left")
    # Neighbouring stages that differ only in their numbers share a line.
    ordered = sorted(report.stages, key=lambda s: (s.vp, s.pp))
    for _, alike in groupby(ordered, key=lambda s: (s.vp, len(s.layers), s.holds, report.weights.get(s.pp))):
        run = list(alike)
        first, last = run[0], run[-1]
        size = report.weights.get(first.pp)
        table.add_row(
            f"{first.pp}–{last.pp}" if len(run) > 1 else str(first.pp),
            str(first.vp),
            f"{_range(run)} ({len(first.layers)} each)" if len(run) > 1 else f"{_range(run)} ({len(first.layers)})",
            ", ".join(first.holds),
            _gib(size) if size is not None else "",
        )
    return table


def _range(run: list[Stage]) -> str:
    layers = [layer for stage in run for layer in stage.layers]
    return f"{layers[0]}–{layers[-1]}" if layers else "none"


def _given(report: Report, name: str) -> bool:
    """Whether a setting is worth a line: all that are asked for, but of a framework's only those not its defaults."""
    return name not in report.read or not report.read[name].source.startswith("default")


def _read(report: Report, every: bool) -> Table:
    """Model, layout and options as the framework's configuration has them; settings have a table of their own."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    settings = report.settings.by_name if report.settings else {}
    for name, value in report.read.items():
        if name not in settings:
            said = f"{value.source}, {value.name}" if value.given else value.source
            table.add_row(name, Text(str(value.value)), Text(said))
    for value in report.elsewhere if every else ():
        table.add_row("other parts", Text(f"{value.name} {value.value}".strip()), Text(value.source))
    if report.elsewhere and not every:
        table.add_row("other parts", str(len(report.elsewhere)), "arguments of no bearing here; --all lists them")
    return table


def _settings(report: Report, every: bool) -> Table:
    assert report.settings is not None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    shown = {
        name: setting
        for name, setting in sorted(report.settings.by_name.items())
        if every or name in SHOWN or ((setting.asked or setting.origin == "derived") and _given(report, name))
    }
    # Names are not wrapped, even at 80 columns; the other columns are.
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    for name, setting in shown.items():
        why = f"{setting.origin}: {setting.reason}" if setting.reason else setting.origin
        if name in report.read and setting.origin == "override":
            why = report.read[name].source
        table.add_row(name, Text(repr(setting.value)), Text(why))
    return table
