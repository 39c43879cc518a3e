"""Corral: GGUF language models served from CPU machines."""

from importlib.metadata import version

__version__ = version("corral")
