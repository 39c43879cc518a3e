"""Embeddings and rankings."""
