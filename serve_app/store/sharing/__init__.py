"""One download for a cluster: its nodes fetch different pieces of a file, and have them from each other."""

NAMESPACE = "corral"
"""Of Ray's actors."""
