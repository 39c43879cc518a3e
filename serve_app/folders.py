"""Folders of this user's on this node."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's programs keep what they could make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "corral"
