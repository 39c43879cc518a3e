"""A model that is small enough for every test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.random_models.model import SHAPES, write_random_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with random weights: real shapes, meaningless text."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, SHAPES["tiny"], "f16")
    return path
