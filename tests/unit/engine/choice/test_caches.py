"""How large the contexts are that are opened only to be measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.engine.choice import caches
from serve_app.engine.choice.plan import Mode
from serve_app.engine.costs.profiler import DEPTH, ROOM
from serve_app.kernels.llama.context import CELL_PADDING

MODES = [Mode(True, False), Mode(False, False), Mode(True, True)]
BYTES_OF_TOKEN = 28 * 2 * 1024 * 2  # Qwen3's 0.6B


def model(**changed: Any) -> Any:
    shape = {"n_layer": 28, "layer_elements": (1024, 1024), "is_recurrent": False, "window": 0}
    return SimpleNamespace(**shape | changed)


def taken(n_slots: int, n_ctx_slot: int, depth: int) -> int:
    """The bytes of all caches, as llama.cpp rounds them up."""
    lengths = [n_ctx_slot] * n_slots * len(MODES)
    if depth:
        lengths += [depth + ROOM + n_slots] * 2
    return BYTES_OF_TOKEN * sum(-(-n // CELL_PADDING) * CELL_PADDING for n in lengths)


def test_where_there_is_room_all_is_measured() -> None:
    options = EngineOptions(threads=1, n_slots=16, n_ctx_slot=4096)
    assert caches._size_contexts(MODES, model(), options) == (512, DEPTH)


@pytest.mark.parametrize(("n_slots", "n_ctx"), [(7, 7168), (3, 3072), (8, 11_800), (16, 16_384)])
def test_they_take_no_more_than_the_cache_that_comes_after_them(n_slots: int, n_ctx: int) -> None:
    """With a memory limit of 2 GiB, a model of 380 MB was killed while it was measured."""
    options = EngineOptions(threads=1, n_slots=n_slots, n_ctx_slot=n_ctx, n_ctx=n_ctx)
    n_ctx_slot, depth = caches._size_contexts(MODES, model(), options)
    assert n_ctx_slot >= CELL_PADDING
    assert depth >= 128
    assert taken(n_slots, n_ctx_slot, depth) <= BYTES_OF_TOKEN * n_ctx


def test_a_small_cache_is_no_reason_to_measure_less() -> None:
    options = EngineOptions(threads=1, n_slots=3, n_ctx_slot=1024)
    small = model(n_layer=2, layer_elements=(32, 32))
    assert caches._size_contexts(MODES, small, options) == (512, 1024 - ROOM)


def test_recurrent_layers_cannot_forget_a_deep_batch() -> None:
    options = EngineOptions(threads=1, n_slots=4, n_ctx_slot=4096)
    assert caches._size_contexts(MODES, model(is_recurrent=True), options) == (512, 0)
