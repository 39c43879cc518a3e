"""Benchmarks of Corral. They need a model file; none of them is part of the server."""
