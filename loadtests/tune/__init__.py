"""Benchmarks over the builds of llama.cpp, and over single passes of backends."""
