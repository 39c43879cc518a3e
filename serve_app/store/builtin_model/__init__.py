"""The built-in model's files. `tools/builtin_model` has what made them."""

from pathlib import Path

BUILTIN_MODEL = Path(__file__).with_name("corral-demo-q8_0.gguf")
"""The built-in model's file, which is part of the package."""

BUILTIN_PROJECTOR = Path(__file__).with_name("corral-demo-mmproj-q8_0.gguf")
"""The file of the built-in model's projector, which is part of the package."""
