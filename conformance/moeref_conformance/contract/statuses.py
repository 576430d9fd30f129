"""Statuses of a verdict, and exit codes with their words."""

from __future__ import annotations

STATUSES = ("pass", "fail", "xfail", "xpass", "unclaimed", "disabled", "untested", "error")
#: Statuses that make a target not conformant when the rule is a MUST.
RED = ("fail", "xpass")
CONFORMANT, NOT_CONFORMANT, KIT_ERROR, INCOMPLETE = 0, 1, 2, 3
EXIT_WORDS = ("conformant", "not conformant", "error of the kit", "incomplete")
