"""One download for a cluster: its nodes copy a file from each other while it is downloaded."""

NAMESPACE = "corral"
"""Of Ray's actors."""
