"""The requests of `loadtests.compare`'s users: prompts, in bodies that each kind of server understands."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

from loadtests.engine.bare_loop import BareModel
from serve_app.cli.measure.benchmark import SEED, Prompt

MAX_TOKENS = 64
WORKLOADS = {"shared": (512, 32), "independent": (0, 128)}
"""Tokens of a prompt: those that all users share, and each one's own."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of prompts, and the tokens that would end an answer."""

    tokens: Mapping[int, str]
    """Tokens that are a blank and letters, with their texts: one after the other, in whatever order, they
    are tokenized as these tokens again, so that a prompt is as long as text as it is as ids."""
    eog: Sequence[int]
    """Every token that ends a generation."""


def read_words(path: str | os.PathLike[str]) -> Words:
    """The words of a GGUF file's vocabulary. Raises ValueError if it has none."""
    with BareModel(path, vocab_only=True) as model:
        pieces = {token: _piece(model, token) for token in range(model.n_vocab)}
        words = {
            token: piece.decode()
            for token, piece in pieces.items()
            if piece[:1] == b" " and piece[1:].isalpha() and _tokens(model, piece) == [token]
        }
        if not words:
            raise ValueError(f"No token of {path} is a blank and a word.")
        return Words(words, model.eog)


def tokenized(path: str | os.PathLike[str], text: str) -> list[int]:
    """A text as tokens of a GGUF file's vocabulary, without any before or behind it."""
    with BareModel(path, vocab_only=True) as model:
        return _tokens(model, text.encode())


def seed(number: int, workload: str, users: int) -> str:
    """The seed of the prompts of a round's burst."""
    return f"{SEED} {number} {workload} {users}"


def draw_prompts(vocabulary: Sequence[int], number: int, workload: str, users: int) -> list[Prompt]:
    """The prompts of a round's burst, one for each user: the same whenever they are asked for."""
    rng = random.Random(seed(number, workload, users))
    n_shared, n_own = WORKLOADS[workload]
    shared = rng.choices(vocabulary, k=n_shared)
    return [(*shared, *rng.choices(vocabulary, k=n_own)) for _ in range(users)]


def request(prompt: Prompt, number: int) -> dict[str, Any]:
    """The body that a user sends, understood alike by Corral and llama-server, with sampling as they
    default."""
    return {"prompt": prompt, "ignore_eos": True} | _common(number)


def openai_request(prompt: Prompt, number: int, words: Words, model: str) -> dict[str, Any]:
    """The same for any OpenAI server, which need not take token ids or know `ignore_eos`."""
    return {
        "model": model,
        "prompt": "".join(words.tokens[token] for token in prompt),
        "logit_bias": {str(token): -100 for token in words.eog},
    } | _common(number)


def _common(number: int) -> dict[str, Any]:
    return {
        "max_tokens": MAX_TOKENS,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _piece(model: BareModel, token: int) -> bytes:
    """A token's text; nothing for one that controls, or whose text is longer than any word's."""
    buffer = ctypes.create_string_buffer(64)
    n = llama_cpp.llama_token_to_piece(model.vocab, token, buffer, len(buffer), 0, False)
    return buffer.raw[: max(0, n)]


def _tokens(model: BareModel, text: bytes) -> list[int]:
    tokens = (llama_cpp.llama_token * max(64, len(text)))()
    n = llama_cpp.llama_tokenize(model.vocab, text, len(text), tokens, len(tokens), False, False)
    return list(tokens[: max(0, n)])
