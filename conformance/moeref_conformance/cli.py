"""The command line: `list`, `smoke`, `run`, `inputs`, `report`, `diff`, `shards`, `table`.

Exit codes: 0 conformant, 1 not conformant, 2 bad input or an error of the kit, 3 incomplete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeref_conformance.contract.checks import BadInput
from moeref_conformance.contract.published_models import TINY
from moeref_conformance.contract.rules import load_rules, select
from moeref_conformance.plan import gpu_requirements as census
from moeref_conformance.plan import matrix as matrices
from moeref_conformance.plan.machine import Machine, needs, started

OUT = Path("conformance-report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code. Nothing but a verdict of not conformant gives 1."""
    options = _parser().parse_args(arguments)
    # As with `python -m`: an adapter next to where one stands can be named by module:attr.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except BadInput as error:
        print(f"moeref-conformance: {error}", file=sys.stderr)
    except BrokenPipeError:  # `list | head`: the reader has seen enough, and Python's last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception:  # Python would exit with 1, which means "not conformant" here
        traceback.print_exc()
        print("moeref-conformance: this is an error of the kit, not a verdict", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeref-conformance", description=__doc__.splitlines()[0] if __doc__ else None
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    listing = commands.add_parser("list", help="cells of a matrix and rules")
    listing.add_argument("--target", help="say of each cell whether this target claims it")
    listing.add_argument("--json", action="store_true", help="machine-readable")
    listing.add_argument(
        "--backends", action="store_true", help="only count: which world cells run in with 1, 4, 8 and 2 × 8 GPUs"
    )
    _selection(listing)
    listing.set_defaults(command=_list)

    for name, help_text in (("run", "judge a target"), ("smoke", "judge the adapter in seconds")):
        run = commands.add_parser(name, help=help_text)
        run.add_argument("--target", required=True, help="a name, module:attr or dump:DIR; `moeref` is built in")
        run.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"where results go (default: {OUT})")
        run.add_argument(
            "--backend",
            default="auto",
            metavar="WORLD",
            help="gloo, gloo-cuda or nccl for all cells (default: auto, the machine decides what is left open)",
        )
        run.add_argument("--known", type=Path, metavar="FILE", help="known failures (default: known/<target>.toml)")
        run.add_argument("--deadline", type=float, default=120.0, metavar="S", help="seconds a cell may take")
        run.add_argument("--jobs", type=int, default=0, metavar="N", help="cells side by side (default: by cores)")
        run.add_argument("--strict", action="store_true", help="known failures and SHOULD rules count as failures")
        run.add_argument("--keep", type=Path, metavar="DIR", help="keep the records of all ranks here")
        _selection(run, matrix="smoke" if name == "smoke" else "cpu")
        run.set_defaults(command=_run)

    inputs = commands.add_parser(
        "inputs", help="write the checkpoint and tokens of a cell, for a run recorded elsewhere"
    )
    inputs.add_argument("--out", type=Path, required=True, metavar="DIR", help="must not exist yet")
    _selection(inputs)
    inputs.set_defaults(command=_inputs)

    report = commands.add_parser("report", help="write the reports of a results.jsonl again")
    report.add_argument("results", type=Path)
    report.add_argument("--out", type=Path, metavar="DIR", help="default: next to the results")
    report.set_defaults(command=_report)

    difference = commands.add_parser("diff", help="what changed between two runs; 1 if anything is worse")
    difference.add_argument("old", type=Path)
    difference.add_argument("new", type=Path)
    difference.set_defaults(command=_diff)

    shards = commands.add_parser(
        "shards", help="whether two targets load the same shards; 1 if not, known failures excepted"
    )
    shards.add_argument("left", help="a target, as for `run`")
    shards.add_argument("right", help="another one")
    shards.add_argument("--out", type=Path, metavar="FILE", help="write what was compared as JSON")
    _selection(shards, rules=False)
    shards.set_defaults(command=_shards)

    table = commands.add_parser("table", help="one Markdown page on several results: rules × cells, with causes")
    table.add_argument(
        "results", type=Path, nargs="+", help="results.jsonl, with shards.json next to it if there is one"
    )
    table.add_argument("--out", type=Path, required=True, metavar="FILE")
    table.set_defaults(command=_table)
    return parser


def _selection(parser: argparse.ArgumentParser, matrix: str = "cpu", rules: bool = True) -> None:
    parser.add_argument("--matrix", default=matrix, help=f"a shipped matrix or a file (default: {matrix})")
    parser.add_argument("--cell", action="append", default=[], help="only cells of this id, glob or tag; repeatable")
    if rules:
        parser.add_argument(
            "--rule", action="append", default=[], help="only rules with this prefix, and what they require"
        )


def _list(options: argparse.Namespace) -> int:
    matrix = matrices.load(options.matrix)
    cells, chosen = matrix.select(options.cell), select(options.rule)
    claims = None
    if options.target:
        from moeref_conformance.resolve import resolve

        claims = resolve(options.target).claims
    rules = [rule for rule in load_rules().values() if rule.id in chosen]
    # A world that the machine is to choose is the one of a machine with as many GPUs as the cell takes at least.
    here = [replace(cell, backend=Machine().backend(cell)) for cell in cells]
    rows = [(cell, claims.why_not(on) if claims else None) for cell, on in zip(cells, here, strict=True)]
    if options.backends:
        print(census.markdown(cells))
        return 0
    if options.json:
        data: dict[str, Any] = {
            "matrix": {"name": matrix.name, "hash": matrix.hash},
            "cells": [
                {"id": cell.id, "layout": cell.layout.text, "tags": cell.tags, "needs": needs(cell), "gpus": cell.gpus}
                | ({"claimed": why is None, "why_not": why} if claims else {})
                for cell, why in rows
            ],
            "rules": [{"id": rule.id, "level": rule.level, "text": rule.text} for rule in rules],
        }
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return 0
    width = max(len(cell.id) for cell in cells)
    print(f"matrix {matrix.name}@{matrix.hash}: {len(cells)} cells")
    for cell, why in rows:
        remarks = [f"{cell.gpus} GPUs"] * bool(cell.gpus) + [census.words(cell)] * bool(needs(cell))
        remarks = [f"needs {' and '.join(remarks)}"] * bool(remarks) + [f"unclaimed: {why}"] * bool(why)
        print(f"  {cell.id:{width}}  {cell.layout.text}" + (f"  ({'; '.join(remarks)})" if remarks else ""))
    print(f"rules: {len(rules)}")
    for rule in rules:
        print(f"  {rule.id}  {rule.level:6}  {rule.text}")
    return 0


def _run(options: argparse.Namespace) -> int:
    if started():
        from moeref_conformance.worlds.torchrun import take_part

        return take_part(options.target, lambda crew: _judge(options, crew))
    return _judge(options)


def _judge(options: argparse.Namespace, crew: Any = None) -> int:
    from moeref_conformance.plan.plan import Settings, prepare
    from moeref_conformance.report import write_all
    from moeref_conformance.report.progress import Progress
    from moeref_conformance.run.runner import machinery, run

    plan = prepare(
        Settings(
            target=options.target,
            matrix=options.matrix,
            cells=tuple(options.cell),
            rules=tuple(options.rule),
            backend=options.backend,
            known=options.known,
            deadline=options.deadline,
            jobs=options.jobs,
            strict=options.strict,
            keep=options.keep,
        )
    )
    with Progress(len(plan.cells)) as progress:
        results = run(plan, options.out, progress, machinery(crew))
    if plan.machine is not None and not plan.machine.count and any(plan.lacks(cell) for cell in plan.cells):
        from rich.console import Console

        print(f"No GPU: {plan.machine.why_not['gpu']}. What would run where there are some:")
        Console().print(census.table(matrices.load(options.matrix).select(options.cell)))
    return _say(results, write_all(results, options.out))


def _inputs(options: argparse.Namespace) -> int:
    from moeref_conformance.oracles.checkpoint import expected

    if options.out.exists():
        raise BadInput(f"{options.out} exists; name a folder that does not")
    cells = matrices.load(options.matrix).select(options.cell)
    sizes = sorted({cell.size for cell in cells} - {TINY})
    if sizes:
        raise BadInput(f"published models ({', '.join(sizes)}) have no weights here; name cells of a tiny model")
    with tempfile.TemporaryDirectory() as made_here:
        for variant, cell in {cell.variant: cell for cell in cells}.items():
            inputs, folder = expected(cell, Path(made_here)).inputs, options.out / variant
            # Only what a run needs: the expected logits stay here.
            shutil.copytree(inputs["checkpoint"], folder / "checkpoint")
            shutil.copy(inputs["tokens"], folder / "tokens.safetensors")
            print(f"{variant}: {folder / 'checkpoint'} and {folder / 'tokens.safetensors'}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from moeref_conformance.contract.results import read
    from moeref_conformance.report import write_all

    results = read(options.results)
    return _say(results, write_all(results, options.out or options.results.parent))


def _diff(options: argparse.Namespace) -> int:
    from moeref_conformance.contract.results import read
    from moeref_conformance.report.diff import diff

    changes = diff(read(options.old), read(options.new))
    print("\n".join(changes.lines))
    return 1 if changes.worse else 0


def _shards(options: argparse.Namespace) -> int:
    from moeref_conformance.plan import known_failures as known
    from moeref_conformance.resolve import resolve
    from moeref_conformance.run import shards

    matrix, found = matrices.load(options.matrix), []
    files = {known.find(matrix, resolve(spec).info.name) for spec in (options.left, options.right)}
    failures = [entry for file in files if file for entry in known.load(file, matrix)]
    for compared in shards.run(options.left, options.right, matrix.select(options.cell), failures):
        print(compared.text, flush=True)
        found.append(compared)
    if options.out:
        shards.write(options.out, options.left, options.right, found)
    same = sum(compared.same for compared in found)
    print(f"{sum(compared.equal for compared in found)} shards equal; {same} of {len(found)} cells equal throughout")
    return 0 if all(compared.fine for compared in found) else 1


def _table(options: argparse.Namespace) -> int:
    from moeref_conformance.contract.results import read
    from moeref_conformance.report.table import render
    from moeref_conformance.run import shards

    pairs = [(read(path), shards.read(path.parent / "shards.json")) for path in options.results]
    options.out.write_text(render(pairs), encoding="utf-8")
    return 0


def _say(results: Any, page: Path) -> int:
    from moeref_conformance.contract.results import EXIT_WORDS

    counts = ", ".join(f"{number} {status}" for status, number in results.counts.items() if number)
    print(f"{results.header['target']['name']} {results.header['target']['version']}: {counts}")
    print(f"report: {page}")
    print(f"{EXIT_WORDS[results.exit_code]}: {results.headline}")
    return int(results.exit_code)
