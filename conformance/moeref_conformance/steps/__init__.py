"""What the probe does with one facet of a session: a module a facet. They compare nothing; the judges do."""

from __future__ import annotations

from typing import Any


def facet_of(session: Any, name: str) -> Any:
    """A claimed facet of a session. Raises TypeError if the session has None for it."""
    facet = getattr(session, name)
    if facet is None:
        raise TypeError(f"the target claims the facet {name!r} but its session has None for it")
    return facet
