"""The engine's core: the loop, its sequences, their queue and slots, and the batches of a step."""
