"""A badge in the endpoint format of shields.io."""

from __future__ import annotations

import json

from moeref_conformance.contract.results import Results
from moeref_conformance.contract.standing import Headline
from moeref_conformance.contract.statuses import CONFORMANT, NOT_CONFORMANT

#: With more profiles, only their number is said.
NAMED = 2


def render(results: Results) -> str:
    """JSON with the verdict and the claimed rows of the headline; red if not conformant, grey without a verdict."""
    head, code = results.headline, results.exit_code
    if code == CONFORMANT:
        color = "brightgreen" if head.claimed == head.rows else "green"
    else:
        color = "red" if code == NOT_CONFORMANT else "lightgrey"
    rows = f"{head.claimed} of {head.rows} rows claimed"
    message = f"{verdict(head)}; {rows}" + ("" if code in (CONFORMANT, NOT_CONFORMANT) else " (no verdict)")
    label = f"conformance {results.header['matrix']['name']}"
    return json.dumps({"schemaVersion": 1, "label": label, "message": message, "color": color}) + "\n"


def verdict(head: Headline) -> str:
    """The verdicts of the headline, or to how many of many profiles the target conforms."""
    claimed = [standing for standing in head.standings if standing.claimed]
    if len(claimed) <= NAMED:
        return head.verdicts
    conforming = sum(standing.code == CONFORMANT for standing in claimed)
    return f"conforms to {conforming} of {len(claimed)} profiles"
