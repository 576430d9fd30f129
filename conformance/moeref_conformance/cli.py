"""The command line: `init`, `list`, `smoke`, `run`, `inputs`, `vectors`, `report`, `diff`, `shards`, `table`.

Exit codes: 0 conformant, 1 not conformant, 2 bad input or an error of the kit, 3 incomplete.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from moeref_conformance.arguments import DONE, EXAMPLES, EXIT_CODES, WORSE, Completion, Parser
from moeref_conformance.contract import shards
from moeref_conformance.contract.cells import Cell
from moeref_conformance.contract.checks import BadInput, NothingRecorded, read_toml
from moeref_conformance.contract.published_models import TINY
from moeref_conformance.contract.quiet import quiet_imports
from moeref_conformance.contract.results import Results, read, version_of
from moeref_conformance.contract.rules import PROFILES, Rule, groups_of, load_rules, select
from moeref_conformance.contract.statuses import EXIT_WORDS, INCOMPLETE, KIT_ERROR
from moeref_conformance.contract.texts import fit
from moeref_conformance.plan import gpu_requirements
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.plan.check_environment import import_from_this_folder, of_this_folder, require
from moeref_conformance.plan.machine import Machine, needs, started
from moeref_conformance.plan.matrix import Matrix
from moeref_conformance.plan.plan import DEADLINE, RunPlan, Settings
from moeref_conformance.resolve import DUMP, resolve
from moeref_conformance.run.disk import is_full
from moeref_conformance.worlds import interrupts

OUT = Path("conformance-report")
RESULTS = "a results.jsonl, or the folder that holds it"
#: Seconds that a rank takes on two cores, by the whole CPU matrix with moeref as the target (`time .venv/bin/nox -s
#: conformance` on an AMD EPYC of the fifth generation). A static cell counts as one rank.
RANK_SECONDS = 860 / 1688


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code. Only the verdict "not conformant", or a difference, gives 1."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that has no ✗ gets ? in its place
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    import_from_this_folder()
    with interrupts.raised() as received, quiet_imports():
        code = _answer(options)
    if received and arguments is None:  # Python would wait for threads in which the oracle still computes
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _answer(options: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        for name in ("out", "keep", "file"):
            if path := getattr(options, name, None):
                _check_writable(path, folder=command in (_run, _report))
        return command(options)
    except KeyboardInterrupt as stop:
        print(", ".join(["moeref-conformance: interrupted", *stop.args]), file=sys.stderr)
        return INCOMPLETE
    except BadInput as error:
        print(f"moeref-conformance: {fit(str(error))}", file=sys.stderr)
        if isinstance(error, NothingRecorded):
            return INCOMPLETE
    except BrokenPipeError:  # as in `list | head`; Python's last flush must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:  # Python would exit with 1, which means "not conformant" here
        if is_full(str(error)):
            print(f"moeref-conformance: {error}: free some, or name other folders (--out, TMPDIR)", file=sys.stderr)
        else:
            print(fit(traceback.format_exc()), file=sys.stderr)
            print("moeref-conformance: this is an error of the kit, not a verdict", file=sys.stderr)
    return KIT_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="moeref-conformance", description=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"moeref-conformance {version_of('moeref')}")
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

    def command(name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        judges = act in (_run, _report)
        made = commands.add_parser(name, help=text, epilog=EXIT_CODES if judges else WORSE.get(name, DONE))
        made.set_defaults(command=act)
        return made

    made = command("list", _list, "cells of a matrix and rules")
    made.add_argument("--target", help="also say which cells this target claims")
    made.add_argument("--json", action="store_true", help="machine-readable")
    counting = "only count cells by the backend they have with 1, 4, 8 and 2 × 8 GPUs"
    made.add_argument("--backends", action="store_true", help=counting)
    _add_selection(made)
    _add_judging(command("run", _run, "judge a target"), matrix="cpu")
    _add_judging(command("smoke", _run, "judge an adapter in a few cells"), matrix="smoke")
    made = command("init", _init, "write an adapter to start from")
    made.add_argument("file", type=Path, nargs="?", default=Path("adapter.py"), help="default: adapter.py")
    made = command("inputs", _inputs, "write the checkpoint and tokens of a cell, for a run recorded elsewhere")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist yet")
    _add_selection(made)
    made = command("vectors", _vectors, "write what is expected of cells as JSON, for projects in other languages")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist yet")
    _add_selection(made, "smoke", rules=False)
    made = command("report", _report, "write the reports of a results.jsonl again")
    made.add_argument("results", type=_results, help=RESULTS)
    made.add_argument("--out", type=Path, metavar="DIR", help="default: next to the results")
    made = command("diff", _diff, "what changed between two runs; 1 if anything is worse")
    made.add_argument("old", type=_results, help=RESULTS)
    made.add_argument("new", type=_results, help=RESULTS)
    made = command("shards", _shards, "whether two targets load the same shards; 1 if not, known failures excepted")
    made.add_argument("left", help="a target, as for `run`")
    made.add_argument("right", help="another one")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the comparison as JSON")
    _add_selection(made, rules=False)
    made = command("table", _table, "one Markdown page on several results: figures, defects, families × layouts")
    several = f"{RESULTS}, with shards.json next to it if there is one"
    made.add_argument("results", type=_results, nargs="+", help=several)
    made.add_argument(
        "--defects", type=Path, metavar="FILE", help="what is told of the defects that known failures name"
    )
    made.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


def _results(text: str) -> Path:
    path = Path(text)
    return path / "results.jsonl" if path.is_dir() else path


def _add_judging(parser: argparse.ArgumentParser, matrix: str) -> None:
    add = parser.add_argument
    add("--target", required=True, help="a name, module:attr or dump:DIR; `moeref` is built in")
    add("--out", type=Path, default=OUT, metavar="DIR", help=f"folder of the results (default: {OUT})")
    backend = "gloo, gloo-cuda or nccl for all cells (default: auto, by GPUs for cells that leave it open)"
    add("--backend", default="auto", metavar="BACKEND", help=backend)
    add("--known", type=Path, metavar="FILE", help="known failures (default: known/<target>.toml)")
    add(
        "--deadline", type=float, default=DEADLINE, metavar="S", help=f"seconds a cell may take (default: {DEADLINE:g})"
    )
    add("--jobs", type=int, default=0, metavar="N", help="cells side by side (default: by cores)")
    add("--strict", action="store_true", help="known failures and SHOULD rules count as failures")
    add("--keep", type=Path, metavar="DIR", help="keep the records of all ranks here")
    _add_selection(parser, matrix)


def _add_selection(parser: argparse.ArgumentParser, matrix: str = "cpu", rules: bool = True) -> None:
    add = parser.add_argument
    add("--matrix", default=matrix, help=f"a shipped matrix or a file (default: {matrix})")
    add("--cell", action="append", default=[], help="only cells of this id, glob or tag; repeatable")
    if rules:
        add("--rule", action="append", default=[], help="only rules with this prefix, and what they require")
        profile = f"only the rules of {', '.join(PROFILES)}, and what they require"
        add("--profile", action="append", default=[], metavar="NAME", help=f"{profile}; repeatable")


def _list(options: argparse.Namespace) -> int:
    matrix = matrices.load(options.matrix)
    cells, chosen = matrix.select(options.cell), select([*options.rule, *groups_of(options.profile)])
    if options.backends:
        print(gpu_requirements.markdown(cells))
        return 0
    rules = [rule for rule in load_rules().values() if rule.id in chosen]
    rows = list(zip(cells, _why_not(options.target, cells), strict=True))
    if options.json:
        print(json.dumps(_listed(matrix, rows, rules, bool(options.target)), indent=2, ensure_ascii=False))
        return 0
    width = max(len(cell.id) for cell in cells)
    print(f"matrix {matrix.name}@{matrix.hash}: {len(cells)} cells")
    for cell, why in rows:
        print(f"  {cell.id:{width}}  {cell.layout.text}" + _remarks(cell, why))
    print(f"rules: {len(rules)}")
    for rule in rules:
        print(f"  {rule.id}  {rule.level:6}  {rule.profile:9}  {rule.text}")
    return 0


def _why_not(spec: str | None, cells: Sequence[Cell]) -> list[str | None]:
    """Why the target does not claim each cell; None for one that it claims, or without a target."""
    if not spec:
        return [None] * len(cells)
    claims = resolve(spec).claims
    # An open backend is listed as on a machine that has just the GPUs the cell needs.
    return [claims.why_not(replace(cell, backend=Machine().backend(cell))) for cell in cells]


def _listed(
    matrix: Matrix, rows: Sequence[tuple[Cell, str | None]], rules: Sequence[Rule], with_claims: bool
) -> dict[str, Any]:
    return {
        "matrix": {"name": matrix.name, "hash": matrix.hash},
        "cells": [
            {"id": cell.id, "layout": cell.layout.text, "tags": cell.tags, "needs": needs(cell), "gpus": cell.gpus}
            | ({"claimed": why is None, "why_not": why} if with_claims else {})
            for cell, why in rows
        ],
        "rules": [{"id": r.id, "level": r.level, "profile": r.profile, "text": r.text} for r in rules],
    }


def _remarks(cell: Cell, why_not: str | None) -> str:
    needed = [f"{cell.gpus} GPUs"] * bool(cell.gpus) + [gpu_requirements.words(cell)] * bool(needs(cell))
    remarks = [f"needs {' and '.join(needed)}"] * bool(needed) + [f"unclaimed: {why_not}"] * bool(why_not)
    return f"  ({'; '.join(remarks)})" if remarks else ""


def _run(options: argparse.Namespace) -> int:
    from moeref_conformance.run.open_files import allow_open_files

    allow_open_files()
    if started():
        from moeref_conformance.worlds.torchrun import take_part

        return take_part(options.target, lambda coordinator: _judge(options, coordinator))
    return _judge(options)


def _check_writable(path: Path, folder: bool) -> None:
    """Raise BadInput where no folder, or no file, can be written, before anything is computed for it."""
    there = next(one for one in (path, *path.absolute().parents) if os.path.lexists(one))
    if not there.is_dir() and (folder or there != path):
        raise BadInput(f"{path} cannot be written: {there} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK if there.is_dir() else os.W_OK):
        raise BadInput(f"{path} cannot be written: this user may not write to {there}")


def _judge(options: argparse.Namespace, coordinator: Any = None) -> int:
    from moeref_conformance.run.machinery import served

    given = {name: value for name, value in vars(options).items() if name not in ("command", "out")}
    with ExitStack() as opened:
        try:
            for line in filter(None, (of_this_folder(), _starting(options))):
                print(line, file=sys.stderr, flush=True)
            plan, parts = opened.enter_context(served(Settings.of(**given), coordinator))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("before the first cell, no report written") from None
        return _judge_by(plan, parts, options)


def _starting(options: argparse.Namespace) -> str:
    """What is prepared before the first cell, which takes seconds: said at once."""
    matrix = matrices.load(options.matrix)
    cells = matrix.select(options.cell)
    ranks, recorded = max(cell.processes for cell in cells), options.target.startswith(DUMP)
    doing = "reading the records of" if recorded else "importing megatron-core and the target"
    counted = f"{len(cells)} cell{'s' * (len(cells) != 1)} of matrix {options.matrix}"
    taking = "" if recorded else _taking(options, matrix, cells)
    return f"{counted}, up to {ranks} rank{'s' * (ranks != 1)}{taking}; {doing} {options.target}"


def _taking(options: argparse.Namespace, matrix: Matrix, cells: Sequence[Cell]) -> str:
    """How long a run takes, where that is minutes: as long as the one whose results it replaces, or an estimate."""
    if (last := _last_time(options, matrix)) >= 60:
        return f", {last / 60:.0f} minutes last time"
    estimate = sum(cell.processes for cell in cells) * RANK_SECONDS
    on_cpu = all(cell.backend in ("static", "gloo") for cell in cells)
    return f", about {estimate / 60:.0f} minutes on two cores" if on_cpu and estimate >= 60 else ""


def _last_time(options: argparse.Namespace, matrix: Matrix) -> float:
    """Seconds that the same target took for the same cells and rules, by the results in `--out`; 0 if not known."""
    chosen = {"cells": options.cell, "rules": options.rule, "profiles": options.profile}
    with suppress(BadInput, KeyError):  # none, or of another version
        last = read(options.out / "results.jsonl")
        same = (last.header["target"]["spec"], last.header["matrix"]["hash"]) == (options.target, matrix.hash)
        if same and chosen.items() <= last.header["settings"].items():
            return last.took
    return 0.0


def _judge_by(plan: RunPlan, parts: Any, options: argparse.Namespace) -> int:
    from moeref_conformance.report import write_all
    from moeref_conformance.report.progress import Progress
    from moeref_conformance.run.exclusive import exclusive
    from moeref_conformance.run.runner import run

    apart = frozenset(rule.id for rule in plan.rules.values() if rule.level == "SHOULD" and not options.strict)
    with exclusive([options.out, options.keep or options.out]), Progress(len(plan.cells), apart=apart) as progress:

        def interrupted(results: Results) -> None:
            page, cells = write_all(results, options.out), f"{len(results.seconds)} of {len(plan.cells)} cells"
            progress.say(f"interrupted, {cells}, report written: {page}")

        results = run(plan, options.out, progress, parts, interrupted)
        page = write_all(results, options.out)
    if plan.machine is not None and not plan.machine.count and any(plan.lacks(cell) for cell in plan.cells):
        print(f"No GPU: {plan.machine.why_not['gpu']}. What would run where there are some:")
        print(gpu_requirements.markdown(matrices.load(options.matrix).select(options.cell)))
    return _say(results, page)


def _init(options: argparse.Namespace) -> int:
    if options.file.suffix != ".py" or not options.file.stem.isidentifier():
        raise BadInput(f"{options.file}: the adapter is a module; name it like adapter.py")
    try:
        with options.file.open("x", encoding="utf-8") as file:
            file.write(files("moeref_conformance.targets").joinpath("skeleton.py").read_text(encoding="utf-8"))
    except FileExistsError:
        raise BadInput(f"{options.file} exists; name a file that does not") from None
    except FileNotFoundError:
        raise BadInput(f"{options.file.parent}: no such folder") from None
    folder = options.file.parent
    importable = not folder.is_absolute() and all(part.isidentifier() for part in folder.parts)
    place = ".".join([*folder.parts, options.file.stem]) if importable else options.file.stem
    there = "" if importable else f"cd {shlex.quote(str(folder))} && "
    print(f"{options.file}: an adapter that builds a model and loads nothing yet; `yours` marks what to write. Run it:")
    print(f"{there}moeref-conformance smoke --target {place}:target --cell qwen3_moe/tp2/gloo")
    return 0


def _inputs(options: argparse.Namespace) -> int:
    from moeref_conformance.oracles.checkpoint import expected

    require("transformers")
    if options.out.exists():
        raise BadInput(f"{options.out} exists; name a folder that does not")
    cells = _with_weights(options)
    with tempfile.TemporaryDirectory() as temporary:
        for variant, cell in {cell.variant: cell for cell in cells}.items():
            inputs, folder = expected(cell, Path(temporary)).inputs, options.out / variant
            # Only what a run needs: the expected logits stay here.
            shutil.copytree(inputs["checkpoint"], folder / "checkpoint")
            shutil.copy(inputs["tokens"], folder / "tokens.safetensors")
            print(f"{variant}: {folder / 'checkpoint'} and {folder / 'tokens.safetensors'}")
    return 0


def _with_weights(options: argparse.Namespace) -> list[Cell]:
    """The cells that are chosen; BadInput if there are some of published models."""
    cells = list(matrices.load(options.matrix).select(options.cell))
    if sizes := sorted({cell.size for cell in cells} - {TINY}):
        raise BadInput(f"published models ({', '.join(sizes)}) have no weights here; name cells of a tiny model")
    return cells


def _vectors(options: argparse.Namespace) -> int:
    require("transformers", "megatron.core")
    from moeref_conformance.run.vectors import write

    if options.out.exists():
        raise BadInput(f"{options.out} exists; name a folder that does not")
    cells = _with_weights(options)
    with tempfile.TemporaryDirectory() as temporary:
        for path in write(cells, options.out, Path(temporary)):
            print(path)
    return 0


def _report(options: argparse.Namespace) -> int:
    require("jinja2")
    from moeref_conformance.report import write_all

    results = read(options.results)
    return _say(results, write_all(results, options.out or options.results.parent))


def _diff(options: argparse.Namespace) -> int:
    from moeref_conformance.report.diff import diff

    changes = diff(read(options.old), read(options.new))
    print("\n".join(changes.lines))
    return 1 if changes.worse else 0


def _shards(options: argparse.Namespace) -> int:
    require("transformers", "megatron.core")
    from moeref_conformance.run.shards import run

    matrix, comparisons = matrices.load(options.matrix), []
    for comparison in run(options.left, options.right, matrix, matrix.select(options.cell)):
        print(comparison.text, flush=True)
        comparisons.append(comparison)
    if options.out:
        shards.write(options.out, options.left, options.right, comparisons)
    equal, same = sum(c.equal for c in comparisons), sum(c.same for c in comparisons)
    print(f"{equal} shards equal; {same} of {len(comparisons)} cells equal throughout")
    return 0 if all(comparison.accepted for comparison in comparisons) else 1


def _table(options: argparse.Namespace) -> int:
    from moeref_conformance.report.table import render

    pairs = [(read(path), shards.read(path.parent / "shards.json")) for path in options.results]
    defects = read_toml(options.defects) if options.defects else {}
    options.out.write_text(render(pairs, defects), encoding="utf-8")
    return 0


def _say(results: Results, page: Path) -> int:
    from moeref_conformance.report.terminal import failures

    counts = ", ".join(f"{number} {status}" for status, number in results.counts.items() if number)
    if results.advice:
        counts += f"; {results.advice} of these are of recommendations (SHOULD), which decide nothing"
    print(f"{results.header['target']['name']} {results.header['target']['version']}: {counts}")
    for line in [*failures(results), *(f"  {standing}" for standing in results.headline.standings)]:
        print(line)
    print(f"report: {page}")
    print(f"{EXIT_WORDS[results.exit_code]}: {results.headline}")
    return results.exit_code
