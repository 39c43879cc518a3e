"""The parts of a sampler: candidates, llama.cpp's chain, cuts before it, and adjustments of logits."""
