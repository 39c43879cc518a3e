"""The built-in model, and how it was made; random models of real shapes for tests and benchmarks."""

from pathlib import Path

BUILTIN_MODEL = Path(__file__).with_name("corral-demo-q8_0.gguf")
"""The built-in model's file, which is part of the package."""

BUILTIN_PROJECTOR = Path(__file__).with_name("corral-demo-mmproj-q8_0.gguf")
"""The file of its eyes, likewise."""
