"""What the facet `sync` is asked for."""

from __future__ import annotations

#: Versions by the phase that they begin with; one is left out, as where a trainer took steps without an update.
VERSIONS = {"first": 0, "second": 1, "back": 3}
#: What the name of an update that fails behind a whole one ends with.
SECOND = " as a second update"
