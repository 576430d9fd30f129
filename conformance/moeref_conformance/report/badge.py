"""A badge in the endpoint format of shields.io."""

from __future__ import annotations

import json

from moeref_conformance.contract.results import CONFORMANT, NOT_CONFORMANT, Results


def render(results: Results) -> str:
    """JSON with both numbers of the headline; red if not conformant, grey without a verdict."""
    head, code = results.headline, results.exit_code
    message = f"{head.passing}/{head.claimed} pass, claims {head.claimed}/{head.cells}"
    if code == CONFORMANT:
        color = "brightgreen" if head.claimed == head.cells else "green"
    else:
        color = "red" if code == NOT_CONFORMANT else "lightgrey"
        message = message if code == NOT_CONFORMANT else f"{message} (no verdict)"
    label = f"conformance {results.header['matrix']['name']}"
    return json.dumps({"schemaVersion": 1, "label": label, "message": message, "color": color}) + "\n"
