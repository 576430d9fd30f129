"""What the probe does with one facet of a session: a module a facet. They compare nothing; the judges do."""
