"""The kit's own proof: targets that are wrong on purpose."""
