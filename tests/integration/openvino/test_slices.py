"""Slices of models with random weights: what they have of a model, and that both backends compute them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.base.progress import Stage, nowhere
from serve_app.engine import EngineOptions
from serve_app.kernels.llama.model import Model
from tests.integration.openvino.random_models import Made

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.engine.choice.kernels import kernels_profiles
from serve_app.engine.choice.plan import OPENVINO, OPENVINO_W8A8, REPACKED
from serve_app.kernels.openvino import convert, slices
from serve_app.kernels.openvino.gguf_model import readable

_OPTIONS = EngineOptions(2, 256, 1, n_batch=64, profile_limit_s=1.0)
_N_LAYERS = 8
_WINDOW = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False] * 4}
# The layers of their slices, which have two layers or a period at least.
MODELS = {
    "qwen3": (Made("qwen3", n_layer=_N_LAYERS, tied=True), [2, 6]),
    "gpt-oss": (Made("gpt-oss", n_layer=_N_LAYERS, metadata=_WINDOW), [4, 5]),
    "smollm3": (Made("smollm3", n_layer=_N_LAYERS, metadata={"vocab_size": 512}), [4, 5, 6, 7]),
    "rope_freqs": (
        Made("llama", n_layer=_N_LAYERS, vectors={"rope_freqs.weight": (32, 4.0)}),
        [2, 6],
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where converted models are kept. All slices are as small as they may be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(slices, "_BYTES", 0)
    return convert.converted_models(None).path


@pytest.mark.parametrize("name", MODELS)
def test_a_slice_has_some_layers_and_as_large_a_part_of_the_vocabulary(
    tmp_path: Path, folder: Path, name: str
) -> None:
    made, layers = MODELS[name]
    model = Model(made.write(tmp_path / "model.gguf"), vocab_only=True)
    whole = {tensor.name: tensor for tensor in readable(model.files).tensors}
    stages: list[Stage] = []
    with slices.converted_slice(model, None, stages.append, ("none", "w8a8")) as found:
        path, share, conversion_s = found
        part = readable([path])
        assert part.count("block_count") == len(layers)
        for tensor in part.tensors:
            same = tensor.name
            if same.startswith("blk."):
                _, layer, rest = same.split(".", 2)
                same = f"blk.{layers[int(layer)]}.{rest}"
            expected = whole.pop(same).data
            if same.startswith(("token_embd.", "output.")):
                assert len(tensor.data) == 256
                expected = expected[: len(tensor.data)]
            assert (tensor.data == expected).all()
        assert all(name.startswith("blk.") for name in whole)
        candidates = [REPACKED, OPENVINO, OPENVINO_W8A8]
        profiles = kernels_profiles(path, _OPTIONS, candidates, 1.0)
    assert all(profile.decode_s.keys() == {1, 2} for profile in profiles)
    assert conversion_s > 0
    assert share == len(layers) / _N_LAYERS
    assert {stage.name for stage in stages} == {"converting"}
    assert [path.name for path in folder.iterdir()] == [".locks"]


def test_windows_stay_where_they_are(tmp_path: Path) -> None:
    made, layers = MODELS["gpt-oss"]
    whole = readable([made.write(tmp_path / "model.gguf")])
    model = Model(tmp_path / "model.gguf", vocab_only=True)
    with slices.converted_slice(model, None, nowhere) as (path, *_):
        assert readable([path]).windows == [whole.windows[layer] for layer in layers] == [24, 0]


def test_a_small_model_is_its_own_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_BYTES", 2**29)
    model = Model(Made("qwen3", n_layer=4).write(tmp_path / "model.gguf"), vocab_only=True)
    with slices.converted_slice(model, None, nowhere) as (path, share, conversion_s):
        assert (path, share, conversion_s) == (model.path, 1, 0)
    assert convert.converted_models(None).of(convert.name_of(model.fingerprint())).is_file()


def test_nothing_stays_of_a_slice_whose_measurement_fails(tmp_path: Path, folder: Path) -> None:
    model = Model(Made("qwen3", n_layer=4).write(tmp_path / "model.gguf"), vocab_only=True)
    with pytest.raises(OSError, match="scripted"), slices.converted_slice(model, None, nowhere):
        raise OSError("scripted")
    assert [path.name for path in folder.iterdir()] == [".locks"]


def test_a_slice_that_a_killed_start_left_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(Made("qwen3", n_layer=4).write(tmp_path / "model.gguf"), vocab_only=True)
    with monkeypatch.context() as killed:
        killed.setattr(convert.ConvertedModels, "remove", lambda *_: None)
        with slices.converted_slice(model, None, nowhere):
            pass
    stages: list[Stage] = []
    with slices.converted_slice(model, None, stages.append):
        assert {stage.name for stage in stages} == {"converting"}
