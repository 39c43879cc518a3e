"""Proves that llama.cpp and a tokenizer.json make the same tokens."""

# ruff: noqa: RUF001  # texts of all scripts are meant

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterator
from typing import Any

from serve_app.errors import ConfigError
from serve_app.llama.model import Model

_TEXTS = (
    "",
    " ",
    "Hello, world! It's 3.14159 o'clock, and WE'LL see what they'd've done; I'm sure you're right.",
    "  two spaces,   three,\ttabs\t\tand\n\nlines\r\n   with spaces before\n \n  and after   \n\n\n",
    "def f(x: int) -> str:\n    return f'{x:>10_d}'  # 100% of `code`\n\tif a != b && c <= d {\n\t\t}\n",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 20, 300, 4000, 1234567890]}}',
    "Größe, Œuvre, señor, façade, İstanbul, naïve, coöperate, Ångström, Dvořák, ẞ",
    "Привет, мир! Как дела? Это проверка.",
    "Γειά σου Κόσμε, τι κάνεις;",
    "你好，世界！这是一个测试。12345年，价格是¥99.50。",
    "こんにちは、世界。これはテストです。カタカナも。",
    "안녕하세요, 세계! 테스트입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก วันนี้อากาศดี",
    "🙂🚀 👩‍👩‍👧‍👦 🇩🇪 ✓ → ∑∫√π ≤ ½ ² ™ € “quotes” ‘single’ — dash… •",
    "a\u00a0b\u2003c\u3000d\u200be\x00f\x7fg",
    "https://www.example.com/path?query=1&other=%20#fragment user@example.org C:\\dir\\file.txt",
    "#!/bin/sh\nset -e\n# ---- ==== **** ____ ....\n<html><body class='x'>&amp;</body></html>\n",
)
_WORD = frozenset(string.printable)
_AT_ONCE = 24
"""Tokens in a row."""
_MOST_CHUNKS = 4000


def check(model: Model, tokenizer: Any, *, composes: bool) -> None:
    """Compare the tokens of many texts, with and without those that begin and end one. Raises ConfigError,
    with the reason as the rest of a sentence, at the first difference. `tokenizer` is the tokenizers
    package's; where it `composes`, only composed texts are compared."""
    texts = [*_TEXTS, *_of_tokens(model, tokenizer), *_with_added(tokenizer)]
    if composes:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    for adds in (False, True):
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=adds)
        for text, expected in zip(texts, found, strict=True):
            tokens = model.tokenize(text, add_special=adds, parse_special=True)
            if tokens != expected.ids:
                raise ConfigError(
                    f"llama.cpp's tokens of {_begin(text)!r} are not its tokenizer's: {tokens[:16]} "
                    f"instead of {expected.ids[:16]}"
                )


def _begin(text: str) -> str:
    return text if len(text) < 60 else f"{text[:60]}..."


def _of_tokens(model: Model, tokenizer: Any) -> Iterator[str]:
    """Texts of many tokens in a row, so that merges of all kinds are made. ASCII only: of other characters,
    each program has a table of its own, of one year or another."""
    n_tokens = min(model.n_vocab, tokenizer.get_vocab_size())
    pieces = (model.piece(token) for token in range(n_tokens))
    words = [piece.decode() for piece in pieces if piece.isascii()]
    words = [word for word in words if word and _WORD.issuperset(word)]
    step = _AT_ONCE * max(1, len(words) // (_AT_ONCE * _MOST_CHUNKS))
    for at in range(0, len(words), step):
        yield "".join(words[at : at + _AT_ONCE])


def _with_added(tokenizer: Any) -> Iterator[str]:
    """Each added token between words, and at both ends of a text."""
    for token in tokenizer.get_added_tokens_decoder().values():
        yield f"{token.content}one{token.content} two\n{token.content}\n three {token.content}"
