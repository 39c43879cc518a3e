"""The vocabulary as llguidance sees it, whose forced texts are tokenized in short pieces.

Source: llguidance's `lltokenizer_from_vocab`, but for the pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import llama_cpp
from llguidance import LLTokenizer

MAX_PIECE_BYTES = 4096
"""Longest text that llama.cpp tokenizes at once here. For some vocabularies it recurses once per character,
and a thread's stack ends at some 30,000 of them. What a grammar forces may be longer."""

_TOKENIZE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)


def _tokenize(
    vocab: int,
    text: int,
    n_bytes: int,
    tokens: Any,
    capacity: int,
    add_special: bool,
    parse_special: bool,
) -> int:
    """llama_tokenize, piece by piece: the number of tokens, or minus the capacity that they need."""
    ids: list[int] = []
    for piece in byte_pieces(ctypes.string_at(text, n_bytes)):
        room = (llama_cpp.llama_token * (len(piece) + 2))()
        n = llama_cpp.llama_tokenize(
            vocab, piece, len(piece), room, len(room), add_special and not ids, parse_special
        )
        ids += room[: max(0, n)]
    if len(ids) > capacity:
        return -len(ids)
    for i, token in enumerate(ids):
        tokens[i] = token
    return len(ids)


# Kept at module level: llguidance holds a bare pointer.
_callback = _TOKENIZE(_tokenize)


def byte_pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces of MAX_PIECE_BYTES at most, cut between characters of UTF-8."""
    start = 0
    while start < len(text):
        most = start + MAX_PIECE_BYTES
        end = most
        while start < end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        end = end if end > start else most  # no UTF-8
        yield text[start:end]
        start = end


def grammar_tokenizer(vocab: Any, n_vocab: int, eog_tokens: Sequence[int]) -> LLTokenizer:
    """The vocabulary for llguidance, as long as `vocab` lives. Takes a second for a large one."""
    tokenizer: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
        tokens=[_bytes_of_token(vocab, token) for token in range(n_vocab)],
        vocab_ptr=vocab,
        tokenize_fptr=ctypes.cast(_callback, ctypes.c_void_p).value,
        eos_token=list(eog_tokens) or llama_cpp.llama_vocab_eos(vocab),
        slices=None,
    )
    return tokenizer


def _bytes_of_token(vocab: Any, token: int) -> bytes:
    """The token's bytes; behind 0xff, if it is no text."""
    size = 32
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, True)
        if n >= 0:
            break
        size = -n
    text = buffer.raw[:n]
    kind = llama_cpp.llama_vocab_get_attr(vocab, token)
    return b"\xff" + text if is_delimiter(kind, text) else text


def is_delimiter(kind: int, text: bytes) -> bool:
    """Whether a token of this kind, written so, is no text for grammars."""
    in_brackets = text.startswith(b"<") and text.endswith(b">")
    return bool(
        kind & llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        or (kind & llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED and in_brackets)
    )
