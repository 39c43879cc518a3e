"""Sizes that cannot work are refused."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine import ConfigError, EngineOptions

GOOD: dict[str, Any] = {"n_slots": 4, "n_ctx_slot": 128, "threads": 2}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"n_slots": 1, "n_batch": 1}, id="smallest batch"),
        pytest.param({"n_ctx_slot": 2}, id="smallest context"),
        pytest.param({"max_waiting": 0}, id="no queue"),
    ],
)
def test_accepts(changed: dict[str, Any]) -> None:
    EngineOptions(**GOOD | changed)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        pytest.param({"n_slots": 0}, "engine.n_slots", id="no slot"),
        pytest.param({"threads": 0}, "engine.threads", id="no thread"),
        pytest.param({"n_ctx_slot": 1}, "engine.n_ctx_slot", id="no room for an answer"),
        pytest.param({"n_batch": 0}, "engine.n_batch", id="no prompt token"),
        pytest.param({"max_waiting": -1}, "engine.max_waiting", id="negative queue"),
    ],
)
def test_refuses_and_names_the_field(changed: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        EngineOptions(**GOOD | changed)
