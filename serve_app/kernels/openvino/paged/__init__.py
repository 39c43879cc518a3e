"""Passes over rows of several sequences with a compiled graph, whose KV cache consists of blocks."""
