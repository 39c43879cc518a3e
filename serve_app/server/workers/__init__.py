"""Worker processes that read what clients send, so that a client can at most cost its own request."""
