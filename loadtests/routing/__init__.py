"""Routing, simulated."""
