"""The path from a prompt or a chat to a stream of deltas, for every protocol."""
