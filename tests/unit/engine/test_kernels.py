"""Which backend is chosen by which profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode
from serve_app.engine.backends.base import Setup
from serve_app.engine.backends.choice import LLAMA_CPP, OPENVINO, faster
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.llama.formats import Threads

OPTIONS = EngineOptions(n_slots=16, n_ctx_slot=1024, threads=2)
PAGED, SPLIT = Mode(True, False, paged=True), Mode(True, False)


def measured(mode: Mode, decode_ms: dict[int, float], prompt_tps: float) -> Setup:
    decode_s = {n: ms / 1000 for n, ms in decode_ms.items()}
    prefill_s = {n: n / prompt_tps for n in (16, 64, 512)}
    return Setup("openvino", mode, Threads.alike(2, None), Profile(decode_s, prefill_s))


# Of the 0.6B shape as Q4_0, on two cores of a Zen 4 EPYC.
FOUND: dict[KernelsName, Setup] = {
    LLAMA_CPP: measured(SPLIT, {1: 18.5, 2: 40, 4: 53, 16: 140}, 250),
    OPENVINO: measured(PAGED, {1: 27.0, 2: 30, 4: 34, 16: 92}, 420),
}


@pytest.mark.parametrize(("n_slots", "expected"), [(1, LLAMA_CPP), (4, OPENVINO), (16, OPENVINO)])
def test_one_stream_wants_llama_cpp_and_several_want_openvino(
    n_slots: int, expected: KernelsName
) -> None:
    choice = faster(FOUND, replace(OPTIONS, n_slots=n_slots))
    assert choice.name == expected
    assert f"with {n_slots} at once" in choice.reason


def test_what_is_lost_alone_counts_as_much_as_what_is_gained_together() -> None:
    """Half the time with all slots busy, and more than twice the time alone."""
    slow_alone = measured(PAGED, {1: 45.0, 16: 70.0}, 250)
    assert faster(FOUND, OPTIONS).name == OPENVINO
    assert faster(FOUND | {OPENVINO: slow_alone}, OPTIONS).name == LLAMA_CPP


def test_of_two_that_are_as_fast_llama_cpp_which_can_do_more() -> None:
    same = {name: replace(FOUND[LLAMA_CPP], mode=one.mode) for name, one in FOUND.items()}
    assert faster(same, replace(OPTIONS, n_slots=1)).name == LLAMA_CPP
    assert faster(same, replace(OPTIONS, max_stall_s=None)).name == LLAMA_CPP


def test_without_measurements_llama_cpp() -> None:
    nothing = {name: replace(one, profile=Profile()) for name, one in FOUND.items()}
    choice = faster(nothing, OPTIONS)
    assert choice.name == LLAMA_CPP
    assert choice.reason == "nothing was measured"
