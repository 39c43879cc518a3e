"""The protocols: bodies in, events out. None imports another."""
