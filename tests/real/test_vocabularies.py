"""The vocabularies in llama.cpp's source: texts have the tokens that llama.cpp's own tests expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.prompt.tokenizer import Tokenizer
from tests.real.models import LLAMA_CPP

SEPARATOR = "\n__ggml_vocab_test__\n"
EXPECTED = sorted((LLAMA_CPP / "models").glob("ggml-vocab-*.gguf.out"))


def test_all_vocabularies_are_here() -> None:
    assert len(EXPECTED) >= 15


@pytest.mark.usefixtures("vocabularies_alone")
@pytest.mark.parametrize("expected", EXPECTED, ids=lambda path: path.name.split(".")[0])
def test_tokens_of_texts(expected: Path) -> None:
    tokenizer = Tokenizer(expected.with_suffix(""))
    texts = expected.with_suffix(".inp").read_bytes().decode().split(SEPARATOR)
    lines = expected.read_text().splitlines()
    assert len(texts) in (len(lines), len(lines) + 1)
    for text, line in zip(texts, lines, strict=False):
        tokens = tokenizer.tokenize(text, add_special=False, parse_special=False)
        assert tokens == tuple(map(int, line.split())), repr(text)
