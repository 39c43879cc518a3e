"""The sizes of a model's cache are llama.cpp's own, whatever differs from layer to layer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.config.schema import EngineConfig
from serve_app.kernels.llama.cache_sizes import CacheSizes
from serve_app.kernels.llama.model import Model
from serve_app.run.sizing import ModelNeeds, resolve
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.models import forgetful_models
from tests.integration.models.forgetful_models import WINDOW
from tests.integration.models.layered_headers import Layers, write_header


def test_windows_and_recurrent_layers(tmp_path: Path) -> None:
    expected = {
        "gemma3": CacheSizes((32, 32), (5 * 32, 5 * 32), WINDOW, 0),
        "lfm2": CacheSizes((2 * 32, 2 * 32), (0, 0), 0, 2 * 4 * 64 * 2),
        "mamba": CacheSizes((0, 0), (0, 0), 0, 2 * 4 * (128 * 16 + 128 * 3)),
    }
    for name, sizes in expected.items():
        path = tmp_path / f"{name}.gguf"
        getattr(forgetful_models, f"write_{name}")(path)
        found = Model(path, vocab_only=True).cache_sizes
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


GEMMA_4_31B = Layers(
    "gemma4",
    n_embd=5376,
    n_ff=21_504,
    windowed=([True] * 5 + [False]) * 10,
    window=1024,
    heads=[32] * 60,
    heads_kv=([16] * 5 + [4]) * 10,
    head_sizes=([(256, 256)] * 5 + [(512, 512)]) * 10,
)
ONE_OF_FOUR = [False, True, True, True]


@pytest.mark.parametrize(
    ("layers", "full", "windowed"),
    [
        (GEMMA_4_31B, 10 * 4 * 512, 50 * 16 * 256),
        (
            Layers(
                *("gemma4", 256, 512, ([True] * 4 + [False]) * 2, 512, [8] * 10, [2] * 10),
                head_sizes=([(32, 32)] * 4 + [(64, 64)]) * 2,
                n_shared=5,
            ),
            1 * 2 * 64,
            4 * 2 * 32,
        ),
        (
            Layers("mimo2", 256, 512, ONE_OF_FOUR, 128, [8] * 4, [1, 2, 2, 2], [(64, 32)] * 4),
            1 * 1 * 64,
            3 * 2 * 64,
        ),
        (
            Layers("step35", 256, 512, ONE_OF_FOUR, 512, [8, 12, 12, 12], [2] * 4, [(32, 32)] * 4),
            1 * 2 * 32,
            3 * 2 * 32,
        ),
        (
            Layers("granite_swa", 256, 512, ONE_OF_FOUR, 4096, [8] * 4, [2] * 4, [(32, 32)] * 4),
            1 * 2 * 32,
            3 * 2 * 32,
        ),
    ],
    ids=["gemma4 of 31B", "gemma4 with shared layers", "mimo2", "step35", "granite_swa"],
)
def test_heads_windows_and_shared_layers_of_each_layer(
    tmp_path: Path, layers: Layers, full: int, windowed: int
) -> None:
    path = tmp_path / "m.gguf"
    write_header(path, layers)
    sizes = Model(path, vocab_only=True).cache_sizes
    assert sizes is not None
    assert (sizes.full[0], sizes.windowed[0], sizes.window) == (full, windowed, layers.window)
    # Values as keys, unless llama.cpp pads them to the widest layer, as it does without flash attention.
    assert sizes.full[1] in range(full // 2, 2 * full + 1)
    assert sizes.windowed[1] in range(windowed // 2, 2 * windowed + 1)


def test_a_model_with_windows_gets_the_slots_that_fit(tmp_path: Path) -> None:
    path = tmp_path / "gemma-4-31b.gguf"
    write_header(path, GEMMA_4_31B)
    needs = ModelNeeds.of(Model(path, vocab_only=True))
    memory, config = 64 << 30, EngineConfig(n_ctx_slot=4096)
    options = resolve(config, needs, cores=16, memory_bytes=memory)
    of_token = 2 * (10 * (4 * 512 + 16 * 256))  # keys and padded values of full layers
    of_window = 2 * 2 * 50 * 16 * 256
    of_slot = 4096 * of_token + (1024 + config.n_batch) * of_window
    room = (memory - path.stat().st_size) / 2
    assert options.n_slots == room // of_slot == 14


def test_weights_may_be_missing(tmp_path: Path) -> None:
    """As of a model that is downloaded later: its file has the beginning, and a hole."""
    path = tmp_path / "hole.gguf"
    whole = BUILTIN_MODEL.read_bytes()
    n_head = len(whole) // 4  # metadata, vocabulary and the list of tensors
    path.write_bytes(whole[:n_head])
    with path.open("r+b") as file:
        file.truncate(len(whole))
    of_hollow, of_whole = (Model(one, vocab_only=True).cache_sizes for one in (path, BUILTIN_MODEL))
    assert of_hollow == of_whole == CacheSizes((768, 768), (0, 0), 0, 0)
