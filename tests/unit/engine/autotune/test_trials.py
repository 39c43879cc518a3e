"""Which measurements are doubted."""

from __future__ import annotations

import pytest

from serve_app.engine.autotune.trials import Trials, doubtful


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, []),
        ({1: 0.02, 2: 0.03, 4: 0.05}, []),
        ({6: 0.116, 8: 0.044}, [6]),
        ({1: 0.02, 2: 0.06, 4: 0.05}, [2]),
        ({1: 0.02, 4: 0.2, 8: 0.25}, [4, 8]),
        ({8: 0.045, 9: 0.044}, []),
        ({63: 0.5, 64: 0.25}, [63]),
    ],
)
def test_what_breaks_an_order_is_doubted(found: dict[int, float], expected: list[int]) -> None:
    assert doubtful(found) == expected


def test_what_stays_so_is_believed_after_a_few_more_rounds() -> None:
    """Two rows are slower than four, as with some kernels; six were not."""
    now, tried = [0.0], list[int]()
    true_s = {1: 0.02, 2: 0.06, 4: 0.05, 6: 0.06, 8: 0.07}

    def trial(n: int) -> float:
        tried.append(n)
        hiccup = 0.5 if n == 6 and tried.count(6) <= 2 else 0.0
        return trials.timed(lambda: now.__setitem__(0, now[0] + true_s[n] + hiccup))

    trials = Trials(lambda: now[0])
    trials.left_s = 60.0
    found: dict[int, float] = {}
    for _ in trials.measure(found, list(true_s), trial):
        pass
    assert found == pytest.approx(true_s)
    assert tried[:6] == [1, 2, 4, 6, 8, 1], "each size comes again only after the others"
    assert {n: tried.count(n) for n in true_s} == {1: 2, 2: 4, 4: 2, 6: 3, 8: 2}


def test_noise_is_what_the_same_batches_differed_by() -> None:
    now = [0.0]
    lasting = iter([0.1, 0.2, 0.11, 0.2, 0.1, 0.3])
    trials = Trials(lambda: now[0])
    trials.left_s = 60.0
    assert trials.noise == 0.0

    def trial(n: int) -> float:
        return trials.timed(lambda: now.__setitem__(0, now[0] + next(lasting)))

    found: dict[int, float] = {}
    for _ in trials.measure(found, [1, 2], trial):
        pass
    for _ in trials.once_more(found, [1, 2, 4], trial):
        pass
    assert found == pytest.approx({1: 0.1, 2: 0.2})
    assert trials.noise == pytest.approx(0.05)  # of 10%, 0%, 0%, 50%
