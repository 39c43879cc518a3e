"""What a plan says of itself, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.base.progress import nowhere
from serve_app.engine.choice.caches import load_or_measure
from serve_app.engine.choice.plan import (
    AS_STORED,
    LLAMA_CPP_PLAN,
    OPENVINO,
    OPENVINO_W8A8,
    REPACKED,
    CachePlan,
    Kernels,
    Mode,
    Plan,
)
from serve_app.engine.costs import profile_cache
from serve_app.engine.costs.cost_model import Profile

CACHE = CachePlan(
    Mode(flash_attn=True, kv_unified=False),
    "split: as configured",
    Profile({1: 0.5}, {8: 0.25}, {2: 0.1}, 512, {1: 0.75}, {8: 0.5}, 0.007),
    (Mode(flash_attn=True, kv_unified=True), Profile({1: 0.25}, masked=0.5)),
)
PLAN = Plan(
    Kernels(many_from=16),
    "measured",
    llama_cpp=Kernels(many_from=16),
    openvino=OPENVINO_W8A8,
    reason="measured",
    conversion_s=40.0,
    is_certain=True,
    name="a",
)


@pytest.mark.parametrize(
    ("kernels", "text"),
    [
        (OPENVINO, "OpenVINO"),
        (OPENVINO_W8A8, "OpenVINO, w8a8"),
        (REPACKED, "llama.cpp, weights repacked"),
        (AS_STORED, "llama.cpp, weights as they are stored"),
        (
            Kernels(many_from=16),
            "llama.cpp, weights repacked, and as they are stored for batches of 16 rows and more",
        ),
    ],
)
def test_kernels_say_what_they_are(kernels: Kernels, text: str) -> None:
    assert str(kernels) == text


def test_what_was_kept_is_found_again_with_the_same_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    assert PLAN.cache is None
    PLAN.keep(folder, CACHE)
    kept = profile_cache.load(folder, "a", Plan)
    assert kept == replace(PLAN, caches={str(PLAN.kernels): CACHE})
    assert kept is not None
    assert kept.cache == CACHE
    assert replace(kept, kernels=OPENVINO).cache is None
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_the_caches_of_several_kernels_are_kept(tmp_path: Path) -> None:
    PLAN.keep(tmp_path, CACHE)
    kept = profile_cache.load(tmp_path, "a", Plan)
    assert kept is not None
    other = replace(CACHE, reason="paged")
    replace(kept, kernels=OPENVINO).keep(tmp_path, other)
    kept = profile_cache.load(tmp_path, "a", Plan)
    assert kept is not None
    assert kept.caches == {str(PLAN.kernels): CACHE, "OpenVINO": other}


def test_a_plan_without_a_name_is_not_kept(tmp_path: Path) -> None:
    LLAMA_CPP_PLAN.keep(tmp_path, CACHE)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("share", "measures_again", "n_measured"),
    [(0.7, True, 2), (0.7, False, 1), (1.0, True, 1), (1.0, False, 1)],
)
def test_what_other_programs_disturbed_is_measured_again_unless_somebody_waits_for_it(
    tmp_path: Path,
    share: float,
    measures_again: bool,
    n_measured: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = EngineOptions(
        n_slots=1, n_ctx_slot=64, threads=1, profile_folder=tmp_path, measures_again=measures_again
    )
    measured: list[CachePlan] = []

    def measure() -> CachePlan:
        measured.append(replace(CACHE, profile=replace(CACHE.profile, share=share)))
        return measured[-1]

    for _ in range(2):
        plan = profile_cache.load(tmp_path, "a", Plan) or PLAN
        assert load_or_measure(plan, options, nowhere, measure) == measured[-1]
    assert len(measured) == n_measured
    assert ("The next start measures again" in caplog.text) == (share < 1 and measures_again)
    assert ("learned while the model serves" in caplog.text) == (n_measured == 1 and share < 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": {"flash_attn": True}},
        {"mode": {"flash_attn": True, "kv_unified": "no"}},
        {"profile": {"depth": "x"}},
        {"profile": {"decode_s": 3}},
        {"other": [1]},
    ],
    ids=str,
)
def test_a_damaged_cache_is_measured_again(tmp_path: Path, changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "mode": {"flash_attn": True, "kv_unified": True},
        "reason": "",
        "profile": {},
    }
    for cache in (good, good | changed):
        profile_cache.save(tmp_path, "a", {"caches": {"OpenVINO": cache}})
        kept = profile_cache.load(tmp_path, "a", Plan)
        assert (kept is not None) is (cache is good)
