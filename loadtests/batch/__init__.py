"""Measures batches: what they get, and what they take from others."""
