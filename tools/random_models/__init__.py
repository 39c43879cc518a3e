"""Models, adapters and projectors with random weights and real shapes, for tests and benchmarks."""
