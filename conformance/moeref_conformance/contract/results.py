"""The results of a run: verdicts, the `results.jsonl` file that holds them, the headline and the exit code.

The file is one JSON object a line. `header` says who was judged by what; `verdict` lines follow as they come, with a
`cell` line after those of a cell; `footer` counts. Each line is flushed: after a crash the file is valid but has no
footer, and counts as incomplete.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from moeref_conformance.contract.checks import BadInput, read_json_lines
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.standing import Headline, standings
from moeref_conformance.contract.statuses import CONFORMANT, INCOMPLETE, KIT_ERROR, NOT_CONFORMANT, RED, STATUSES
from moeref_conformance.contract.texts import fit

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One rule in one cell. `met` says how closely a passed rule was met, `reason` explains any other status."""

    cell: str
    rule: str
    status: str
    met: str = ""
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    repeat: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is not one of {', '.join(STATUSES)}")
        object.__setattr__(self, "reason", fit(self.reason))


@dataclass(kw_only=True)
class Results:
    """A whole `results.jsonl`. `header["cells"]` and `header["rules"]` give the order of rows and columns."""

    header: dict[str, Any]
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by cell id, of the run itself
    complete: bool = False
    took: float = 0.0  # seconds from the first cell to the last, if complete

    @property
    def counts(self) -> dict[str, int]:
        """Number of verdicts by status."""
        counted = Counter(v.status for v in self.verdicts)
        return {status: counted[status] for status in STATUSES}

    @property
    def table(self) -> dict[str, dict[str, Verdict]]:
        """Verdicts by cell id and rule id, in the header's order of cells."""
        table: dict[str, dict[str, Verdict]] = {cell["id"]: {} for cell in self.header["cells"]}
        for verdict in self.verdicts:
            table.setdefault(verdict.cell, {})[verdict.rule] = verdict
        return table

    @property
    def headline(self) -> Headline:
        """What is said of every profile, and how many of its rows are claimed."""
        cells = [{rule: verdict.status for rule, verdict in rows.items()} for rows in self.table.values()]
        return Headline(standings(self.header, cells, self.complete))

    @property
    def exit_code(self) -> int:
        """0 conformant, 1 not, 2 the kit broke, 3 incomplete: no footer, or a claimed cell without a judgement.

        With the setting `strict`, known failures and SHOULD rules count like any other.
        """
        if not self.complete:
            return INCOMPLETE
        if any(v.status == "error" for v in self.verdicts):
            return KIT_ERROR
        for v in self.verdicts:
            if (v.status in RED and self.decides(v.rule)) or (self.strict and v.status == "xfail"):
                return NOT_CONFORMANT
        judged = False
        for rows in self.table.values():
            statuses = {v.status for v in rows.values()} - {"unclaimed", "disabled"}
            if statuses == {"untested"}:
                return INCOMPLETE
            judged |= bool(statuses)
        return CONFORMANT if judged else INCOMPLETE

    @property
    def advice(self) -> int:
        """How many recommendations are not followed: red verdicts on rules that decide nothing."""
        return sum(v.status in RED and not self.decides(v.rule) for v in self.verdicts)

    @property
    def strict(self) -> bool:
        """Whether known failures and SHOULD rules count like any other."""
        return bool(self.header.get("settings", {}).get("strict"))

    def decides(self, rule_id: str) -> bool:
        """Whether a failure of this rule makes the target not conformant: a MUST does, with `strict` any rule."""
        return self.strict or self.is_must(rule_id)

    def is_must(self, rule_id: str) -> bool:
        """Whether the level of this rule is MUST."""
        return any(rule["id"] == rule_id and rule["level"] == "MUST" for rule in self.header["rules"]["list"])


class Writer(AbstractContextManager["Writer"]):
    """Writes `results.jsonl` line by line and keeps what it wrote as `results`. Leaving it cleanly writes no footer."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results = Results(header={"kind": "header", "schema": SCHEMA, **header})
        # A backslash and the digits of a lone surrogate, as in the name of a file, are its escape in JSON.
        self._file: TextIO = path.open("w", encoding="utf-8", errors="backslashreplace")
        self._begun = time.monotonic()
        self._line(self.results.header)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def cell(self, cell_id: str, verdicts: list[Verdict], seconds: float) -> None:
        """All verdicts of one cell, and how long it ran."""
        for verdict in verdicts:
            self._line({"kind": "verdict", **plain(verdict)})
        self._line({"kind": "cell", "id": cell_id, "seconds": round(seconds, 3)})
        self.results.verdicts += verdicts
        self.results.seconds[cell_id] = seconds

    def footer(self) -> None:
        """The last line: the run is complete."""
        self.results.complete = True
        counts, code = self.results.counts, self.results.exit_code
        self.results.took = round(time.monotonic() - self._begun, 3)
        ended = {"counts": counts, "headline": str(self.results.headline), "exit": code, "seconds": self.results.took}
        self._line({"kind": "footer", **ended})

    def _line(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()


def plain(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON-ready values without the empty ones."""
    value = {k: v for k, v in asdict(verdict).items() if v not in ("", (), 0.0)}
    if verdict.findings:
        value["findings"] = [
            {k: v for k, v in asdict(finding).items() if v not in ("", None, (), {}) and (k, v) != ("count", 1)}
            for finding in verdict.findings
        ]
    return value


def read(path: Path) -> Results:
    """A results file, complete or not. Raises `BadInput` for anything that no run of this kit wrote.

    A last line that was cut while it was written is dropped: such a file has no footer and is incomplete.
    """
    rows = read_json_lines(path)
    if not rows or not isinstance(rows[0], dict) or rows[0].get("kind") != "header":
        raise BadInput(f"{path}: does not begin with a header; is it a results.jsonl?")
    if rows[0].get("schema") != SCHEMA:
        raise BadInput(f"{path}: schema {rows[0].get('schema')!r}; this kit reads schema {SCHEMA}")
    results = Results(header=rows[0])
    for number, row in enumerate(rows[1:], 2):
        try:
            _add(results, row)
        except (TypeError, KeyError, ValueError) as error:
            raise BadInput(f"{path}:{number}: not a line of a results file: {error}") from error
    order = {cell["id"]: number for number, cell in enumerate(results.header["cells"])}
    results.verdicts.sort(key=lambda v: order.get(v.cell, len(order)))
    return results


def _add(results: Results, row: Mapping[str, Any]) -> None:
    match row.get("kind"):
        case "verdict":
            results.verdicts.append(_verdict(row))
        case "cell":
            results.seconds[row["id"]] = row["seconds"]
        case "footer":
            results.complete, results.took = True, float(row.get("seconds", 0))
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def versions() -> dict[str, str]:
    """Versions of what decides a verdict, read without importing it."""
    installed = {name: version_of(name) or "not installed" for name in ("torch", "megatron-core", "transformers")}
    return {"python": platform.python_version(), **installed}


def version_of(distribution: str) -> str:
    """The installed version, or nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _verdict(row: Mapping[str, Any]) -> Verdict:
    findings = []
    for finding in row.get("findings", ()):
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in finding.items()}
        findings.append(Finding(**values))
    return Verdict(**{k: v for k, v in row.items() if k not in ("kind", "findings")}, findings=tuple(findings))
