"""Doubles of what needs a model, and the samplers of llama.cpp to compare with."""
