"""One Markdown page on several targets: rules × cells, what each cell fails by, and how to repeat it.

A row is a cell of the matrix, a column a rule. An entry is `=` for exact, the largest deviation within the rule's
tolerance, or a mark with the number of its cause below the table. Targets that claim less have fewer rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.shards import ShardComparison
from moeref_conformance.report.view import Mark, View, view

LEGEND = """\
`=` exact, bitwise · a number: the largest deviation, within the rule's tolerance · ✗ fails, with the number of its
cause below · △ does not follow a recommendation, which decides nothing · ? could not be judged, since a rule that it
requires failed · – not claimed. A row with its `--cell` and a column with its `--rule`, put after the command above the
table, repeat what stands where they meet."""


def render(runs: Sequence[tuple[Results, Sequence[ShardComparison]]]) -> str:
    """Markdown: one section for each target, each with its tables, causes, and shards compared with moeref's."""
    return "\n\n".join([LEGEND, *(section(results, shards) for results, shards in runs)]) + "\n"


def section(results: Results, shards: Sequence[ShardComparison]) -> str:
    """One target: its versions, tables, causes, what it does not claim, and its shards."""
    shown, target, header = view(results), results.header["target"], results.header
    versions = " · ".join(f"{k} {v}" for k, v in header["versions"].items() if v)
    causes = _causes(results.verdicts)
    rules = [rule.id for rule in shown.rules if _judged(results, rule.id)]
    parts = [
        f"## {target['name']} {target['version']}",
        f"{versions} · matrix {header['matrix']['name']}@{header['matrix']['hash']} · {header['date'][:10]}",
        "\n".join(f"- {standing}" for standing in results.headline.standings),
        f"```text\n{command(target['spec'])} --cell CELL --rule RULE\n```",
        *_tables(results, shown, rules, causes),
    ]
    if causes:
        parts += ["### Causes", "\n".join(f"{number}. {text}" for text, number in causes.items())]
    parts += ["### Not claimed", _unclaimed(results)] if _unclaimed(results) else []
    if shards:
        parts += ["### Shards, against moeref's", _shards(target["spec"], shards)]
    return "\n\n".join(parts)


def command(spec: str) -> str:
    """The command that judges the target, up to its selection."""
    return f".venv/bin/nox -s {shlex.quote(f'peers({spec})')} --"


def _judged(results: Results, rule: str) -> bool:
    return any(v.rule == rule and v.status not in ("unclaimed", "disabled") for v in results.verdicts)


def _cause(verdict: Verdict) -> str:
    """The reason of a known failure, else the first finding."""
    first = verdict.findings[0].message if verdict.findings else ""
    return _plain(verdict.reason or first)


def _plain(text: str) -> str:
    pieces = text.replace("|", "\\|").split("`")
    pieces[::2] = [piece.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def _causes(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Causes in the order of the rules, numbered from 1."""
    bad = [v for v in verdicts if v.status in ("fail", "xfail", "xpass", "error")]
    causes = dict.fromkeys(_cause(v) for v in sorted(bad, key=lambda v: v.rule))
    return {text: number for number, text in enumerate(causes, 1)}


def _tables(results: Results, shown: View, rules: Sequence[str], causes: dict[str, int]) -> list[str]:
    parts: list[str] = []
    for block in shown.blocks:
        rows = [row for row in block.rows if any(mark.status not in ("unclaimed", "") for mark in row.marks.values())]
        if not rows:
            continue
        head = [f"`--rule {rule}`" if not parts else rule for rule in rules]
        lines = [f"| `--cell` | {' | '.join(head)} |", "|---|" + "---|" * len(rules)]
        for row in rows:
            verdicts = results.table[row.id]
            marks = [
                _mark(row.marks.get(rule, Mark()), verdicts.get(rule), causes, not results.decides(rule))
                for rule in rules
            ]
            lines.append(f"| `{row.id}` | {' | '.join(marks)} |")
        parts.append("\n".join(lines))
    return parts


def _mark(mark: Mark, verdict: Verdict | None, causes: dict[str, int], advice: bool) -> str:
    if verdict is None:
        return ""
    if verdict.status == "pass":
        return f"≤ {mark.text}" if mark.status == "near" else "="
    if verdict.status in ("fail", "xfail", "xpass", "error"):
        return f"{'△' if advice else '✗'} {causes[_cause(verdict)]}"
    return {"untested": "?", "unclaimed": "–", "disabled": ""}[verdict.status]


def _unclaimed(results: Results) -> str:
    """Cells that the target does not claim, by reason."""
    by_reason: dict[str, list[str]] = {}
    claimed = {cell["id"] for cell in results.header["cells"] if cell["claimed"]}
    for verdict in results.verdicts:
        if verdict.cell not in claimed and verdict.status == "unclaimed":
            by_reason.setdefault(verdict.reason, []).append(verdict.cell)
    return "\n".join(f"- {_plain(reason)}: {len(set(cells))} cells" for reason, cells in by_reason.items())


def _shards(spec: str, shards: Sequence[ShardComparison]) -> str:
    same = [comparison for comparison in shards if comparison.same]
    total = sum(comparison.equal for comparison in shards)
    lines = [
        f"{total} shards of {len(shards)} cells have the hash that moeref's have; "
        f"in {len(same)} cells all of them do. To repeat:",
        f"```text\n{command(spec)} --shards --cell CELL\n```",
    ]
    unlike = [f"- {_plain(comparison.text)}" for comparison in shards if not comparison.same]
    return "\n\n".join([*lines, *(["\n".join(unlike)] if unlike else [])])
