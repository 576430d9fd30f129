"""One page that needs nothing else: styles inline, no script, no request. Its text is in `template.html.j2`."""

from __future__ import annotations

import re
from typing import Any

from moeref_conformance.contract.results import Results
from moeref_conformance.report.issues import pieces
from moeref_conformance.report.view import LEGEND, SHOWN, anchor, group_of, view, where


def render(results: Results) -> str:
    """The page. All text from targets and matrices is escaped."""
    import jinja2  # of the extra `kit`: a run without it says so before it begins

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moeref_conformance.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(anchor=anchor, family=family, pieces=pieces, group_of=group_of, where=where)
    shown = view(results)
    names = [*dict.fromkeys(rule.group for rule in shown.rules), *(rule.id for rule in shown.rules)]
    return environment.get_template("template.html.j2").render(
        v=shown,
        results=results,
        header=results.header,
        legend=LEGEND,
        shown=SHOWN,
        facts=facts(results),
        rule_names=names,
    )


def family(variant: str) -> str:
    """The family or size that a variant begins with, as a class of the page."""
    return re.sub(r"[^\w-]", "-", variant.partition("+")[0])


def facts(results: Results) -> list[tuple[str, str]]:
    """Everything that decided this run, as (label, value)."""
    header, settings = results.header, results.header["settings"]
    claims: dict[str, Any] = header["target"]["claims"]
    chosen = ", ".join([*settings["cells"], *settings["rules"], *settings["profiles"]]) or "everything"
    known = f"{settings['known']} ({settings['known entries']})" if settings["known"] else "none"
    # The empty precision means that of the dtype, and is not shown.
    named = {name: [v for v in value if v] for name, value in claims.items() if isinstance(value, list)}
    claimed = [f"{name}: {', '.join(value)}" for name, value in named.items() if value]
    limits = [f"{axis} ≤ {most}" for axis, most in claims["limits"].items()]
    return [
        ("Target", f"{header['target']['spec']} → {header['target']['name']} {header['target']['version']}"),
        ("Kit", f"{header['kit']}, rules@{header['rules']['hash']}"),
        ("Matrix", f"{header['matrix']['name']}@{header['matrix']['hash']}, {header['matrix']['cells']} cells"),
        ("Selection", chosen),
        ("Versions", ", ".join(f"{name} {version}" for name, version in header["versions"].items())),
        ("Seed", str(header["seed"])),
        ("Deadline", f"{settings['deadline']:g} s a cell, {settings['jobs']} at a time"),
        ("Known failures", known + (", strict" if settings["strict"] else "")),
        ("Platform", header["platform"]),
        ("Date", header["date"]),
        ("Claims", "; ".join([*claimed, *limits]) + ("; tied" if claims["tied"] else "")),
    ]
