"""What a rank does with a session: one module a facet, each with its `FACET`. Steps compare nothing; judges do."""
