"""Results arranged for reading, without markup: blocks of cells, tallies, failures by rule, reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeref_conformance.contract.cells import AXES
from moeref_conformance.contract.findings import Finding
from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.rules import GROUPS, Rule
from moeref_conformance.contract.statuses import EXIT_WORDS, RED, STATUSES
from moeref_conformance.report.causes import Failure, failures, folded

#: Findings shown in full for one verdict. The others are counted here and listed in results.jsonl.
SHOWN = 5

#: The column of recommendations in tables of rule groups.
ADVICE = "SHOULD"

#: Status -> (symbol, meaning).
LEGEND = {
    "pass": (
        "✓",
        "passes; “exact” is bitwise, a number the largest deviation, within the rule's tolerance; ✓: see tooltip",
    ),
    "fail": ("✗", "fails; the number counts the findings"),
    "advice": ("△", "fails, and is a recommendation (SHOULD), which decides nothing; the number counts the findings"),
    "xfail": ("≈", "fails as listed among the known failures; neither green nor red"),
    "xpass": ("‼", "passes although listed as a known failure; red until the list is right"),
    "error": ("!", "the kit itself broke; says nothing about the target"),
    "untested": ("?", "claimed, but could not be judged; the reasons are below"),
    "unclaimed": ("–", "the target does not claim it"),
    "disabled": ("○", "left out by the selection"),
}


@dataclass(frozen=True)
class Mark:
    """One entry of the table. `href` is the id of the failure that it links to."""

    status: str = ""  # empty: the rule cannot be judged on this backend, or with so many ranks
    text: str = "·"
    title: str = ""
    href: str = ""


@dataclass
class Row:
    """One cell of the matrix."""

    id: str
    name: str
    layout: str
    ranks: int
    seconds: float
    marks: dict[str, Mark]  # by rule id


@dataclass
class Block:
    """The cells of one variant on one backend."""

    variant: str
    backend: str
    rules: list[Rule]
    rows: list[Row] = field(default_factory=list)
    tallies: dict[str, Mark] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        """An id for a page."""
        return f"block-{self.variant}-{self.backend}".replace("+", "-")

    def groups(self) -> list[tuple[str, str, int]]:
        """(group, its subject, number of its rules) in the order of the columns; recommendations are the last group."""
        counts = Counter(group_of(rule) for rule in self.rules)
        return [(group, subject(group), number) for group, number in counts.items()]


def group_of(rule: Rule) -> str:
    """The group of columns that a rule is in."""
    return rule.group if rule.level == "MUST" else ADVICE


def subject(group: str) -> str:
    """What the rules of a group are about."""
    return "recommendations" if group == ADVICE else GROUPS.get(group, group)


@dataclass
class View:
    """All that a report shows."""

    results: Results
    state: str
    blocks: list[Block]
    groups: list[tuple[str, str]]
    red: list[Failure]
    advice: list[Failure]
    known_failures: list[Failure]
    reasons: list[tuple[str, str, list[str], list[str]]]  # status, reason, rules, cells
    rules: list[Rule]

    @property
    def counts(self) -> dict[str, int]:
        """As in the results, in the order of the legend, with recommendations that are not followed apart."""
        counts = Counter(_status(self.results, verdict) for verdict in self.results.verdicts)
        return {status: counts[status] for status in LEGEND}


def view(results: Results) -> View:
    """Arrange `results`, complete or not."""
    rules = sorted((_rule(entry) for entry in results.header["rules"]["list"]), key=lambda r: group_of(r) == ADVICE)
    blocks = _blocks(results, rules)
    used = {group_of(rule) for block in blocks for rule in block.rules}
    by_rule = {rule.id: rule for rule in rules}
    return View(
        results=results,
        state=EXIT_WORDS[results.exit_code],
        blocks=blocks,
        groups=[(group, subject(group)) for group in dict.fromkeys(map(group_of, rules)) if group in used],
        red=folded(_failures(results, by_rule, ("fail", "xpass", "error"))),
        advice=_failures(results, by_rule, ("advice",)),
        known_failures=_failures(results, by_rule, ("xfail",)),
        reasons=_reasons(results),
        rules=rules,
    )


def anchor(verdict: Verdict) -> str:
    """The id of a verdict in a page."""
    return f"{verdict.rule}-{verdict.cell}".replace("/", "-").replace("+", "-")


def where(finding: Finding) -> list[tuple[str, str]]:
    """The place of a finding as (label, value), without what is unknown."""
    place = "" if finding.rank is None else f"{finding.rank}" + (f" ({finding.coords})" if finding.coords else "")
    index = "" if finding.index is None else "[" + ", ".join(map(str, finding.index)) + "]"
    rows = [
        ("stage", finding.stage),
        ("rank", place),
        ("alike", _alike(finding)),
        ("HF name", finding.hf_name),
        ("global name", finding.global_name),
        ("local name", finding.local_name),
        ("layer", "" if finding.layer is None else str(finding.layer)),
        ("expert", "" if finding.expert is None else str(finding.expert)),
        ("first index", index),
        ("expected", finding.expected),
        ("got", finding.got),
    ]
    return [(label, value) for label, value in rows if value]


def _alike(finding: Finding) -> str:
    """What the finding stands for besides itself."""
    if finding.count == 1:
        return ""
    kinds = [f"{number} {kind} tensor{'s' if number > 1 else ''}" for kind, number in finding.kinds.items()]
    ranks = f"on rank{'s' if len(finding.ranks) > 1 else ''} {', '.join(map(str, finding.ranks))}"
    return ", ".join([f"{finding.count} findings", *kinds, *([ranks] if finding.ranks else [])])


def lines(verdict: Verdict, shown: int = SHOWN) -> list[str]:
    """A verdict that is not a pass as plain text lines, the first of them its summary."""
    head = f"{verdict.status.upper()} {verdict.rule} in {verdict.cell}"
    text = [f"{head}: {verdict.reason}" if verdict.reason else head]
    for finding in verdict.findings[:shown]:
        text.append(f"- {finding.message}")
        text += [f"    {label}: {value}" for label, value in where(finding)]
        if finding.diagnosis:
            text.append(f"    diagnosis: {finding.diagnosis}")
    if len(verdict.findings) > shown:
        text.append(f"- and {len(verdict.findings) - shown} more findings")
    if verdict.repeat:
        text.append(f"repeat: {verdict.repeat}")
    return text


def _rule(entry: dict[str, Any]) -> Rule:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    if modes := values.pop("replay", ()):  # results from before rules named other axes
        values["cells"] = (("replay", modes),)
    return Rule(**values)


def _shown(rule: Rule, cell: Mapping[str, Any]) -> bool:
    """Whether the rule is judged in cells of this one's backend and axes, of which old results lack some."""
    asked = ((cell.get(AXES[name].field, AXES[name].default), values) for name, values in rule.cells)
    return rule.applies(cell["backend"]) and all(value in values for value, values in asked)


def _blocks(results: Results, rules: list[Rule]) -> list[Block]:
    blocks: dict[tuple[str, str], Block] = {}
    table = results.table
    for cell in results.header["cells"]:
        # Layouts that need another number of layers belong to the same block as the others.
        key = (cell["variant"].replace(f"+{AXES['layers'].text(cell['layers'])}", ""), cell["backend"])
        if key not in blocks:
            blocks[key] = Block(*key, rules=[rule for rule in rules if _shown(rule, cell)])
        verdicts, ranks = table[cell["id"]], cell["layout"]["world"]
        row = Row(
            id=cell["id"],
            name=cell["layout_name"],
            layout=f"{cell['text']} ({cell['layers']} layers)",
            ranks=ranks,
            seconds=results.seconds.get(cell["id"], 0.0),
            marks={
                rule.id: _mark(results, verdicts.get(rule.id)) if rule.ranks in (0, ranks) else Mark()
                for rule in blocks[key].rules
            },
        )
        blocks[key].rows.append(row)
    for block in blocks.values():
        for group, _, _ in block.groups():
            block.tallies[group] = _tally(block, group)
    return sorted(blocks.values(), key=lambda block: block.backend == "static")


def _status(results: Results, verdict: Verdict) -> str:
    """The status as a report shows it."""
    return "advice" if verdict.status in RED and not results.decides(verdict.rule) else verdict.status


def _mark(results: Results, verdict: Verdict | None) -> Mark:
    if verdict is None:
        return Mark("missing", "", "not reached")
    status = _status(results, verdict)
    symbol, _ = LEGEND[status]
    title = f"{verdict.rule}: {verdict.status}"
    if verdict.status == "pass":
        number = _short(verdict.met)
        plain = "exact" if verdict.met == "exact" else symbol
        return Mark("near" if number else "pass", number or plain, f"{title}, {verdict.met}" if verdict.met else title)
    if verdict.reason:
        title += f": {verdict.reason.splitlines()[0]}"
    elif verdict.findings:
        title += f": {verdict.findings[0].message}"
    text = f"{symbol} {len(verdict.findings)}" if verdict.status == "fail" else symbol
    href = anchor(verdict) if status in ("fail", "advice", "xfail", "xpass", "error") else ""
    return Mark(status, text, title, href)


def _short(met: str) -> str:
    """`7.2e-07 ≤ 2e-06` as `7e-7`; nothing for a text that does not begin with a number."""
    number = met.split()[0] if met else ""
    try:
        mantissa, _, exponent = f"{float(number):.0e}".partition("e")
    except ValueError:
        return ""
    return f"{mantissa}e{int(exponent)}"


def _tally(block: Block, group: str) -> Mark:
    """The worst status of a rule group over all cells of a block."""
    ids = [rule.id for rule in block.rules if group_of(rule) == group]
    rows = [marks for row in block.rows if (marks := [row.marks[id_] for id_ in ids if row.marks[id_].status])]
    if not rows:
        return Mark()
    worst = [_worst(marks) for marks in rows]
    bad = [status for status in ("fail", "error", "xpass", "xfail", "missing", "untested", "advice") if status in worst]
    if bad:
        said = {"missing": "not reached", "advice": "not followed"}
        text = ", ".join(f"{worst.count(s)} {said.get(s, s)}" for s in bad[:2])
        return Mark(bad[0], text, f"of {len(rows)} cells: {text}")
    claimed = sum(status in ("pass", "near") for status in worst)
    if not claimed:
        return Mark(worst[0], worst[0], f"all {len(rows)} cells: {worst[0]}")
    texts = [mark.text for marks in rows for mark in marks if mark.status == "near"]
    exact = any(mark.text == "exact" for marks in rows for mark in marks)
    text = f"≤ {max(texts, key=float)}" if texts else "exact" if exact else "pass"
    return Mark("near" if texts else "pass", text, f"{claimed} of {len(rows)} cells pass")


def _worst(marks: Iterable[Mark]) -> str:
    order = (
        "fail",
        "error",
        "xpass",
        "xfail",
        "missing",
        "untested",
        "advice",
        "near",
        "pass",
        "unclaimed",
        "disabled",
    )
    return min((mark.status for mark in marks), key=order.index)


def _failures(results: Results, rules: dict[str, Rule], statuses: tuple[str, ...]) -> list[Failure]:
    return failures((v for v in results.verdicts if _status(results, v) in statuses), rules)


def _reasons(results: Results) -> list[tuple[str, str, list[str], list[str]]]:
    by_reason: dict[tuple[str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for verdict in results.verdicts:
        if verdict.status in ("unclaimed", "untested", "disabled"):
            rules, cells = by_reason.setdefault((verdict.status, verdict.reason), ({}, {}))
            rules[verdict.rule] = cells[verdict.cell] = None
    rows = [(status, reason, list(rules), list(cells)) for (status, reason), (rules, cells) in by_reason.items()]
    return sorted(rows, key=lambda row: (STATUSES.index(row[0]), -len(row[3])))
