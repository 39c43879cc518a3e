"""One download for a cluster: its nodes copy a file from each other while it is downloaded."""

NAMESPACE = "corral"
"""The namespace of the actors in Ray."""
