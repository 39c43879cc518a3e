"""The API over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from serve_app.engine.fake import FakeVocabulary
from serve_app.errors import InvalidRequestError
from serve_app.types import (
    FinishReason,
    GenerationRequest,
    ReplicaStats,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)

N_CTX_SLOT = 64
END = SequenceEnd(FinishReason.STOP, Usage(5, 2, 3), Timings(0, 0, 0))
HELLO = [TokenDelta("Hel", (1,)), TokenDelta("", (2,)), TokenDelta("lo", (3,), END)]


def said(message: dict[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    called = [f"{call['name']}{call['arguments']}" for call in calls]
    return "".join([message["content"], *called])


class ByteTokenizer:
    """One token for each byte; a chat is its contents joined."""

    n_vocab = FakeVocabulary.n_vocab

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[int, ...]:
        if messages[0]["content"] == "refuse":
            raise InvalidRequestError("The template refuses.", "messages")
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        return self.encode(names + "|".join(f"{m['role']}:{said(m)}" for m in messages))


class ScriptedEngine:
    """Yields a script, exceptions in it raised, and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: list[TokenDelta | Exception] = list(HELLO)
        self.requests: list[GenerationRequest] = []
        self.left_early = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        self.requests.append(request)
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                yield item
        except GeneratorExit:
            self.left_early = True
            raise

    async def stats(self) -> list[ReplicaStats]:
        return [ReplicaStats("r1", "n1", {"n_slots": 4})]


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    bodies = [line.removeprefix("data: ") for line in lines]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]
