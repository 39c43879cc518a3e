"""For whom idle slots stay free, and for how long."""

from __future__ import annotations

import pytest

from serve_app.engine.core.scheduler.fair_queue import EXPECTED_S, Anticipation
from tests.unit.engine.core.scheduler.test_preemption import sequence


@pytest.mark.parametrize(
    ("n_slots", "running", "left", "client", "n_kept"),
    [
        (4, "mmm", "", "m", 0),
        (4, "mmm", "a", "m", 1),
        (4, "mm", "a", "m", 1),
        (4, "m", "a", "m", 0),  # it may have two
        (4, "mmm", "a", "b", 0),  # it has nothing
        (4, "mm", "ab", "m", 2),
        (4, "m", "abcd", "m", 2),  # half of them at most
        (1, "m", "a", "m", 0),
    ],
)
def test_who_has_its_share_leaves_slots_to_those_who_have_just_left(
    n_slots: int, running: str, left: str, client: str, n_kept: int
) -> None:
    anticipation = Anticipation(n_slots)
    for one in left:
        anticipation.left(one, 5.0)
    assert anticipation.n_kept(client, [sequence(one) for one in running], 5.1) == n_kept


def test_it_ends_when_they_are_back_or_late() -> None:
    anticipation, running = Anticipation(8), [sequence("m")] * 7
    anticipation.left("a", 0.0)
    anticipation.left("b", 0.1)
    assert anticipation.n_kept("m", running, 0.2) == 2
    anticipation.came("b")
    assert anticipation.n_kept("m", running, 0.2) == 1
    assert anticipation.n_kept("m", running, EXPECTED_S) == 0
