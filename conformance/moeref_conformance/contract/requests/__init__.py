"""What the kit asks of a target, one module a facet. Judges read the answers by the same lists."""
