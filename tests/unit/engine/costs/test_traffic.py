"""Which traffic wants which kind of cache."""

from __future__ import annotations

import pytest

from serve_app.engine.choice.plan import Mode
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.costs.traffic import Load, Traffic

SPLIT, UNIFIED = Mode(True, False), Mode(True, True)
COUNTS = (1, 4, 16)
ROWS = {n: 0.01 * n for n in (1, 16, 64, 512)}


def profile(token_s: float, masked: float = 0.25) -> Profile:
    """10 ms a row of a prompt; 10 ms and 1 ms a row of decoding sequences. 1000 tokens before them take
    `token_s` by row each, and those of others `masked` of that."""
    shallow = {n: 0.01 + 0.001 * n for n in COUNTS}
    deep = {n: shallow[n] + 1000 * token_s * n for n in COUNTS}
    return Profile(shallow, ROWS, {}, 1000, deep, ROWS, masked=masked)


# In a split cache a row reads its own cells. In a unified one, rows that share cells read them together.
OWN, SHARING = (SPLIT, profile(1e-5)), (UNIFIED, profile(0.3e-5))


def compared(own: tuple[Mode, Profile], other: tuple[Mode, Profile], share: float = 1.0) -> Traffic:
    return Traffic((own[0], CostModel(own[1])), other, share)


def test_regret_is_what_the_other_kind_would_have_saved() -> None:
    """16 with 1000 tokens in common: 0.026 + 16 * 0.01 s a step; with the other kind 0.026 + 16 * 0.003."""
    traffic = compared(OWN, SHARING)
    for _ in range(10):
        traffic.observe(Load(16, 1000, n_cells=1000))
    assert traffic.regret_s() == pytest.approx(10 * (0.186 - 1.1 * 0.074), rel=0.02)


def test_prompts_and_decoding_sequences_are_one_batch_of_a_unified_cache() -> None:
    traffic = compared(OWN, SHARING)
    traffic.observe(Load(1, 0, ((63, 0),)))
    assert traffic.regret_s() == 0  # 0.64 s, and apart 0.63 + 0.011: noise
    apart = compared((SPLIT, Profile({1: 0.2}, ROWS)), (UNIFIED, Profile({1: 0.2}, ROWS)))
    apart.observe(Load(1, 0, ((63, 0),)))
    assert apart.regret_s() == pytest.approx(0.83 - 1.1 * 0.64)


def test_a_machine_that_was_busy_while_one_kind_was_measured_says_nothing() -> None:
    """As the profiles of a real start, whose first kind was measured while other processes started."""

    def busy(times: float) -> Profile:
        shallow, deep = {16: 0.08, 1: 0.013}, {16: 0.4, 1: 0.03}
        rows = {16: 0.07, 64: 0.29, 512: 2.2}
        parts = ({n: times * s for n, s in part.items()} for part in (shallow, rows, deep, rows))
        decode, prefill, deep_decode, deep_prefill = parts
        return Profile(decode, prefill, {}, 1000, deep_decode, deep_prefill, masked=0.0)

    for own, other in ((1.25, 1.0), (1.0, 1.25)):
        traffic = compared((SPLIT, busy(own)), (UNIFIED, busy(other)))
        for _ in range(100):
            traffic.observe(Load(16, 200, n_cells=3200))
        traffic.observe(Load(prompts=((512, 0),)))
        assert traffic.regret_s() == 0


def test_cells_of_others_count_in_a_unified_cache() -> None:
    """What was shared before is forgotten when prompts of their own take longer there."""
    traffic = compared(OWN, SHARING)
    traffic.observe(Load(16, 1000, n_cells=1000))
    assert traffic.regret_s() > 0
    for _ in range(3):
        traffic.observe(Load(16, 1000, n_cells=16_000))
    assert traffic.regret_s() == 0


def test_what_was_long_ago_counts_less() -> None:
    traffic, step = compared(OWN, SHARING), Load(16, 1000, n_cells=1000)
    for _ in range(20_000):
        traffic.observe(step)
    one = compared(OWN, SHARING)
    one.observe(step)
    assert traffic.regret_s() == pytest.approx(60 / 0.186 * one.regret_s(), rel=0.05)


def test_alike_steps_count_as_if_added_up_one_by_one() -> None:
    loads = [Load(16, 1000, n_cells=1000)] * 200 + [Load(16, 1000, n_cells=8_000)] * 50
    loads += [Load(2, 64, n_cells=128)] * 20
    at_once, one_by_one = compared(OWN, SHARING), compared(OWN, SHARING)
    for load in loads:
        at_once.observe(load)
        one_by_one.observe(load)
        one_by_one.regret_s()
    assert at_once.regret_s() == pytest.approx(one_by_one.regret_s())
    assert at_once.regret_s() > 0
    for _ in range(2000):
        at_once.observe(Load(16, 1000, n_cells=16_000))
    assert at_once.regret_s() == 0


def test_the_reason_of_a_change() -> None:
    traffic = compared(OWN, SHARING)
    for _ in range(10):
        traffic.observe(Load(16, 1000, n_cells=1000))
    assert traffic.reason() == (
        "unified KV cache, flash attention on: by the traffic of late, 1.8 s of work with split KV cache, "
        "flash attention on, and 0.7 s so"
    )


def test_a_measurement_beside_other_programs_needs_a_larger_gain() -> None:
    """The own kind takes 2.5 times as long."""
    for share, changes in ((1.0, True), (0.5, True), (0.1, True), (0.0, True)):
        traffic = compared(OWN, SHARING, share)
        traffic.observe(Load(16, 1000, n_cells=1000))
        assert (traffic.regret_s() > 0) == changes, share


def test_what_was_learned_of_the_own_kind_counts() -> None:
    """The profile took a row deep in a split cache for three times as slow as it is."""
    costs = CostModel(profile(3e-5))
    traffic, load = Traffic((SPLIT, costs), SHARING), Load(16, 1000, n_cells=1000)
    traffic.observe(load)
    assert (
        traffic.regret_s() > 0.254 - 1.1 * 0.075
    )  # a split cache takes no longer than a unified one
    for _ in range(30):
        costs.observe_decode(16, 16, 1000, 0.186)
        for n, seconds in ROWS.items():
            costs.observe_prefill(n, 0, seconds)
    learned = Traffic((SPLIT, costs), SHARING)
    learned.observe(load)
    assert learned.regret_s() == pytest.approx(0.186 - 1.1 * 0.074, rel=0.1)


def test_a_wrong_slope_of_a_split_cache_does_not_keep_the_engine_from_it() -> None:
    """The step of 16 deep rows took 0.30 s by the profile, 0.13 s in a unified cache. There it takes
    longer as soon as sequences share nothing."""

    def deep(seconds: float, masked: float) -> Profile:
        return Profile(
            {1: 0.014, 16: 0.08}, ROWS, {}, 1000, {1: 0.02, 16: seconds}, ROWS, masked=masked
        )

    traffic = compared((UNIFIED, deep(0.13, masked=0.2)), (SPLIT, deep(0.3, masked=1.0)))
    traffic.observe(Load(16, 1000, n_cells=16_000))
    assert traffic.regret_s() == 0  # the two are the same


def test_in_a_split_cache_each_prompts_attention_is_for_itself() -> None:
    """Kernels that are slow with few rows: sixteen prompts of 32 rows, or one of 512."""
    deep = {1: 0.51, 16: 0.66, 64: 0.7, 512: 5.2}
    split = Profile({1: 0.01}, ROWS, {}, 1000, {}, deep)
    traffic = compared((SPLIT, split), (UNIFIED, split))
    traffic.observe(Load(prompts=((32, 1000.0),) * 16, n_cells=1000))
    assert traffic.regret_s() > 1
    same = compared((SPLIT, split), (UNIFIED, split))
    same.observe(Load(prompts=((512, 1000.0),), n_cells=1000))
    assert same.regret_s() == 0
