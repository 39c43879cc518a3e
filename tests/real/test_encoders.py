"""A real encoder makes the vectors that its publishers say, on both backends."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import TextTooLongError
from serve_app.base.formats import BackendName
from serve_app.engine import Engine
from serve_app.prompt.tokenizer import Tokenizer
from tests.real.models import TEXT, minilm

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
"""Their cosines. Source: Sentence Transformers' documentation, "Quickstart"."""
EXAMPLE = (101, 2023, 2003, 2019, 2742, 6251, 102)
"""The tokens of "This is an example sentence", by BERT's own tokenizer."""


@pytest.mark.parametrize("backend", ["llama.cpp", "openvino"])
def test_vectors_are_the_published_ones(backend: BackendName) -> None:
    """Also of a text as long as the model has positions for, beside short ones. A longer one is refused."""
    tokenizer = Tokenizer(minilm())
    texts = [tokenizer.encode_for_embedding(text) for text in SENTENCES]
    assert tokenizer.encode_for_embedding("This is an example sentence") == EXAMPLE
    long = tokenizer.encode_for_embedding(TEXT)
    options = EngineOptions(
        n_slots=4, n_ctx_slot=8192, threads=2, profile_limit_s=0, backend=backend
    )
    engine = Engine.load(minilm(), options)
    try:
        assert engine.stats().n_ctx_slot == tokenizer.model.n_ctx_train == 512
        vectors = engine.embed([*texts, long[:512]]).result(120)
        with pytest.raises(TextTooLongError, match="takes 512"):
            engine.embed([long[:513]])
    finally:
        engine.close(0)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert units[:3] @ units[:3].T == pytest.approx(np.array(SIMILARITIES), abs=5e-4)
    assert np.isfinite(units[3]).all()
