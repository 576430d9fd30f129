"""What the facet `sync` is asked for."""

from __future__ import annotations

#: Versions by the phase that they begin with. That of the first update is not 1, as where a run goes on, some are left
#: out, as where a trainer took steps without an update, and the last is not the last as text. In other steps the first
#: one is 1.
VERSIONS = {"first": 0, "second": 2, "back": 9, "again": 10}
#: The number of an update after all of them, as of a trainer that counts from the start again: other weights had it.
LOWER = VERSIONS["back"]
#: Phases before any update.
FIRST = ("first", "many", "cached", "turn")
#: Input with the weights that are served in a phase, after an update, and in a turn after a sample of the first ones.
#: The last ones are new: an engine with two buffers may have those of two updates before.
WEIGHTS = {**dict.fromkeys((*FIRST, "back"), "checkpoint"), "second": "second", "again": "third"}
#: Prompts of the phase `many`: as text, the number of the last one comes before that of the third.
MANY = 12
#: Tokens that are sampled where an update comes on the way.
LONG = 12
#: Temperatures besides 1 that samples are asked at, by the names of their records. The kit's models tell all tokens
#: nearly alike: what is drawn at one that is little below 1 could not be told from what is drawn at 1.
TEMPERATURES = {"low": 0.125, "zero": 0.0}
#: What the name of an update that fails after a whole one ends with.
SECOND = " as a second update"
