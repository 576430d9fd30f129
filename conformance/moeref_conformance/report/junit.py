"""JUnit XML for CI systems: a suite for each cell, a case for each rule; and a suite of profiles."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.statuses import CONFORMANT, NOT_CONFORMANT
from moeref_conformance.report.view import lines

# Not allowed in XML 1.0, even escaped; the name of a target may contain it.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(results: Results) -> str:
    """The document. Only what makes the run not conformant is a failure; an unfinished run has one case in error."""
    target, matrix = results.header["target"], results.header["matrix"]
    root = ET.Element("testsuites", name=f"{target['name']} {target['version']} on {matrix['name']}")
    for cell_id, rows in results.table.items():
        seconds = results.seconds.get(cell_id, 0.0)
        suite = ET.SubElement(root, "testsuite", name=cell_id, time=f"{seconds:.3f}", timestamp=results.header["date"])
        for verdict in rows.values():
            _case(suite, verdict, must=results.decides(verdict.rule))
        _count(suite)
    _profiles(root, results)
    if not results.complete:
        suite = ET.SubElement(root, "testsuite", name="run")
        case = ET.SubElement(suite, "testcase", classname="run", name="complete")
        ET.SubElement(case, "error", message="the run did not finish")
        _count(suite)
    ET.indent(root)
    text = _ILLEGAL.sub("�", ET.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _profiles(root: ET.Element, results: Results) -> None:
    """A suite with a case for each profile: a failure if the target does not conform to it."""
    suite = ET.SubElement(root, "testsuite", name="profiles")
    for standing in results.headline.standings:
        case = ET.SubElement(suite, "testcase", classname="profiles", name=standing.profile)
        if standing.code != CONFORMANT:
            red = standing.code == NOT_CONFORMANT
            ET.SubElement(case, "failure" if red else "skipped", message=str(standing))
    _count(suite)


def _case(suite: ET.Element, verdict: Verdict, must: bool) -> None:
    case = ET.SubElement(suite, "testcase", classname=verdict.cell, name=verdict.rule, time=f"{verdict.seconds:.3f}")
    if verdict.status == "pass":
        return
    text = lines(verdict)
    message = verdict.reason or (verdict.findings[0].message if verdict.findings else "")
    message = (message.splitlines() or [verdict.status])[0]
    if verdict.status in ("fail", "xpass") and must:
        ET.SubElement(case, "failure", message=message, type=verdict.status).text = "\n".join(text)
    elif verdict.status == "error":
        ET.SubElement(case, "error", message=message).text = "\n".join(text)
    else:
        ET.SubElement(case, "skipped", message=f"{verdict.status}: {message}")


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for kind, key in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(kind) is not None for case in cases)))
