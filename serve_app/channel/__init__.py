"""The way of tokens from engine to ingress replicas: a connection for each pair, a frame for each step."""
