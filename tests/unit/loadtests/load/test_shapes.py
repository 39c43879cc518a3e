"""How a load changes over a run."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from loadtests.load.users.shapes import SHAPES, arrivals, users_at


@pytest.mark.parametrize("shape", SHAPES)
def test_a_share_is_between_nothing_and_all_and_reaches_all(shape: str) -> None:
    shares = [SHAPES[shape](i / 1000) for i in range(1001)]
    assert min(shares) > 0
    assert max(shares) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shape", "users"),
    [
        ("constant", [10] * 10),
        ("steps", [2, 2, 4, 4, 6, 6, 8, 8, 10, 10]),
        ("spikes", [2, 10, 2, 2, 2, 10, 2, 2, 10, 2]),
        ("burst", [1, 10, 10, 10, 10, 1, 1, 1, 1, 1]),
        ("sine", [7, 9, 5, 1, 3, 7, 9, 5, 1, 3]),
    ],
)
def test_users_over_a_run(shape: str, users: list[int]) -> None:
    most = 9 if shape == "sine" else 10
    assert [users_at(shape, 3.0 + i * 6.0, most, 60.0) for i in range(10)] == users


def test_three_spikes_of_a_tenth_each() -> None:
    at = [users_at("spikes", float(s), 10, 600.0) for s in range(600)]
    rises = sum(a < b for a, b in pairwise(at))
    assert rises == 3
    assert at.count(10) == pytest.approx(180, abs=3)


def test_there_is_always_somebody() -> None:
    assert users_at("sine", 52.5, 1, 60.0) == 1


def test_arrivals_are_poisson() -> None:
    times = list(arrivals(random.Random(1), "constant", 5.0, 2000.0))
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.03)
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # exponential: as its mean
    assert times == sorted(times)
    assert times[-1] < 2000


def test_arrivals_follow_the_shape() -> None:
    times = list(arrivals(random.Random(1), "steps", 10.0, 1000.0))
    counts = [sum(200 * i <= at < 200 * (i + 1) for at in times) for i in range(5)]
    for i, count in enumerate(counts):
        assert count == pytest.approx(400 * (i + 1), rel=0.15)


def test_the_seed_decides_the_arrivals() -> None:
    def drawn(seed: int) -> list[float]:
        return list(arrivals(random.Random(seed), "sine", 3.0, 100.0))

    assert drawn(4) == drawn(4)
    assert drawn(4) != drawn(5)
