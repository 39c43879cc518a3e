"""A start opens a model's file once in the server, and once in the engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import llama_cpp
import pytest

from serve_app.base.errors import ConfigError
from serve_app.base.formats import BackendName
from serve_app.config.schema import parse
from serve_app.engine import Engine, EngineOptions
from serve_app.kernels.llama.model import Model
from serve_app.prompt.tokenizer import forget_tokenizers, open_tokenizer
from serve_app.run.resolving import resolve
from serve_app.server.model_registry import ModelFile, ModelInfo
from serve_app.store.builtin_model import BUILTIN_MODEL


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(BUILTIN_MODEL, tmp_path / "m.gguf"))


def test_what_is_looked_up_for_the_start_is_what_is_served(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    read = Model._read_metadata

    def noted(model: Model) -> None:
        opened.append(model.path)
        read(model)

    monkeypatch.setattr(Model, "_read_metadata", noted)
    (model,) = resolve(parse({"models": [{"id": "m", "source": {"path": str(path)}}]}))
    pooling = model.options.embedding_pooling
    info = ModelInfo.open(ModelFile("m", 64, str(path), pooling, defaults=model.defaults))
    assert opened == [info.tokenizer.model.path] == [path]


def test_another_file_is_opened_anew(path: Path) -> None:
    first = open_tokenizer(str(path), None, None)
    assert open_tokenizer(str(path), None, None) is first
    assert open_tokenizer(str(path), "chatml", None) is not first
    os.utime(path, ns=(1, 1))
    second = open_tokenizer(str(path), None, None)
    assert second is not first
    forget_tokenizers()
    assert open_tokenizer(str(path), None, None) is not second


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no model file at"):
        open_tokenizer(str(tmp_path / "none.gguf"), None, None)


@pytest.mark.parametrize("backend", ["llama.cpp", "openvino"])
def test_an_engine_opens_the_file_once(
    backend: BackendName, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is measured or converted any more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent))
    options = EngineOptions(n_slots=1, n_ctx_slot=64, threads=1, profile_limit_s=0, backend=backend)
    if backend == "openvino":
        pytest.importorskip("openvino", reason="corral[openvino] is not installed")
        Engine.load(path, options).close()  # which converts
    opened: list[bytes] = []
    load = llama_cpp.llama_model_load_from_file

    def noted(file: bytes, params: llama_cpp.llama_model_params) -> object:
        opened.append(file)
        return load(file, params)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", noted)
    Engine.load(path, options).close()
    assert opened == [os.fsencode(path)]
