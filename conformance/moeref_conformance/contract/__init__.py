"""What the author of a target reads: the interface, the rules, and the files that are exchanged."""
