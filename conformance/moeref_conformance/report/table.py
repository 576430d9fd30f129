"""One Markdown page on several targets: a row for each, then their defects by severity, then families × layouts.

A defect is what known failures name by `defect`. `--defects FILE` says more of it:

    [a-defect]
    severity = "silently wrong"      # one of SEVERITIES
    what = "…"                       # one sentence
    affects = "…"                    # whose runs
    main = "…"                       # whether the project's main has it fixed, and how that is known
    link = "https://…"               # optional: where it is reported or stands in the source
    script = "head.py slime"         # shows it without the kit: a file of SCRIPTS, and its arguments
    no_script = "…"                  # or why none does
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moeref_conformance.contract.checks import BadInput, check_keys, check_known
from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.shards import ShardComparison

SEVERITIES = ("silently wrong", "silently incomplete", "loud", "message", "design")
NEEDED = ("severity", "what", "affects", "main")
ALLOWED = (*NEEDED, "link", "script", "no_script")
#: Where scripts are, and where they are from the page.
SCRIPTS, FROM_PAGE = "docs/examples/defects", "../examples/defects"
#: Columns of the first table, and the rule that each counts: cells that pass, of those that are claimed.
COLUMNS = {
    "runs to the end": "RUN-001",
    "loads": "LOD-001",
    "sends all names": "EXP-001",
    "bytes exact": "EXP-002",
    "logits": "FWD-001",
    "refuses a lacking tensor": "LOD-003",
    "refuses an unknown parameter": "NAM-006",
}
#: What shows a defect, known or not; other pages count a known failure apart.
DEFECTIVE = ("fail", "xfail", "xpass", "error")
Run = tuple[Results, Sequence[ShardComparison]]


def render(runs: Sequence[Run], defects: Mapping[str, Any] | None = None) -> str:
    """The page. Raises `BadInput` for a defect that is not well formed."""
    told = checked(defects or {})
    parts = [_overview(runs), *_defects(runs, told), "## Families and layouts", KEY]
    parts += [_section(results, shards) for results, shards in runs]
    return "\n\n".join(parts) + "\n"


def checked(defects: Mapping[str, Any]) -> Mapping[str, Any]:
    """`defects`, each with what it needs. Raises `BadInput`."""
    for name, entry in defects.items():
        check_keys(f"defect {name}", entry, ALLOWED, NEEDED)
        check_known(f"defect {name}", "severity", [entry["severity"]], SEVERITIES)
        if "script" in entry and "no_script" in entry:
            raise BadInput(f"defect {name}: it has a script, and a reason to have none")
        if empty := [key for key in entry if not isinstance(entry[key], str) or not entry[key].strip()]:
            raise BadInput(f"defect {name}: {', '.join(empty)} is not a text")
    return defects


def _name(results: Results) -> str:
    target = results.header["target"]
    return f"{target['name']} {target['version']}"


def _rows(results: Results, rule: str) -> list[Verdict]:
    """The verdicts on a rule in claimed cells."""
    return [v for v in results.verdicts if v.rule == rule and v.status not in ("unclaimed", "disabled")]


def _overview(runs: Sequence[Run]) -> str:
    lines = [
        "Cells that pass, of those that are claimed. 42/42 under “bytes exact” says that every exported tensor of",
        "every cell is the checkpoint's, byte for byte.",
        "",
        f"| peer | {' | '.join(COLUMNS)} | not judged, and why |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for results, _ in runs:
        figures = [_figure(_rows(results, rule)) for rule in COLUMNS.values()]
        lines.append(f"| {_name(results)} | {' | '.join(figures)} | {_not_judged(results)} |")
    lines += ["", *(f"- {_name(results)}: {_made(results)}" for results, _ in runs)]
    return "\n".join(lines)


def _figure(rows: Sequence[Verdict]) -> str:
    return f"{sum(v.status == 'pass' for v in rows)}/{len(rows)}" if rows else "–"


def _not_judged(results: Results) -> str:
    """Why a column says nothing of claimed cells, and of how many."""
    why: dict[str, set[str]] = {}
    for verdict in (one for rule in COLUMNS.values() for one in _rows(results, rule) if one.status == "untested"):
        needed = re.match(r"requires (\S+),", verdict.reason)
        cause = defect_of(results.table[verdict.cell].get(needed[1])) if needed else ""
        reason = re.sub(r"^rank \d+ ", "a rank ", verdict.reason.split(":")[0])
        why.setdefault(f"`{cause}`" if cause else _plain(reason), set()).add(verdict.cell)
    listed = [f"{reason}: {len(cells)}" for reason, cells in why.items()]
    unclaimed = sum(not cell["claimed"] for cell in results.header["cells"])
    return "; ".join([*listed, *([f"not claimed: {unclaimed} cells"] if unclaimed else [])]) or "–"


def _made(results: Results) -> str:
    """When, with which versions, and in how many cells of the matrix."""
    header = results.header
    versions = ", ".join(f"{k} {v}" for k, v in header["versions"].items() if v)
    judged = sum(
        any(v.status not in ("unclaimed", "disabled") for v in rows.values()) for rows in results.table.values()
    )
    cut = "" if results.complete else " (the run did not end)"
    return f"{header['date'][:10]}, {versions}; {judged} cells of matrix {header['matrix']['name']}{cut}"


def defect_of(verdict: Verdict | None) -> str:
    """The id of the defect that a known failure names, or nothing."""
    found = re.match(r"(?:flaky: )?\[([\w.-]+)\] ", verdict.reason) if verdict else None
    return found[1] if found and verdict and verdict.status == "xfail" else ""


def _defects(runs: Iterable[Run], told: Mapping[str, Any]) -> list[str]:
    """Sections by severity. A known failure without an entry, and any other failure, is listed as such."""
    seen: dict[str, list[tuple[Results, Verdict]]] = {}
    others: list[str] = []
    for results, _ in runs:
        for verdict in results.verdicts:
            if verdict.status in DEFECTIVE:
                name = defect_of(verdict)
                if name in told:
                    seen.setdefault(name, []).append((results, verdict))
                else:
                    said = verdict.findings[0].message if verdict.findings else verdict.reason
                    others.append(f"- {_name(results)}: {verdict.rule} in {verdict.cell}: {_plain(said)}")
    parts = ["## Defects by severity"]
    for severity in SEVERITIES:
        names = [name for name in told if told[name]["severity"] == severity and name in seen]
        if names:
            parts += [f"### {severity.capitalize()}", *(_defect(name, told[name], seen[name]) for name in names)]
    return parts + (["### Not looked into yet", "\n".join(others)] if others else [])


def _defect(name: str, entry: Mapping[str, str], found: Sequence[tuple[Results, Verdict]]) -> str:
    first, verdict = found[0]
    rules = Counter(v.rule for _, v in found)
    where = ", ".join(f"{rule} in {number} cell{'s' * (number > 1)}" for rule, number in sorted(rules.items()))
    lines = [
        f"**`{name}`** ({_name(first)}). {entry['what']}",
        "",
        f"- Affects: {entry['affects']}",
        f"- On main: {entry['main']}",
    ]
    lines += [f"- Upstream: <{entry['link']}>"] if "link" in entry else []
    lines += [f"- Without the kit: {shown}"] if (shown := _script(entry)) else []
    again = f"{command(first.header['target']['spec'])} --cell {verdict.cell} --rule {verdict.rule}"
    return "\n".join([*lines, f"- Found by {where}: `{again}`"])


def _script(entry: Mapping[str, str]) -> str:
    """A link to the script, with the arguments it takes, or why there is none."""
    if "no_script" in entry:
        return f"no script, since {entry['no_script']}"
    file, _, words = entry.get("script", "").partition(" ")
    return f"[{file}]({FROM_PAGE}/{file}){f' `{words}`' if words else ''}" if file else ""


def command(spec: str) -> str:
    """The command that judges the target, up to its selection."""
    return f".venv/bin/nox -s {shlex.quote(f'peers({spec})')} --"


KEY = """\
`=`: no MUST fails. A number: the defect of that number below the table. ✗: another failure. ?: not judged.
Recommendations are left out."""


def _section(results: Results, shards: Sequence[ShardComparison]) -> str:
    """Families × layouts of one target, what it conforms to, and its shards."""
    cells = {cell["id"]: cell for cell in results.header["cells"] if cell["claimed"]}
    layouts = list(dict.fromkeys(name.split("/")[1] for name in cells))
    numbers = {name: number for number, name in enumerate(_shown(results), 1)}
    lines = [f"| | {' | '.join(layouts)} |", "|---|" + "---|" * len(layouts)]
    for variant in dict.fromkeys(name.split("/")[0] for name in cells):
        by_layout = {name.split("/")[1]: name for name in cells if name.split("/")[0] == variant}
        marks = [_mark(results, by_layout[name], numbers) if name in by_layout else "" for name in layouts]
        lines.append(f"| {_plain(variant)} | {' | '.join(marks)} |")
    parts = [f"### {_name(results)}", "\n".join(lines)]
    parts += ["\n".join(f"{number}. `{name}`" for name, number in numbers.items())] if numbers else []
    parts += ["\n".join(f"- {standing}" for standing in results.headline.standings if standing.claimed)]
    return "\n\n".join([*parts, *([_shards(results.header["target"]["spec"], shards)] if shards else [])])


def _shown(results: Results) -> list[str]:
    """Defects that a MUST shows, in the order of the cells."""
    found = [defect_of(v) for rows in results.table.values() for v in rows.values() if results.is_must(v.rule)]
    return [name for name in dict.fromkeys(found) if name]


def _mark(results: Results, cell: str, numbers: Mapping[str, int]) -> str:
    musts = [v for v in results.table[cell].values() if results.is_must(v.rule)]
    red = [v for v in musts if v.status in DEFECTIVE]
    if red:
        return " ".join(dict.fromkeys(str(numbers.get(defect_of(v), "✗")) for v in red))
    return "=" if any(v.status == "pass" for v in musts) else "?"


def _plain(text: str) -> str:
    pieces = text.replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def _shards(spec: str, shards: Sequence[ShardComparison]) -> str:
    same = [comparison for comparison in shards if comparison.same]
    total = sum(comparison.equal for comparison in shards)
    lines = [
        f"{total} shards of {len(shards)} cells have the hash that moeref's have; in {len(same)} cells all of them do: "
        f"`{command(spec)} --shards`."
    ]
    unlike = [f"- {_plain(comparison.text)}" for comparison in shards if not comparison.same]
    return "\n\n".join([*lines, *(["\n".join(unlike)] if unlike else [])])
