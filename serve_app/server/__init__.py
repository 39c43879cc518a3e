"""The ingress: the HTTP server, its APIs, and its way to the engines."""
