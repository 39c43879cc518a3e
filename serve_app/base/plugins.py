"""The plugins: parts that few need. Nothing else names them, and each is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PLUGINS = {
    "batch": "serve_app.plugins.batch",
    "stages": "serve_app.plugins.stages.replica",
    "whisper": "serve_app.plugins.whisper",
}
"""The module of each plugin, by the plugin's name."""


def load_plugin(name: str) -> Any:
    """Import the plugin's module. Raises KeyError for an unknown name, and ImportError."""
    return import_module(PLUGINS[name])
