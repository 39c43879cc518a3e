"""Hostile clients, one attack after the other, while honest users stream."""
