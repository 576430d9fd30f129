"""The summary for a CI step page: headline, one table of variants × rule groups, and the failures."""

from __future__ import annotations

from dataclasses import replace

from moeref_conformance.contract.results import Results
from moeref_conformance.report.causes import Cause, Failure
from moeref_conformance.report.view import Mark, View, lines, view

STATUS = {"advice": "not followed"}
MOST = 20  # causes shown; the page and results.jsonl have all of them


def render(results: Results) -> str:
    """GitHub-flavoured Markdown."""
    shown, header = view(results), results.header
    target, matrix = header["target"], header["matrix"]
    versions = " · ".join(f"{name} {version}" for name, version in header["versions"].items())
    parts = [
        f"## {_text(target['name'])} {_text(target['version'])}: {shown.state}",
        f"**{results.headline}**",
        f"kit {header['kit']} · rules@{header['rules']['hash']} · matrix {matrix['name']}@{matrix['hash']} · "
        f"{versions} · seed {header['seed']} · {header['date']}",
        "\n".join(f"- {_text(str(standing))}" for standing in results.headline.standings),
        " · ".join(f"{number} {STATUS.get(status, status)}" for status, number in shown.counts.items() if number),
        _table(shown),
    ]
    if not results.complete:
        parts.insert(2, "The run did not finish: what is missing here was not judged.")
    for title, failures in (
        ("Failures", shown.red),
        ("Recommendations not followed", shown.advice),
        ("Known failures", shown.known_failures),
    ):
        texts = [_cause(failure, cause) for failure in failures for cause in failure.causes]
        if texts:
            parts += [f"### {title}", *texts[:MOST]]
            if len(texts) > MOST:
                parts.append(f"and {len(texts) - MOST} more.")
    if shown.reasons:
        parts.append("### Not judged")
        rows = [
            f"| {status} | {_text(reason.splitlines()[0] if reason else '')} | {len(rules)} | {len(cells)} |"
            for status, reason, rules, cells in shown.reasons
        ]
        parts.append("\n".join(["| status | reason | rules | cells |", "|---|---|--:|--:|", *rows]))
    return "\n\n".join(parts) + "\n"


def _cause(failure: Failure, cause: Cause) -> str:
    """A cause with its first finding, and which rules of the same cells follow from it."""
    first = replace(cause.verdict, findings=(cause.finding,) if cause.finding else ())
    follows = ", ".join(f"{other.rule.id} in {other.cells} cell{'s' * (other.cells > 1)}" for other in failure.follows)
    text = [*lines(first), *([f"follows from {failure.rule.id}: {follows}"] if follows else [])]
    fenced = _unfenced("\n".join(text))
    return f"**{failure.rule.id}** {_text(cause.text)}\n\n```\n{fenced}\n```"


def _table(shown: View) -> str:
    groups = [group for group, _ in shown.groups]
    rows = [f"| variant | backend | cells | {' | '.join(groups)} |", "|---|---|--:|" + "---|" * len(groups)]
    for block in shown.blocks:
        marks = [block.tallies.get(group, Mark(text="")) for group in groups]
        marked = [f"**{m.text}**" if m.status in ("fail", "error", "xpass") else m.text for m in marks]
        rows.append(f"| {block.variant} | {block.backend} | {len(block.rows)} | {' | '.join(marked)} |")
    return "\n".join(rows)


def _text(value: str) -> str:
    """Free text for a table cell or a heading."""
    return _unfenced(value).replace("|", "\\|").replace("<", "&lt;")


def _unfenced(value: str) -> str:
    return value.replace("```", "'''")
