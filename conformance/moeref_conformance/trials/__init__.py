"""Trials of the diagnosis, by what went wrong: the values, the axes, or the shards. Each re-creates a known mistake."""
