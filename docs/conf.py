"""Sphinx configuration. `nox -s docs` builds with warnings as errors."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import _generate  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "moeref"
author = "the moeref authors"
version = release = version_of("moeref")
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
smartquotes = False
html_theme = "furo"
html_title = f"moeref {release}"
html_copy_source = False
html_show_copyright = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# Docstrings put code in single backticks.
default_role = "literal"


def setup(app: Sphinx) -> None:
    """Fill in what is generated from the sources, and let docstrings be read as reStructuredText."""

    def expand(app: Sphinx, docname: str, source: list[str]) -> None:
        source[0] = _generate.expand(source[0])

    def literal(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = _generate.as_rst(lines)

    app.connect("source-read", expand)
    app.connect("autodoc-process-docstring", literal)
