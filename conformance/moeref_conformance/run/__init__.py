"""From cells and rules to verdicts."""
