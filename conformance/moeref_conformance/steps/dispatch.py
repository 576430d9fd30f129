"""Steps of the facet `dispatch` that are arithmetic: what is padded to what, and which dispatchers are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeref_conformance.contract.api import Dispatch, Layout, to_plain
from moeref_conformance.contract.requests.dispatch import CHOICES, requests


def padded(dispatch: Dispatch, layout: Layout) -> list[dict[str, Any]]:
    """The answer to every request of `requests`, in order: `samples` and `totals`, or `refused`."""
    return [_answer(lambda request=request: dispatch.padded(request)) for request in requests(layout)]  # type: ignore[misc]


def chosen(dispatch: Dispatch) -> dict[str, dict[str, Any]]:
    """The answer to every request of CHOICES: `given`, or `refused`."""
    return {
        name: _answer(lambda request=request: {"given": dict(dispatch.settings(request))})  # type: ignore[misc]
        for name, request in CHOICES.items()
    }


def _answer(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = to_plain(call())
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return found
