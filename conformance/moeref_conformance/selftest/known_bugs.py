"""Bugs that the field has reported, for tests and documentation: the wheel has neither this module nor the list."""

import tomllib
from importlib.resources import files

from moeref_conformance.selftest import faults

_TEXT = files(faults).joinpath("bugs.toml").read_text(encoding="utf-8")
#: By id: {"report": …, "symptom": …, "waits": …}. A fault's `bug` text names ids of it.
KNOWN_BUGS: dict[str, dict[str, str]] = tomllib.loads(_TEXT)
#: Bugs whose effect the kit cannot show yet, and why.
NOT_EXPRESSIBLE = {bug: entry["waits"] for bug, entry in KNOWN_BUGS.items() if "waits" in entry}
