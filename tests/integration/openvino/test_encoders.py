"""Vectors and scores of random encoders beside llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import PoolingType

from serve_app.base.errors import ConfigError
from serve_app.engine import Engine, EngineOptions
from tools.random_models.encoder import SHAPES, EncoderShape, write_encoder

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.engine.backends.opening import open_planned
from serve_app.engine.choice.plan import OPENVINO_PLAN
from serve_app.kernels.openvino import convert
from serve_app.kernels.openvino.architectures import ARCHITECTURES

_OPTIONS = EngineOptions(n_slots=2, n_ctx_slot=256, threads=1, profile_limit_s=0)
_WINDOW = EncoderShape("random", 4, 64, 128, 4, 64, 0, "modern-bert", 8)
MODELS = {
    "bert": (SHAPES["tiny"], PoolingType.CLS, "f32"),
    "bert-q8_0": (SHAPES["tiny"], PoolingType.MEAN, "q8_0"),
    "bert-rank": (SHAPES["tiny"], PoolingType.RANK, "f32"),
    "bert-classes": (SHAPES["tiny"], PoolingType.RANK, "f32"),
    "nomic-bert": (replace(SHAPES["tiny"], architecture="nomic-bert"), PoolingType.MEAN, "f32"),
    "modern-bert": (replace(_WINDOW, window=0), PoolingType.MEAN, "f32"),
    "modern-bert-rank": (replace(_WINDOW, window=0), PoolingType.RANK, "f32"),
    "modern-bert-classes": (_WINDOW, PoolingType.RANK, "f32"),
    "modern-bert-windows": (_WINDOW, PoolingType.CLS, "q4_0"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[None]:
    """Where converted models are kept. This process converts them, which saves a second each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        patch.setattr(convert, "_convert", lambda files, part, *_: convert.main(part, files))
        yield


def test_there_is_a_model_of_each_encoder() -> None:
    encoders = {name for name, kind in ARCHITECTURES.items() if kind.encodes}
    assert {shape.architecture for shape, _, _ in MODELS.values()} == encoders


@pytest.mark.parametrize("name", MODELS)
def test_vectors_of_several_texts_are_llama_cpps(tmp_path: Path, name: str) -> None:
    """A batch with texts of all lengths, one of them as long as the model takes, and such a batch with more
    of about one length, which are groups of their own."""
    shape, pooling, dtype = MODELS[name]
    labels = ("joy", "anger", "fear") if name.endswith("classes") else ()
    path = write_encoder(tmp_path / "model.gguf", shape, pooling, dtype, labels=labels)
    rng = np.random.default_rng(3)
    texts = [tuple(map(int, rng.integers(5, 60, n))) for n in (7, shape.n_ctx, 1, 20, 33)]
    more = [*texts, *(tuple(map(int, rng.integers(5, 60, n))) for n in (30, 41, 35, 48, 33, 39))]
    vectors = {}
    for kernels in ("llama.cpp", "openvino"):
        engine = Engine.load(path, replace(_OPTIONS, backend=kernels))
        with closing(engine):
            assert engine.stats().compute.backend == kernels
            vectors[kernels] = engine.embed(texts).result(60)
            among_more = engine.embed(more).result(60)[: len(texts)]
            alone = np.vstack([engine.embed([text]).result(60) for text in texts])
        assert vectors[kernels] == pytest.approx(alone, abs=2e-3)
        assert among_more == pytest.approx(alone, abs=2e-3)
    ours, theirs = vectors["openvino"], vectors["llama.cpp"]
    if pooling is PoolingType.RANK:
        assert ours.shape == (len(texts), max(1, len(labels)))
        assert ours == pytest.approx(theirs, abs=2e-3)
        assert len(np.unique(theirs[:, 0].round(3))) == len(texts)
        return
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosines.min() > 0.999
    parted = [values - values.mean(axis=0) for values in (ours, theirs)]
    assert np.corrcoef(*(values.ravel() for values in parted))[0, 1] > 0.998


def test_an_encoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    shape = replace(SHAPES["tiny"], architecture="jina-bert-v3")
    path = write_encoder(tmp_path / "model.gguf", shape, PoolingType.MEAN)
    with pytest.raises(ConfigError, match="attention to tokens behind"):
        open_planned(OPENVINO_PLAN, path, replace(_OPTIONS, backend="openvino"))
