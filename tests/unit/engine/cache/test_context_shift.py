"""A context that is full: the oldest tokens make room, if that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.base.values.answers import FinishReason
from serve_app.base.values.requests import GenerationRequest
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import ask, endless, options, request, running

PROMPT = "abcdefgh"


def shifted(name: str, n_tokens: int, **changed: Any) -> GenerationRequest:
    one = request(name, PROMPT, max_tokens=n_tokens)
    return replace(one, **({"context_shift": True} | changed))


def expected(n_tokens: int, n_keep: int, n_ctx_slot: int = 64) -> tuple[list[int], list[int]]:
    """What is said, and what the slot holds at the end."""
    tokens, said = list(PROMPT.encode()), list[int]()
    while len(said) < n_tokens:
        if len(tokens) >= n_ctx_slot:
            n_discard = (len(tokens) - 1 - n_keep + 1) // 2
            del tokens[n_keep : n_keep + n_discard]
        tokens.append(endless(tokens))
        said.append(tokens[-1])
    return said, tokens


@pytest.mark.parametrize("can_shift", [True, False])
@pytest.mark.parametrize(
    ("asked", "configured", "n_keep"),
    [(None, 0, 1), (5, 0, 5), (None, 5, 5), (0, 5, 1), (-1, 0, 8), (None, -1, 8), (999, 0, 60)],
)
def test_the_first_tokens_stay(
    asked: int | None, configured: int, n_keep: int, can_shift: bool
) -> None:
    backend = FakeBackend(endless, n_slots=1)
    backend.can_shift = can_shift
    with running(backend, options(1, n_keep=configured)) as engine:
        inbox = ask(engine, shifted("a", 150, n_keep=asked))
        said, slot = expected(150, n_keep)
        assert inbox.token_ids == said
        assert inbox.end.reason == FinishReason.LENGTH
        assert inbox.end.usage.completion_tokens == 150
        assert engine.stats().requests.context_shifts > 0
        # Moved cells are not what their tokens would give: of them, others get only what was kept.
        kept = slot[:n_keep] if can_shift else slot[:-1]
        assert backend.slots[0] == kept
        follower = ask(engine, replace(request("b"), prompt=(*slot[:40], 1, 2)))
        assert follower.end.usage.cached_tokens == min(len(kept), 40)


@pytest.mark.parametrize(
    ("configured", "asked", "max_tokens", "n_said"),
    [
        (False, None, 150, 56),
        (True, None, 150, 150),
        (True, False, 150, 56),
        (True, None, None, 56),
        (False, True, None, 56),
    ],
)
def test_who_decides(
    configured: bool, asked: bool | None, max_tokens: int | None, n_said: int
) -> None:
    """Without max_tokens it might never end: then a full context ends it."""
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, options(1, context_shift=configured)) as engine:
        one = replace(request("a", PROMPT, max_tokens=max_tokens), context_shift=asked)
        inbox = ask(engine, one)
        assert len(inbox.token_ids) == n_said
        assert inbox.end.reason == FinishReason.LENGTH


def test_a_context_too_short_to_shift_ends() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, options(1, n_ctx_slot=7)) as engine:
        inbox = ask(engine, replace(shifted("a", 50), prompt=(97, 98)))
        assert len(inbox.token_ids) == 5
