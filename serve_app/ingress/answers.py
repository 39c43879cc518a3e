"""A sequence's deltas as OpenAI's answers: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app import __version__
from serve_app.errors import CorralError
from serve_app.ingress.errors import error_body
from serve_app.types import SequenceEnd, TokenDelta, Usage

Json = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The shape of one answer: which endpoint asked, which model speaks."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, end: SequenceEnd) -> Json:
        """The answer to a request without `stream`."""
        content = (
            {"message": {"role": "assistant", "content": text}}
            if self.kind == "chat"
            else {"text": text}
        )
        object_name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._envelope(object_name, [self._choice(content, end)]) | {
            "usage": usage_body(end.usage)
        }

    def opening(self) -> Json | None:
        """The chunk before any text: a chat's says who speaks."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def part(self, delta: TokenDelta) -> Json | None:
        """One delta's chunk; None if there is nothing to tell yet."""
        if not delta.text and delta.end is None:
            return None
        if self.kind == "text":
            return self._chunk({"text": delta.text}, delta.end)
        content = {"content": delta.text} if delta.text else {}
        return self._chunk({"delta": content}, delta.end)

    def usage(self, usage: Usage) -> Json:
        """The chunk that `stream_options.include_usage` asks for."""
        return self._envelope(self._chunk_name, []) | {"usage": usage_body(usage)}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(self, content: Json, end: SequenceEnd | None) -> Json:
        return self._envelope(self._chunk_name, [self._choice(content, end)])

    def _choice(self, content: Json, end: SequenceEnd | None) -> Json:
        reason = None if end is None else end.reason.value
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _envelope(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"corral-{__version__}",
            "choices": choices,
        }


def usage_body(usage: Usage) -> Json:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


async def collect(answer: Answer, deltas: AsyncIterator[TokenDelta]) -> Json:
    """Read a sequence to its end."""
    texts = []
    async for delta in deltas:
        texts.append(delta.text)
        if delta.end is not None:
            return answer.whole("".join(texts), delta.end)
    raise CorralError("The engine's stream ended without an end.")


async def events(
    answer: Answer, deltas: AsyncIterator[TokenDelta], *, include_usage: bool
) -> AsyncIterator[str]:
    """A sequence as server-sent events. A failure on the way is the last event, in the shape of an
    error; only a complete answer ends with [DONE]."""
    try:
        if (opening := answer.opening()) is not None:
            yield _event(opening)
        async for delta in deltas:
            if (part := answer.part(delta)) is not None:
                yield _event(part)
            if delta.end is not None:
                if include_usage:
                    yield _event(answer.usage(delta.end.usage))
                yield "data: [DONE]\n\n"
                return
        raise CorralError("The engine's stream ended without an end.")
    except CorralError as error:
        yield _event(error_body(error))


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
