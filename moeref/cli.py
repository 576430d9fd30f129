"""The command line: `moeref check`, `moeref audit` and `moeref convert`. `EXIT_CODES` says what each ends with."""

from __future__ import annotations

import argparse
import io
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moeref.arguments import EXAMPLES, EXIT_CODES, Completion, Parser
from moeref.check import CheckError, Report, UnmappedError, check
from moeref.check.readers import FORMATS, check_reading, read
from moeref.check.report import EXIT
from moeref.check.run import OPTIONS, model_of
from moeref.check.runfile import RunFile, is_run_file, read_run_file
from moeref.config import ConfigError, MoEConfig
from moeref.costs import CostError, read_lengths
from moeref.costs.training import TRAINING
from moeref.dispatcher.setup import CORE
from moeref.families import published
from moeref.record import CHOICES, installed_core
from moeref.seeds import FORMULAS

BAD_INPUT = 2
#: The most characters of a message: a value from a file may be of any length.
LONGEST = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no · gets ? in its place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except UnmappedError as error:
        _say(error, "not known: ")
        return EXIT["unknown"]
    except RecursionError:
        print("moeref: the input is nested too deeply", file=sys.stderr)
        return BAD_INPUT
    except (CheckError, ConfigError) as error:
        _say(error)
        return BAD_INPUT


def _say(error: Exception, kind: str = "") -> None:
    print(f"moeref: {kind}{printable(' '.join(str(error).splitlines()))}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` as a terminal can show it: of at most LONGEST characters, and without control characters."""
    short = text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in short)


def _parser() -> argparse.ArgumentParser:
    ends = "\n".join(f"exit codes of {name}: {codes}" for name, codes in EXIT_CODES.items())
    what = f"The glue between Megatron and an inference engine.\n\n{EXAMPLES}"
    parser = Parser(prog="moeref", description=what, epilog=ends)
    parser.add_argument("--version", action="version", version=f"moeref {version('moeref')}")
    shells = ("bash", "zsh", "fish", "tcsh")
    parser.add_argument(
        "--completion",
        action=Completion,
        dest=argparse.SUPPRESS,
        choices=shells,
        metavar="SHELL",
        help=f"print a completion script for {', '.join(shells)}",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, text: str, more: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, epilog=f"{more}exit codes: {EXIT_CODES[name]}")

    _audit_parser(command("audit", "compare the weights of two models, every byte"))
    _convert_parser(command("convert", "write a checkpoint as the shards of a layout, or back"))
    known = textwrap.fill(f"Known models: {', '.join(published())}.", 80, break_on_hyphens=False)
    _check_parser(command("check", "predict whether a run will work, without a GPU", f"{known}\n\n"))
    return parser


def _check_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODEL",
        nargs="+",
        help="a known name, a Hugging Face config file or folder, or a run file (.yaml, .json); with --from, files of "
        "that framework and NAME=VALUE to override them",
    )
    command.add_argument("--from", dest="framework", metavar="FORMAT", help=f"of the files: {', '.join(FORMATS)}")
    command.add_argument("--model", dest="name", metavar="MODEL", help="with --from, the model that the run trains")
    command.add_argument("--layout", help="such as tp=8,pp=16,ep=64,etp=1,world=1024,first=3,last=2")
    command.add_argument("--dispatcher", help=f"{_choices('dispatcher')} (default: auto)")
    command.add_argument("--precision", help=f"{_choices('precision')} (default: bf16)")
    command.add_argument("--replay", help=f"{_choices('replay')} (default: off)")
    command.add_argument("--kernels", help=f"{_choices('kernels')} (default: te where the precision needs it)")
    command.add_argument("--norms", help=f"{_choices('norms')} (default: what the kernels have)")
    command.add_argument("--experts", help=f"{_choices('experts')} (default: as moe_grouped_gemm says)")
    command.add_argument(
        "--divisible-by", type=int, metavar="N", help="the padded vocabulary is a multiple of N times TP (default: 128)"
    )
    command.add_argument("--seq-length", type=int, metavar="N", help="tokens of one packed sequence, before padding")
    command.add_argument("--pad-to", type=int, metavar="N", help="all packed sequences are padded to N tokens")
    command.add_argument("--seed", type=int, metavar="N", help="seed of the run (default: 1234)")
    command.add_argument("--seed-formula", help=f"{', '.join(FORMULAS)} (default: megatron)")
    command.add_argument(
        "--seed-per-dp", action="store_const", const=True, help="data-parallel replicas get seeds of their own"
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any Megatron setting; the value is JSON"
    )
    _cost_arguments(command)
    command.add_argument("--core", help=f"version of megatron-core (default: {CORE})")
    command.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="construct megatron-core's own config, which takes seconds (default: where no rule covers a setting)",
    )
    command.add_argument("--json", action="store_true", help="machine-readable")
    command.add_argument("--all", action="store_true", help="show every setting, not only those of the MoE layers")
    command.set_defaults(run=_check)


def _cost_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--train", action="append", default=[], metavar="NAME=VALUE", help=f"what decides memory: {', '.join(TRAINING)}"
    )
    command.add_argument("--hbm", type=float, metavar="GIB", help="memory of a GPU, in which every rank must fit")
    command.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="tells which groups have ranks on several nodes"
    )
    command.add_argument("--lengths", metavar="FILE", help="lines LENGTH or LENGTH NUMBER: tells what padding wastes")
    command.add_argument("--engine", metavar="NAME:SIZES", help="such as vllm:tp=8,ep=8 or sglang:tp=16,ep=16,dp=2")
    command.add_argument("--density", type=float, metavar="D", help="share of elements that change between two syncs")


def _audit_parser(command: argparse.ArgumentParser) -> None:
    kinds = "a safetensors folder, file or index, or a saved manifest"
    command.add_argument("expected", metavar="EXPECTED", help=kinds)
    command.add_argument("found", metavar="FOUND", nargs="?", help="what to compare with it; without it, see --save")
    command.add_argument("--previous", help="an earlier version: tells which tensors are stale")
    command.add_argument("--save", metavar="FILE", help="write the manifest of FOUND, or of EXPECTED if it is alone")
    command.add_argument("--json", action="store_true", help="machine-readable, with every finding")
    command.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    from moeref import audit  # needs torch

    if options.found is None and not options.save:
        raise CheckError("a model alone has nothing to compare with: give FOUND, or --save FILE for its manifest")
    try:
        manifest = audit.read(options.expected) if options.found is None else None
        report = audit.compare(manifest or options.expected, manifest or options.found, previous=options.previous)
        if options.save:
            report.found.save(options.save)
    except (audit.AuditError, OSError) as error:
        _say(error)
        return BAD_INPUT
    if options.json:
        print(json.dumps(report.to_plain(), indent=1, ensure_ascii=False))
    else:
        print("\n".join(printable(line) for line in report.lines()))
    return 0 if report.same else 1


def _convert_parser(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face folder, a folder of shards, or a torch_dist one"
    )
    command.add_argument("target", metavar="TARGET", help="the folder of folders of shards, or a new folder")
    formats = (
        "of the target: a folder by topology, or megatron-core's distributed checkpoint, which needs megatron-core"
    )
    command.add_argument("--format", default="shards", choices=("shards", "torch_dist"), help=formats)
    command.add_argument("--layout", help="of the shards, such as tp=2,pp=2,ep=2,etp=1; with torch_dist, of the ranks")
    command.add_argument("--config", metavar="FOLDER", help="of a config.json that the torch_dist source lacks")
    norms = "Megatron's norm modules, whose names the shards have (default: separate)"
    command.add_argument("--norms", choices=("separate", "fused"), help=norms)
    command.add_argument(
        "--experts", choices=("sequential", "grouped"), help="expert modules of the shards (default: sequential)"
    )
    command.add_argument("--divisible-by", type=int, metavar="N", help="as of moeref check")
    command.add_argument("--dry-run", action="store_true", help="check, and say what would be written")
    command.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from moeref.shards import command  # needs torch

    try:
        if not Path(options.source).exists():
            raise FileNotFoundError(f"{options.source}: there is no such folder")
        convert = command.convert
        if options.format == "torch_dist" or (Path(options.source) / ".metadata").exists():
            from moeref.megatron import convert as distributed

            convert = distributed.convert
        if said := convert(options):
            print(printable(said))
    except ImportError as error:
        print(f"moeref: a distributed checkpoint needs megatron-core: {error}", file=sys.stderr)
        return BAD_INPUT
    except (ValueError, OSError) as error:
        _say(error)
        return BAD_INPUT
    return 0


def _choices(name: str) -> str:
    return ", ".join(filter(None, CHOICES[name]))


def _check(options: argparse.Namespace) -> int:
    if options.framework:
        reports = {"": _read(options)}
    elif len(options.model) > 1 or options.name:
        layouts = [word for word in options.model[1:] if "=" in word]
        hint = f"write --layout {layouts[0]}" if layouts else "several files and --model go with --from"
        raise CheckError(f"one MODEL is checked at a time; {hint}")
    elif is_run_file(options.model[0]):
        reports = _of_file(read_run_file(options.model[0]), options)
    else:
        if not options.layout:
            model_of(options.model[0])  # a MODEL that is not there is said first
            raise CheckError("give --layout tp=…,pp=…,ep=…; `--layout world=1` is one rank")
        reports = {"": _one(options.model[0], options.layout, _asked({}, options.set), options, _given(options))}
    if options.json:
        plain = {name or "run": report.to_plain() for name, report in reports.items()}
        print(json.dumps(plain if len(plain) > 1 else next(iter(plain.values())), indent=1, ensure_ascii=False))
    else:
        _show(reports, options.all)
    # A run works as well as the worst of its models.
    verdicts = {report.verdict for report in reports.values()}
    return EXIT["refused" if "refused" in verdicts else "unknown" if "unknown" in verdicts else "works"]


def _read(options: argparse.Namespace) -> Report:
    """The report of a framework's own files."""
    core = options.core or installed_core()
    reading = read(options.framework, options.model, core)
    settings = _asked({}, options.set).transformer_config_kwargs
    more = {"model": options.name or "", "layout": options.layout or "", "settings": settings}
    return check_reading(reading, verify=options.verify, **{**more, **_given(options), "core": core})


def _of_file(run: RunFile, options: argparse.Namespace) -> dict[str, Report]:
    given, layout = {**run.options, **_given(options)}, options.layout or run.layout
    trained = _pairs("--train", options.train)
    return {
        name: _one(
            run.model, layout, _asked(moe, options.set), options, {**given, "training": run.training(name, trained)}
        )
        for name, moe in run.models.items()
    }


def _one(model: Any, layout: str, asked: MoEConfig, options: argparse.Namespace, given: Mapping[str, Any]) -> Report:
    return check(model, layout, asked=asked, verify=options.verify, **given)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `check` that are on the command line."""
    names = ("seq_length", "pad_to", "hbm", "gpus_per_node", "engine", "density", *OPTIONS)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if trained := _pairs("--train", options.train):
        given["training"] = trained
    if options.lengths is not None:
        given["lengths"] = _lengths(options.lengths)
    return given


def _lengths(file: str) -> dict[int, int]:
    try:
        return read_lengths(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, CostError) as error:
        raise CheckError(f"{file}: {error}") from error


def _asked(moe: dict[str, Any], pairs: Sequence[str]) -> MoEConfig:
    through = moe.get("transformer_config_kwargs") or {}
    if not isinstance(through, Mapping):
        raise CheckError(f"transformer_config_kwargs is a mapping of settings, not {through!r}")
    through = {**through, **_pairs("--set", pairs)}
    return MoEConfig.from_mapping({**moe, **({"transformer_config_kwargs": through} if through else {})})


def _pairs(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    """The values of NAME=VALUE arguments."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise CheckError(f"{option} {pair}: write NAME=VALUE")
        try:
            found[name.strip()] = json.loads(text)
        except (RecursionError, ValueError):
            found[name.strip()] = text  # not JSON: a bare word is a string
    return found


def _show(reports: dict[str, Report], every: bool) -> None:
    from rich.console import Console

    from moeref.check.page import show

    console = Console()
    # Policy and reference model share one page if their reports are equal but for how they are trained.
    pages: list[tuple[list[str], Report]] = []
    for name, report in reports.items():
        if pages and _but_memory(pages[-1][1]) == _but_memory(report):
            pages[-1][0].append(name)
        else:
            pages.append(([name], report))
    for names, report in pages:
        if names[0]:
            console.print(f"[bold]{' and '.join(names)}[/bold]")
        show(report, console, every_setting=every, others=[reports[name] for name in names[1:]])


def _but_memory(report: Report) -> dict[str, Any]:
    return {name: value for name, value in report.to_plain().items() if name not in ("training", "memory_bytes")}
