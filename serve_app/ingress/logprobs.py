"""Log probabilities in OpenAI's two shapes.

Source: OpenAI's API reference, `logprobs` of "Completions" and of "Chat".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serve_app.types import TokenDelta, TokenLogprobs

Json = dict[str, Any]
Piece = Callable[[int], bytes]
"""A token's bytes; none for control tokens, which are left out."""


def of_chat(delta: TokenDelta, piece: Piece) -> Json:
    """A chat's: token by token."""
    return {
        "content": [
            _entry(piece(token), found.logprob)
            | {"top_logprobs": [_entry(piece(one), logprob) for one, logprob in found.top]}
            for token, found in _shown(delta, piece)
        ],
        "refusal": None,
    }


def _entry(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}


def of_text(delta: TokenDelta, piece: Piece, offset: int) -> Json:
    """A completion's: lists side by side. `offset` is the length of the tokens' text so far."""
    shown = _shown(delta, piece)
    tokens = [_text(piece(token)) for token, _ in shown]
    return {
        "tokens": tokens,
        "token_logprobs": [found.logprob for _, found in shown],
        "top_logprobs": [
            {_text(piece(one)): logprob for one, logprob in found.top} for _, found in shown
        ],
        "text_offset": [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))],
    }


def _shown(delta: TokenDelta, piece: Piece) -> list[tuple[int, TokenLogprobs]]:
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    return [(token, found) for token, found in pairs if piece(token)]


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")
