"""A badge: in the endpoint format of shields.io, and as a picture for pages that no service can read."""

from __future__ import annotations

import json
from html import escape

from moeref_conformance.contract.results import Results
from moeref_conformance.contract.standing import Headline
from moeref_conformance.contract.statuses import CONFORMANT, NOT_CONFORMANT

#: With more profiles, only their number is said.
NAMED = 2


#: shields.io's names of colours.
COLORS = {"brightgreen": "#2e8b1f", "green": "#5f8f12", "red": "#c0392b", "lightgrey": "#6f6f6f"}
#: Pixels of a character in Verdana 11, about; the text is stretched to just that.
CHARACTER = 6.4


def render(results: Results) -> str:
    """JSON with the verdict and the claimed rows of the headline; red if not conformant, grey without a verdict."""
    return json.dumps({"schemaVersion": 1, **facts(results)}) + "\n"


def picture(results: Results) -> str:
    """The same as SVG; its label names the version of Megatron-Core too."""
    said = facts(results)
    core = results.header["versions"].get("megatron-core")
    label = said["label"] + (f", Megatron-Core {core}" if core else "")
    boxes, left = "", 0.0
    for text, color in ((label, "#444"), (said["message"], COLORS[said["color"]])):
        width = CHARACTER * len(text)
        boxes += f'<rect x="{left:g}" width="{width + 12:g}" height="20" fill="{color}"/>'
        boxes += f'<text x="{left + 6:g}" y="14" textLength="{width:g}">{escape(text)}</text>'
        left += width + 12
    title = escape(f"{label}: {said['message']}")
    font = 'font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11" fill="#fff"'
    size = f'width="{left:g}" height="20" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}><title>{title}</title>{boxes}</svg>\n'


def facts(results: Results) -> dict[str, str]:
    """Label, message and colour."""
    head, code = results.headline, results.exit_code
    if code == CONFORMANT:
        color = "brightgreen" if head.claimed == head.rows else "green"
    else:
        color = "red" if code == NOT_CONFORMANT else "lightgrey"
    rows = f"{head.claimed} of {head.rows} rows claimed"
    message = f"{verdict(head)}; {rows}" + ("" if code in (CONFORMANT, NOT_CONFORMANT) else " (no verdict)")
    label = f"conformance {results.header['matrix']['name']}"
    return {"label": label, "message": message, "color": color}


def verdict(head: Headline) -> str:
    """The verdicts of the headline, or to how many of many profiles the target conforms."""
    claimed = [standing for standing in head.standings if standing.claimed]
    if len(claimed) <= NAMED:
        return head.verdicts
    conforming = sum(standing.code == CONFORMANT for standing in claimed)
    return f"conforms to {conforming} of {len(claimed)} profiles"
