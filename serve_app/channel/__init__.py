"""The way of tokens from engine replicas to ingress replicas: one connection for each pair, one frame a step."""
