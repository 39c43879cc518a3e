"""What a sampler is made of: candidates, llama.cpp's chain, cuts before it, and adjustments of logits."""
