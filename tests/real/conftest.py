"""What the tests with real models share. `make test-real` runs them, and prepares what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.engine import Engine
from tests.real.models import MODELS

OPTIONS = EngineOptions(
    n_slots=16,
    n_ctx_slot=1024,
    threads=2,
    n_batch=512,
    max_waiting=64,
    flash_attn=True,
    profile_limit_s=0,
)
"""Nothing is measured, so that every run computes alike; llama-server has flash attention, too."""


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Path:
    """The file of each real model in turn."""
    path = MODELS[request.param]()
    assert path.is_file(), f"{path} is not here: make test-real prepares it"
    return path


@pytest.fixture
def load(model: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines with other options, and closes them."""
    engines: list[Engine] = []

    def make(**changed: Any) -> Engine:
        engines.append(Engine.load(model, replace(OPTIONS, **changed)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
