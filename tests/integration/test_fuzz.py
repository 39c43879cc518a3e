"""A short run of `make fuzz`, the same each time."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.cases import run, served


def test_odd_requests(tiny_gguf: Path) -> None:
    with served(tiny_gguf) as app:
        statuses = run(app, n_cases=150, seed_=1, limit_s=100)
    assert statuses.total() >= 150
    assert min(statuses[200], statuses[400], statuses[403] + statuses[404]) > 5
