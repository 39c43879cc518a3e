"""Which mode is chosen by which profiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, ModeChoice, candidates, choose, filled, request_s
from serve_app.engine.options import EngineOptions

OPEN = EngineOptions(n_slots=4, n_ctx_slot=1024, threads=1)
PINNED = replace(OPEN, pinned=((1,) * 512,))
SPLIT_ON, SPLIT_OFF = Mode(True, False), Mode(False, False)
UNIFIED_ON, UNIFIED_OFF = Mode(True, True), Mode(False, True)


def test_a_cache_that_cannot_change_is_unified_for_long_requests() -> None:
    assert candidates(replace(OPEN, n_ctx=2048), can_change=False) == [UNIFIED_ON]
    assert candidates(OPEN, can_change=False) == candidates(OPEN)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (OPEN, [SPLIT_ON, SPLIT_OFF, UNIFIED_ON]),
        (PINNED, [UNIFIED_ON, UNIFIED_OFF, SPLIT_ON]),
        (replace(OPEN, flash_attn=False), [SPLIT_OFF, UNIFIED_OFF]),
        (replace(OPEN, kv_unified=True), [UNIFIED_ON, UNIFIED_OFF]),
        (replace(OPEN, cache_type_v="q8_0"), [SPLIT_ON, UNIFIED_ON]),
        (replace(OPEN, n_ctx=2048), [SPLIT_ON, SPLIT_OFF, UNIFIED_ON]),
        (replace(OPEN, n_ctx=2048, flash_attn=False), [SPLIT_OFF, UNIFIED_OFF]),
        (replace(OPEN, n_ctx=2048, kv_unified=True), [UNIFIED_ON]),
        (replace(PINNED, n_ctx=4000), [UNIFIED_ON, SPLIT_ON]),
        (replace(PINNED, n_ctx=2048), [UNIFIED_ON]),  # it is as long as a slot's share
        (replace(OPEN, n_slots=1), [SPLIT_ON, SPLIT_OFF]),
        (replace(OPEN, n_slots=1, kv_unified=True), [UNIFIED_ON, UNIFIED_OFF]),
        (replace(OPEN, flash_attn=True, kv_unified=False), [SPLIT_ON]),
    ],
)
def test_what_is_measured(options: EngineOptions, expected: list[Mode]) -> None:
    assert candidates(options) == expected


def measured(row_s: float, token_s: float) -> Profile:
    """So much for each row, and so much more for each row and token in the cache."""
    rows = (1, 2, 4, 16, 64, 512)
    shallow = {n: 0.01 + n * row_s for n in rows}
    deep = {n: shallow[n] + n * 1000 * token_s for n in rows}
    return Profile(shallow, shallow, {}, 1000, deep, deep)


def test_seconds_of_a_request() -> None:
    """Without a bound: 128 rows, or 512 and 256, the same beside others as alone; then 128 tokens with 4
    slots busy."""
    options = replace(OPEN, max_stall_ms=math.inf)
    cheap = measured(0.001, 0.0)
    expected = (0.138 + 0.522 + 0.266) / 2 + 128 * 0.014 / 4
    assert request_s(cheap, options, SPLIT_ON) == pytest.approx(expected, rel=0.01)
    assert request_s(Profile(), OPEN, SPLIT_ON) == 0.0


def test_with_one_slot_nobody_waits_for_a_prompt() -> None:
    """The bound is for those who stream meanwhile."""
    alone = replace(OPEN, n_slots=1)
    costs = measured(0.001, 1e-7)

    def seconds(options: EngineOptions, max_stall_ms: float) -> float:
        return request_s(costs, replace(options, max_stall_ms=max_stall_ms), SPLIT_ON)

    assert seconds(alone, 50) == seconds(alone, math.inf)
    assert seconds(OPEN, 50) > seconds(OPEN, math.inf)


def test_prompts_of_their_own_want_a_split_cache_and_a_common_one_a_unified() -> None:
    """A unified cache's rows attend past all cells, but there a common beginning is only once, and so
    cheap that this does not matter."""
    own = {SPLIT_ON: measured(0.001, 1e-7), UNIFIED_ON: measured(0.001, 1e-7)}
    assert choose(own, OPEN).mode == SPLIT_ON
    common = {UNIFIED_ON: measured(0.001, 1e-8), SPLIT_ON: measured(0.001, 4e-7)}
    choice = choose(common, PINNED)
    assert choice.mode == UNIFIED_ON
    assert "with a common system prompt" in choice.reason
    assert choice.profile == common[UNIFIED_ON]


def test_a_bound_makes_small_chunks_count() -> None:
    """Flash attention that is good with many rows and bad with few."""
    options = replace(OPEN, n_ctx_slot=4096, kv_unified=False)
    plain = measured(0.001, 2e-7)
    flash = replace(plain, deep_prefill_s={1: 0.5, 16: 0.5, 64: 0.5, 512: 0.53})
    found = {SPLIT_ON: flash, SPLIT_OFF: plain}
    assert choose(found, replace(options, max_stall_ms=math.inf)).mode == SPLIT_ON
    assert choose(found, replace(options, max_stall_ms=100)).mode == SPLIT_OFF


def test_of_those_that_are_as_good_the_first() -> None:
    found = {SPLIT_ON: measured(0.00107, 0), SPLIT_OFF: measured(0.001, 0)}
    assert choose(found, OPEN).mode == SPLIT_ON
    assert choose({SPLIT_OFF: Profile()}, OPEN) == ModeChoice(
        SPLIT_OFF, f"{SPLIT_OFF}: as configured", Profile()
    )


@pytest.mark.parametrize(("share", "mode"), [(1.0, SPLIT_OFF), (0.9, SPLIT_OFF), (0.4, SPLIT_ON)])
def test_beside_other_programs_another_mode_must_be_better_by_more(
    share: float, mode: Mode
) -> None:
    found = {
        SPLIT_ON: replace(measured(0.0015, 1e-8), share=share),
        SPLIT_OFF: measured(0.001, 1e-8),
    }
    assert choose(found, OPEN).mode == mode


def test_only_what_was_measured_in_all_modes_is_compared() -> None:
    """A mode with no time left for its deep batches is not the faster one by that."""
    whole, shallow = measured(0.001, 1e-6), measured(0.0012, 1e-6)
    shallow = replace(shallow, depth=0, deep_decode_s={}, deep_prefill_s={})
    assert request_s(shallow, OPEN, SPLIT_ON) < request_s(whole, OPEN, SPLIT_ON)
    choice = choose({SPLIT_ON: shallow, SPLIT_OFF: whole}, OPEN)
    assert choice.mode == SPLIT_OFF
    assert choice.profile == whole


def test_the_other_kind_of_cache_is_remembered_if_both_are_open() -> None:
    found = {
        SPLIT_ON: measured(0.001, 0),
        SPLIT_OFF: measured(0.001, 0),
        UNIFIED_ON: measured(0.002, 0),
    }
    choice = choose(found, OPEN)
    assert choice.other == (UNIFIED_ON, found[UNIFIED_ON])
    turned = choice.turned("learned")
    assert turned == ModeChoice(
        UNIFIED_ON, "learned", found[UNIFIED_ON], None, (SPLIT_ON, found[SPLIT_ON])
    )
    assert choose({SPLIT_ON: found[SPLIT_ON], SPLIT_OFF: found[SPLIT_OFF]}, OPEN).other is None


def test_what_was_not_measured_is_as_in_the_other_mode() -> None:
    few = Profile({1: 0.02, 4: 0.04}, {16: 0.3}, {}, 0)
    more = Profile({1: 0.01, 2: 0.015, 4: 0.02}, {16: 0.3, 64: 1.0}, {2: 0.05}, 0)
    assert filled(few, more) == Profile(
        {1: 0.02, 2: 0.03, 4: 0.04}, {16: 0.3, 64: 1.0}, {2: 0.05}, 0
    )
