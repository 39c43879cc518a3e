"""The sizes of a model's cache are llama.cpp's own, whatever differs from layer to layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.config.sizing import ModelNeeds
from serve_app.llama.cache_sizes import CacheSizes, cache_sizes
from serve_app.llama.model import Model
from tests.integration.models import forgetful_models
from tests.integration.models.forgetful_models import WINDOW


def test_windows_and_recurrent_layers(tmp_path: Path) -> None:
    expected = {
        "gemma3": CacheSizes((32, 32), (5 * 32, 5 * 32), WINDOW, 0),
        "lfm2": CacheSizes((2 * 32, 2 * 32), (0, 0), 0, 2 * 4 * 64 * 2),
        "mamba": CacheSizes((0, 0), (0, 0), 0, 2 * 4 * (128 * 16 + 128 * 3)),
    }
    for name, sizes in expected.items():
        path = tmp_path / f"{name}.gguf"
        getattr(forgetful_models, f"write_{name}")(path)
        found = cache_sizes(path)
        assert found is not None
        assert found[:-1] == sizes[:-1], name
        assert found.recurrent_bytes == pytest.approx(
            sizes.recurrent_bytes, abs=170
        )  # 0.01 MiB of 64


@settings(max_examples=10, deadline=None)
@given(heads=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_each_layer_has_heads_of_its_own(
    heads: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("model") / "openelm.gguf"
    forgetful_models.write_openelm(path, heads)
    needs = ModelNeeds.of(Model(path, vocab_only=True))
    keys, values = needs.cache_elements
    assert keys == 32 * sum(heads)
    assert values in (
        32 * sum(heads),
        32 * max(heads) * len(heads),
    )  # padded, without flash attention


def test_weights_may_be_missing(tmp_path: Path) -> None:
    """As of a model that is downloaded later: its file has the beginning, and a hole."""
    path = tmp_path / "hole.gguf"
    whole = BUILTIN_MODEL.read_bytes()
    n_head = len(whole) // 4  # metadata, vocabulary and the list of tensors
    path.write_bytes(whole[:n_head])
    with path.open("r+b") as file:
        file.truncate(len(whole))
    assert cache_sizes(path) == cache_sizes(BUILTIN_MODEL) == CacheSizes((768, 768), (0, 0), 0, 0)


def test_a_file_without_weights_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    path.write_bytes(b"GGUF")
    assert cache_sizes(path) is None
