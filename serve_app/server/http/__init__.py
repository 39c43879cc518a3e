"""The stages of every HTTP request: keys, limits, bodies, errors, server-sent events."""
