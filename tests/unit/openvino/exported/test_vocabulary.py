"""Vocabularies by tokenizer.json."""

from __future__ import annotations

from typing import Any

import pytest
from gguf import TokenType

from serve_app.errors import ConfigError
from serve_app.openvino.exported.vocabulary import LLAMA3, QWEN2, read


def of_bytes(pattern: str, **model: object) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], **model},
        "added_tokens": [
            {"id": 3, "content": "<|im_end|>", "special": True},
            {"id": 4, "content": "<think>", "special": False},
            {"id": 5, "content": "<|fim|>", "special": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
    }


def of_characters() -> dict[str, Any]:
    vocab = {"<unk>": 0, "<0x41>": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6}
    return {
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": vocab,
            "merges": [["a", "b"], ["▁", "ab"], ["▁a", "b"]],
        },
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
    }


@pytest.mark.parametrize(
    ("pattern", "ignores", "cut"),
    [(QWEN2, False, "qwen2"), (LLAMA3, True, "llama-bpe"), (LLAMA3, False, "smaug-bpe")],
)
def test_the_cut_is_found_by_its_expression(pattern: str, ignores: bool, cut: str) -> None:
    found = read(of_bytes(pattern, ignore_merges=ignores), 8)
    assert (found.kind, found.cut, found.composes) == ("gpt2", cut, False)


def test_places_without_a_token_are_filled() -> None:
    found = read(of_bytes(QWEN2) | {"normalizer": {"type": "NFC"}}, 8)
    expected = ["a", "b", "ab", "<|im_end|>", "<think>", "<|fim|>", "[PAD6]", "[PAD7]"]
    assert found.tokens == expected
    assert found.types == [
        *[TokenType.NORMAL] * 3,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.CONTROL,
        *[TokenType.UNUSED] * 2,
    ]
    assert found.composes


def test_scores_stand_for_the_order_of_merges() -> None:
    found = read(of_characters(), 7)
    assert (found.kind, found.adds_space) == ("llama", True)
    scores = dict(zip(found.tokens, found.scores, strict=True))
    assert scores["ab"] > scores["▁ab"] > scores["a"]
    assert found.types[:3] == [TokenType.UNKNOWN, TokenType.BYTE, TokenType.NORMAL]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ({"model": {"type": "Unigram"}}, "of the kind Unigram"),
        ({}, "of the kind None"),
        (of_bytes("[a-z]+"), r"cuts texts in a way that is not known: \[a-z\]\+"),
        (of_bytes(QWEN2) | {"pre_tokenizer": {"type": "ByteLevel"}}, "not known: ByteLevel"),
        (of_bytes(QWEN2) | {"normalizer": {"type": "NFKC"}}, "changes texts .*NFKC"),
        (of_characters() | {"normalizer": {"type": "NFKC"}}, "changes texts .*NFKC"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tokenizer: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tokenizer, 10)


def test_more_tokens_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 4 tokens"):
        read(of_bytes(QWEN2), 4)
