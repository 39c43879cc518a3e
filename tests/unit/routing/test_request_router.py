"""What the router sees of a call."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.routing.blocks import chain, request_key
from serve_app.routing.request_router import prompt_of
from serve_app.routing.score import Prompt
from serve_app.sampling import SamplingParams
from serve_app.types import GenerationRequest

TOKENS = tuple(range(70))
KEY = request_key("http")


@pytest.mark.parametrize(
    ("method", "args", "seen"),
    [
        pytest.param(
            "generate",
            (GenerationRequest("a.1", TOKENS, SamplingParams(max_tokens=9)),),
            Prompt(request_key("a.1"), 70, chain(TOKENS, ""), 9, "http", chain(TOKENS)),
            id="a prompt and the most that it may get",
        ),
        pytest.param(
            "generate",
            (GenerationRequest("a", TOKENS, cache_group="mine"),),
            Prompt(request_key("a"), 70, chain(TOKENS, "mine"), math.inf, "http", chain(TOKENS)),
            id="a prompt",
        ),
        pytest.param(
            "embed", (((1, 2), (3,)),), Prompt(KEY, 4, (), 0, "http"), id="texts to embed"
        ),
        pytest.param("explain", ("a",), Prompt(KEY, 1, (), 0, "http"), id="a question"),
        pytest.param("stats", (), Prompt(KEY, 1, (), 0, "http"), id="no argument"),
    ],
)
def test_calls(method: str, args: tuple[object, ...], seen: Prompt) -> None:
    metadata = SimpleNamespace(call_method=method, internal_request_id="http")
    pending: Any = SimpleNamespace(args=args, metadata=metadata)
    assert prompt_of(pending) == seen


def test_nothing_is_known_of_no_call() -> None:
    assert prompt_of(None) == Prompt(0)
