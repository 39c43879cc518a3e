"""Corral: GGUF language models served from CPU machines."""
