"""Which backend is chosen by which profiles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import PAGED, Mode, compared
from serve_app.engine.options import EngineOptions

OPTIONS = EngineOptions(n_slots=16, n_ctx_slot=1024, threads=2)
SPLIT = Mode(flash_attn=True, kv_unified=False)


def profile(decode_ms: dict[int, float], prompt_tps: float) -> Profile:
    decode_s = {n: ms / 1000 for n, ms in decode_ms.items()}
    return Profile(decode_s, {n: n / prompt_tps for n in (16, 64, 512)})


# Of the 0.6B shape as Q4_0, on two cores of a Zen 4 EPYC.
LLAMA_CPP = profile({1: 18.5, 2: 40, 4: 53, 16: 140}, 250)
OPENVINO = profile({1: 27.0, 2: 30, 4: 34, 16: 92}, 420)


def openvino_pays(openvino: Profile, options: EngineOptions = OPTIONS) -> bool:
    comparison = compared(openvino, LLAMA_CPP, options, PAGED, SPLIT)
    assert comparison is not None
    pays, figures = comparison
    assert f"with {options.n_slots} at once" in figures
    return pays


@pytest.mark.parametrize(("n_slots", "expected"), [(1, False), (4, True), (16, True)])
def test_one_stream_wants_llama_cpp_and_several_want_openvino(n_slots: int, expected: bool) -> None:
    assert openvino_pays(OPENVINO, replace(OPTIONS, n_slots=n_slots)) is expected


def test_what_is_lost_alone_counts_as_much_as_what_is_gained_together() -> None:
    """Half the time with all slots busy, and more than twice the time alone."""
    assert not openvino_pays(profile({1: 45.0, 16: 70.0}, 250))


def test_of_two_that_are_as_fast_llama_cpp_which_can_do_more() -> None:
    assert not openvino_pays(LLAMA_CPP, replace(OPTIONS, n_slots=1))
    assert not openvino_pays(LLAMA_CPP, replace(OPTIONS, max_stall_ms=math.inf))


def test_without_measurements_nothing_is_compared() -> None:
    assert compared(Profile(), Profile(), OPTIONS, PAGED, SPLIT) is None
