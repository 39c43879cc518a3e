"""llama.cpp loads what `write_random_gguf` writes, and generates from it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tools.random_models.model import SHAPES, TYPES, write_random_gguf

N_VOCAB = SHAPES["tiny"].n_vocab
PROMPTS = ("Hello there, how are you?", "The capital of France is")


class Model:
    """A loaded model."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        # Plain kernels: some compilers (GCC 12.2) break llama.cpp's AMX ones, which then crash.
        params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 1))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), True, True)
        return list(tokens[:n])

    def detokenize(self, tokens: list[int]) -> bytes:
        piece = ctypes.create_string_buffer(64)
        text = b""
        for token in tokens:
            n = llama_cpp.llama_token_to_piece(self.vocab, token, piece, len(piece), 0, True)
            text += piece.raw[:n]
        return text

    def greedy(self, prompt: str, n_tokens: int) -> list[int]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 128, 1, 1
        context = llama_cpp.llama_init_from_model(self.model, params)
        assert context
        out: list[int] = []
        tokens = self.tokenize(prompt)
        for _ in range(n_tokens):
            batch = (llama_cpp.llama_token * len(tokens))(*tokens)
            view = llama_cpp.llama_batch_get_one(batch, len(tokens))
            assert llama_cpp.llama_decode(context, view) == 0
            row = llama_cpp.llama_get_logits_ith(context, -1)
            logits = np.ctypeslib.as_array(row, (N_VOCAB,))
            assert np.isfinite(logits).all()
            tokens = [int(logits.argmax())]
            out += tokens
        llama_cpp.llama_free(context)
        return out


@pytest.fixture(scope="module", params=[*TYPES, "tiny-gpt-oss"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    shape, kind = ("tiny", request.param) if request.param in TYPES else (request.param, "mxfp4")
    write_random_gguf(path, SHAPES[shape], kind)
    llama_cpp.llama_backend_init()
    loaded = Model(path)
    yield loaded
    llama_cpp.llama_model_free(loaded.model)


@pytest.mark.parametrize(
    "text",
    ["Hello, world!\n\tx = 1", "Ça va? naïve façade, Zürich", "👩‍💻 says 🎉", "日本語", "\x00\x7f"],
)
def test_text_survives_tokenizing(model: Model, text: str) -> None:
    assert model.detokenize(model.tokenize(text)) == text.encode()


def test_english_takes_fewer_tokens_than_bytes(model: Model) -> None:
    text = "There are many people who would like to make a small sound in the water."
    assert len(model.tokenize(text)) < len(text) / 2


def test_control_tokens(model: Model) -> None:
    padding, start, end = range(N_VOCAB - 3, N_VOCAB)
    assert model.tokenize("<|endoftext|><|im_start|><|im_end|>") == [padding, start, end]
    assert llama_cpp.llama_vocab_eos(model.vocab) == end
    assert llama_cpp.llama_vocab_pad(model.vocab) == padding
    ends = [t for t in range(N_VOCAB) if llama_cpp.llama_vocab_is_eog(model.vocab, t)]
    assert ends == [padding, end]
    assert not llama_cpp.llama_vocab_get_add_bos(model.vocab)


def test_greedy_text_is_lively(model: Model) -> None:
    first, second = (model.greedy(prompt, 30) for prompt in PROMPTS)
    assert first != second
    assert min(len(set(first)), len(set(second))) >= 7
    assert model.greedy(PROMPTS[0], 30) == first
