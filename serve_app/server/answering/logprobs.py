"""Log probabilities in OpenAI's two shapes.

Source: OpenAI's API reference, `logprobs` of "Completions" and of "Chat".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from serve_app.base.values.answers import TokenDelta, TokenLogprobs

Json = dict[str, Any]


class Piece(Protocol):
    """The written form of a token."""

    def __call__(self, token: int, *, special: bool = False) -> bytes:
        """A token's bytes; none for control tokens, unless `special`."""


def of_chat(delta: TokenDelta, piece: Piece, *, shares: bool = False) -> Json:
    """A chat's: token by token, without control tokens; `shares` as for `entries`."""
    return {
        "content": entries(_visible_logprobs(delta, piece), piece, shares=shares),
        "refusal": None,
    }


def entries(
    tokens: Iterable[tuple[int, TokenLogprobs]],
    piece: Piece,
    *,
    shares: bool,
    with_ids: bool = False,
) -> list[Json]:
    """Each token with its log probability, and the likeliest ones; or, with `shares`, their probabilities,
    as llama-server tells what was drawn from."""

    def entry(token: int, logprob: float) -> Json:
        written = piece(token)
        named = {"id": token} if with_ids else {}
        likelihood = {"prob": math.exp(logprob)} if shares else {"logprob": logprob}
        return {**named, "token": _piece_text(written), **likelihood, "bytes": list(written)}

    top = "top_probs" if shares else "top_logprobs"
    return [
        entry(token, found.logprob) | {top: [entry(*likely) for likely in found.top]}
        for token, found in tokens
    ]


def of_text(delta: TokenDelta, piece: Piece, offset: int, *, every: bool = False) -> Json:
    """A completion's: lists side by side. `offset` is the length of the tokens' text so far. Control tokens
    are left out, unless `every` token is told."""
    shown = (
        list(zip(delta.token_ids, delta.logprobs, strict=True))
        if every
        else _visible_logprobs(delta, piece)
    )
    sizes = (len(_piece_text(piece(token))) for token, _ in shown)
    return {
        "tokens": [_piece_text(piece(token, special=True)) for token, _ in shown],
        "token_logprobs": [found.logprob for _, found in shown],
        "top_logprobs": [_top(found, piece) for _, found in shown],
        "text_offset": list(accumulate(sizes, initial=offset))[:-1],
    }


def n_chars(delta: TokenDelta, piece: Piece) -> int:
    """How far the delta's tokens move `offset` on."""
    return sum(len(_piece_text(piece(token))) for token in delta.token_ids)


def of_prompt(
    prompt: Sequence[int], tokens: Sequence[TokenLogprobs], piece: Piece, echo: str
) -> Json:
    """A prompt's, all of its tokens, in the same shape; `echo` is what it is shown as. Nothing comes before
    the first token, so nothing says how likely it was."""
    return {
        "tokens": [_piece_text(piece(token, special=True)) for token in prompt],
        "token_logprobs": [None, *(token.logprob for token in tokens)],
        "top_logprobs": [None, *(_top(token, piece) for token in tokens)],
        "text_offset": _offsets(prompt, piece, echo),
    }


def _offsets(prompt: Sequence[int], piece: Piece, echo: str) -> list[int]:
    """The offsets where each token begins in the text. What is not there takes no room, as a BOS or a
    blank that the tokenizer put before it."""
    pieces = [piece(token) for token in prompt]
    data = b"".join(pieces)
    if data.decode(errors="replace") != echo:  # control tokens that were written out, or a blank
        pieces, data = [piece(token, special=True) for token in prompt], echo.encode()
    at, n_chars, offsets = 0, 0, []
    for written in pieces:
        offsets.append(n_chars)
        if not data.startswith(written, at):
            written = written.removeprefix(b" ")
        if data.startswith(written, at):
            at += len(written)
            n_chars += sum(byte & 0xC0 != 0x80 for byte in written)  # bytes that begin a character
    return offsets


def _top(logprobs: TokenLogprobs, piece: Piece) -> dict[str, float]:
    """The likeliest tokens by their texts: of tokens that are written alike, the likeliest."""
    top: dict[str, float] = {}
    for token, logprob in logprobs.top:
        top.setdefault(_piece_text(piece(token, special=True)), logprob)
    return top


def _visible_logprobs(delta: TokenDelta, piece: Piece) -> list[tuple[int, TokenLogprobs]]:
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    return [(token, found) for token, found in pairs if piece(token)]


def _piece_text(piece: bytes) -> str:
    return piece.decode(errors="replace")
