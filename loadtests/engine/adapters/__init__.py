"""The cost of different adapters in the requests of one engine."""
