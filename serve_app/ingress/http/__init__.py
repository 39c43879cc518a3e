"""What every HTTP request passes: keys, limits, bodies, errors, server-sent events."""
