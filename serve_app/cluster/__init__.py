"""Starts Ray and Serve on one machine, and makes Serve deployments of ingresses and engines."""
