"""Which candidate is chosen by which profiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.engine.choice.caches import candidates, fastest_mode
from serve_app.engine.choice.plan import PAGED, Mode
from serve_app.engine.choice.rating import compared, fastest, filled, request_s
from serve_app.engine.costs.cost_model import Profile

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
    assert fastest_mode(own, OPEN)[0] == SPLIT_ON
    common = {UNIFIED_ON: measured(0.001, 1e-8), SPLIT_ON: measured(0.001, 4e-7)}
    mode, reason, _ = fastest_mode(common, PINNED)
    assert mode == UNIFIED_ON
    assert "with a common system prompt" in reason


def test_a_bound_makes_small_chunks_count() -> None:
    """Flash attention that is good with many rows and bad with few."""
    options = replace(OPEN, n_ctx_slot=4096, kv_unified=False)
    plain = measured(0.001, 2e-7)
    flash = replace(plain, deep_prefill_s={1: 0.5, 16: 0.5, 64: 0.5, 512: 0.53})
    found = {SPLIT_ON: flash, SPLIT_OFF: plain}
    assert fastest_mode(found, replace(options, max_stall_ms=math.inf))[0] == SPLIT_ON
    assert fastest_mode(found, replace(options, max_stall_ms=100))[0] == SPLIT_OFF


def test_of_those_that_are_as_good_the_first() -> None:
    found = {SPLIT_ON: measured(0.00107, 0), SPLIT_OFF: measured(0.001, 0)}
    assert fastest_mode(found, OPEN)[0] == SPLIT_ON
    only = fastest_mode({SPLIT_OFF: Profile()}, OPEN)
    assert only == (SPLIT_OFF, f"{SPLIT_OFF}: as configured", None)


@pytest.mark.parametrize(("share", "mode"), [(1.0, SPLIT_OFF), (0.9, SPLIT_OFF), (0.4, SPLIT_ON)])
def test_beside_other_programs_another_mode_must_be_better_by_more(
    share: float, mode: Mode
) -> None:
    found = {
        SPLIT_ON: replace(measured(0.0015, 1e-8), share=share),
        SPLIT_OFF: measured(0.001, 1e-8),
    }
    assert fastest_mode(found, OPEN)[0] == mode


def test_only_what_was_measured_in_all_modes_is_compared() -> None:
    """A mode with no time left for its deep batches is not the faster one by that."""
    whole, shallow = measured(0.001, 1e-6), measured(0.0012, 1e-6)
    shallow = replace(shallow, depth=0, deep_decode_s={}, deep_prefill_s={})
    assert request_s(shallow, OPEN, SPLIT_ON) < request_s(whole, OPEN, SPLIT_ON)
    assert fastest_mode({SPLIT_ON: shallow, SPLIT_OFF: whole}, OPEN)[0] == SPLIT_OFF


def test_the_other_kind_of_cache_is_remembered_if_both_are_open() -> None:
    found = {
        SPLIT_ON: measured(0.001, 0),
        SPLIT_OFF: measured(0.001, 0),
        UNIFIED_ON: measured(0.002, 0),
    }
    assert fastest_mode(found, OPEN)[::2] == (SPLIT_ON, UNIFIED_ON)
    assert fastest_mode({mode: found[mode] for mode in (SPLIT_ON, SPLIT_OFF)}, OPEN)[2] is None


def test_what_was_not_measured_is_as_in_the_other_mode() -> None:
    few = Profile({1: 0.02, 4: 0.04}, {16: 0.3}, {}, 0)
    more = Profile({1: 0.01, 2: 0.015, 4: 0.02}, {16: 0.3, 64: 1.0}, {2: 0.05}, 0)
    assert filled(few, more) == Profile(
        {1: 0.02, 2: 0.03, 4: 0.04}, {16: 0.3, 64: 1.0}, {2: 0.05}, 0
    )


def batches(decode_ms: dict[int, float], prompt_tps: float) -> Profile:
    decode_s = {n: ms / 1000 for n, ms in decode_ms.items()}
    return Profile(decode_s, {n: n / prompt_tps for n in (16, 64, 512)})


# Of the 0.6B shape as Q4_0, on two cores of a Zen 4 EPYC.
LLAMA_CPP = batches({1: 18.5, 2: 40, 4: 53, 16: 140}, 250)
OPENVINO = batches({1: 27.0, 2: 30, 4: 34, 16: 92}, 420)
SIXTEEN = EngineOptions(n_slots=16, n_ctx_slot=1024, threads=2)


def openvino_pays(openvino: Profile, options: EngineOptions = SIXTEEN) -> bool:
    modes = {"llama.cpp": (LLAMA_CPP, SPLIT_ON), "OpenVINO": (openvino, PAGED)}
    seconds = {
        name: [
            request_s(profile, replace(options, n_slots=n), mode)
            for n in sorted({1, options.n_slots})
        ]
        for name, (profile, mode) in modes.items()
    }
    return fastest(seconds, 1 / 0.95 - 1) == "OpenVINO"


@pytest.mark.parametrize(("n_slots", "expected"), [(1, False), (4, True), (16, True)])
def test_one_stream_wants_llama_cpp_and_several_want_openvino(n_slots: int, expected: bool) -> None:
    assert openvino_pays(OPENVINO, replace(SIXTEEN, n_slots=n_slots)) is expected


def test_what_is_lost_alone_counts_as_much_as_what_is_gained_together() -> None:
    """Half the time with all slots busy, and more than twice the time alone."""
    assert not openvino_pays(batches({1: 45.0, 16: 70.0}, 250))


def test_of_two_that_are_as_fast_llama_cpp_which_can_do_more() -> None:
    assert not openvino_pays(LLAMA_CPP, replace(SIXTEEN, n_slots=1))
    assert not openvino_pays(LLAMA_CPP, replace(SIXTEEN, max_stall_ms=math.inf))


def test_the_seconds_of_all_candidates_are_told() -> None:
    seconds = {"split": [1.0, 2.5], "unified": [0.5, 1.254]}
    assert compared(seconds, "in a test") == (
        "a request in a test takes 1.00 and 2.50 s with split; 0.50 and 1.25 s with unified"
    )
