"""Counters by API key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.base import metrics
from serve_app.server.usage.key_metrics import MOST_KEYS, KeyMetrics
from serve_app.server.usage.ledger import COUNTS, Ledger


class Counted:
    """A counter that keeps what it was told."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()

    def inc(self, value: float = 1.0, tags: Any = None) -> None:
        self.values[tuple(tags.values())] += value  # type: ignore[assignment]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counted]:
    made: dict[str, Counted] = {}

    def counter(name: str, what: str, labels: Sequence[str]) -> Counted:
        assert tuple(labels) == ("model", "key")
        return made.setdefault(name, Counted())

    monkeypatch.setattr(metrics, "counter", counter)
    return made


def test_keys_beyond_the_first_share_a_series(counters: dict[str, Counted]) -> None:
    one = KeyMetrics()
    counts = dict.fromkeys(COUNTS, 1.0)
    for i in range(MOST_KEYS + 20):
        one.add(f"k{i}", "m", counts)
    one.add("k0", "m", counts)
    found = counters["key_requests"].values
    assert len(found) == MOST_KEYS + 1
    assert (found["m", "k0"], found["m", "other"]) == (2, 20)


async def test_the_ledger_counts_what_is_written_and_nothing_without_keys(
    counters: dict[str, Counted],
) -> None:
    ledger = Ledger()
    ledger.counter("", "/v1/x")("m", {"requests": 1, "prompt_tokens": 5})
    await ledger.call(lambda _: None)
    assert not counters
    count = ledger.counter("ana", "/v1/x")
    count("m", {"requests": 1, "prompt_tokens": 5})
    count("m", {"completion_tokens": 3, "compute_s": 0.5})
    await ledger.close()
    found = {name: counter.values["m", "ana"] for name, counter in counters.items()}
    assert found == {
        "key_requests": 1,
        "key_prompt_tokens": 5,
        "key_generated_tokens": 3,
        "key_compute_seconds": 0.5,
    }
