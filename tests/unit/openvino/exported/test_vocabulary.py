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
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    return {
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {token: place for place, token in enumerate(tokens)},
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
    found = read(of_characters(), 262)
    assert (found.kind, found.adds_space) == ("llama", True)
    scores = dict(zip(found.tokens, found.scores, strict=True))
    assert scores["ab"] > scores["▁ab"] > scores["a"]
    expected = [TokenType.UNKNOWN, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 5]
    assert found.types == expected


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        ({"model": {"type": "Unigram"}}, "of the kind Unigram"),
        ({}, "of the kind None"),
        (of_bytes("[a-z]+"), r"cuts texts in a way that is not known: \[a-z\]\+"),
        (of_bytes(QWEN2) | {"pre_tokenizer": {"type": "ByteLevel"}}, "not known: ByteLevel"),
        (of_bytes(QWEN2) | {"normalizer": {"type": "NFKC"}}, "changes texts .*NFKC"),
        (of_characters() | {"normalizer": {"type": "NFKC"}}, "changes texts .*NFKC"),
        (of_bytes(QWEN2, end_of_word_suffix="</w>"), "has a end_of_word_suffix"),
        (of_bytes(QWEN2, vocab={"a": -1}), "a token below 0"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tokenizer: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tokenizer, 300)


def test_more_tokens_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than 4 tokens"):
        read(of_bytes(QWEN2), 4)


def test_what_llama_cpp_would_end_the_process_for_is_refused() -> None:
    tokenizer = of_characters()
    del tokenizer["model"]["vocab"]["<0x7F>"]
    with pytest.raises(ConfigError, match="has no token <0x7F>"):
        read(tokenizer, 300)
    with pytest.raises(ConfigError, match="two tokens of its tokenizer have one name"):
        read(of_bytes(QWEN2, vocab={"a": 0, "[PAD9]": 1}), 10)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": "BPE"},
        of_bytes(QWEN2, vocab=None),
        of_bytes(QWEN2, vocab={"a": "b"}),
        of_bytes(QWEN2) | {"added_tokens": [{"id": 3}]},
        of_bytes(QWEN2) | {"pre_tokenizer": "Split"},
        of_characters() | {"normalizer": {"normalizers": [{}]}},
    ],
)
def test_another_form_is_refused(tokenizer: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"its tokenizer\.json is not as an exporter writes it \(\w+: "
    ):
        read(tokenizer, 300)


def test_more_tokens_than_memory_has_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="says that it has 1000000000 tokens"):
        read(of_bytes(QWEN2), 10**9)
