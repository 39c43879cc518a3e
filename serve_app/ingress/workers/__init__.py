"""Processes that handle what clients send, so that a client can at most cost its own request."""
