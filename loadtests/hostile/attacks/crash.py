"""Texts that end the process that tokenizes them.

llama.cpp splits texts with std::regex for vocabularies that it has no code of its own for, which recurses
once for each character of a run: 30,000 times `a` is a segmentation fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from loadtests.hostile import bodies
from loadtests.hostile.attack import KEYLESS, Attack, Bars
from loadtests.hostile.scene import CUT, Scene, Shot
from loadtests.hostile.setups import PRE_TOKENIZERS

CHARACTERS = ("a", " ", "\n", "-", "中")
LENGTHS = (30_000, 60_000, 1_000_000)
NOT_SUPPORTED = 501
"""The status of a model that never supports this, such as one without tokens for infills."""

Frame = Callable[[str], Any]
"""A request's fields around a text."""


def _chat(role: str, text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": text, **more}, {"role": "user", "content": "a"}]


def _call(text: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"q": text}, ensure_ascii=False)
    function = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ]


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROUTES: dict[str, tuple[tuple[str, Frame], ...]] = {
    "prompt": (
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/completion", lambda text: {"prompt": [1, text]}),
        ("/infill", lambda text: {"input_prefix": text, "input_suffix": "a"}),
    ),
    "chat": (
        ("/v1/chat/completions", lambda text: {"messages": _chat("user", text)}),
        ("/v1/chat/completions", lambda text: {"messages": _chat("system", text)}),
        ("/v1/messages", lambda text: {"messages": _chat("user", text)[:1]}),
        ("/v1/messages/count_tokens", lambda text: {"messages": _chat("user", text)[:1]}),
        ("/v1/responses", lambda text: {"input": text}),
    ),
    "tool arguments": (
        ("/v1/chat/completions", lambda text: {"messages": _call(text), "tools": [_TOOL]}),
        (
            "/v1/chat/completions",
            lambda text: {"messages": _chat("assistant", "a", reasoning_content=text)},
        ),
        (
            "/v1/chat/completions",
            lambda text: {"messages": _chat("user", "a"), "chat_template_kwargs": {"a": text}},
        ),
    ),
    "tokenize": (("/tokenize", lambda text: {"content": text}),),
    "embeddings": (
        ("/v1/embeddings", lambda text: {"input": ["a", text]}),
        ("/embedding", lambda text: {"content": text}),
        ("/v1/rerank", lambda text: {"query": text, "documents": [text]}),
    ),
    "stop and grammar": (
        ("/v1/completions", lambda text: {"prompt": "a", "stop": [text]}),
        ("/v1/completions", lambda text: {"prompt": "a", "grammar": f'root ::= "{text}"'}),
        ("/v1/completions", lambda text: {"prompt": "a", "json_schema": {"const": text}}),
    ),
}


def shots(routes: tuple[tuple[str, Frame], ...]) -> Iterator[Shot]:
    """Every run on every one of these routes and models, the shortest first."""
    for length in LENGTHS:
        for model in PRE_TOKENIZERS:
            for path, frame in routes:
                for character in CHARACTERS:
                    yield Shot(path, _body(frame, model, character, length))


def _body(frame: Frame, model: str, character: str, length: int) -> bytes:
    def framed(text: str) -> Any:
        limit = {"max_tokens": 1} if path_takes_limit(frame("a")) else {}
        return {"model": model, **limit, **frame(text)}

    return bodies.run_of(character, length, framed)


def path_takes_limit(body: Any) -> bool:
    """Whether the endpoint that takes such a body has `max_tokens`."""
    return "messages" in body or "prompt" in body


def _crash(scene: Scene, routes: tuple[tuple[str, Frame], ...]) -> None:
    """All of them; and the first that failed twice more, as then it must be told why."""
    killer: Shot | None = None
    for shot in shots(routes):
        if not scene.left_s():
            return
        if _failed(scene, shot) and killer is None:
            killer = shot
            _failed(scene, shot)
            if _failed(scene, shot):
                scene.found("a text that failed twice is sent again, and fails again")


def _failed(scene: Scene, shot: Shot) -> bool:
    """Whether this gets no answer, or one that says nothing of what is wrong with it."""
    status = scene.post(shot.path, shot.body).status
    return bool(scene.left_s()) and (status == CUT or (status >= 500 and status != NOT_SUPPORTED))


ATTACKS = tuple(
    Attack(
        name=f"runs of one character: {name}",
        family="crash",
        what="Texts of 30,000 to 1,000,000 times the same character, for vocabularies that llama.cpp "
        "splits with std::regex.",
        expects="Costs its own request; no process that serves others dies.",
        act=partial(_crash, routes=routes),
        server=KEYLESS,
        seconds=15.0,
        bars=Bars(),
        is_short=name == "prompt",
    )
    for name, routes in ROUTES.items()
)
