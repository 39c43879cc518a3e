"""A sequence's deltas as OpenAI's answers: whole, or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app import __version__
from serve_app.errors import CorralError
from serve_app.ingress.errors import error_body
from serve_app.prompt.tool_calls import HermesParser, ToolCall
from serve_app.types import FinishReason, SequenceEnd, TokenDelta, Usage

Json = dict[str, Any]


@dataclass
class Answer:
    """One answer on its way: which endpoint asked, which model speaks."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    parser: HermesParser | None = None
    """Finds the tool calls in the text, where there are tools."""
    created: int = field(default_factory=lambda: int(time.time()))
    _n_calls: int = 0

    def whole(self, text: str, end: SequenceEnd) -> Json:
        """The answer to a request without `stream`."""
        parts = self._split(TokenDelta(text, (), end))
        content: Json = {"text": text} if self.kind == "text" else {"message": _message(parts)}
        object_name = "chat.completion" if self.kind == "chat" else "text_completion"
        return self._envelope(object_name, [self._choice(content, end)]) | {
            "usage": usage_body(end.usage)
        }

    def opening(self) -> Json | None:
        """The chunk before any text: a chat's says who speaks."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def chunks(self, delta: TokenDelta) -> list[Json]:
        """One delta's chunks; none if there is nothing to tell yet. The last one tells the end."""
        parts = self._split(delta)
        if self.kind == "text":
            contents = [{"text": part} for part in parts] or [{"text": ""}]
        else:
            contents = [
                {"delta": part if isinstance(part, dict) else {"content": part}} for part in parts
            ]
            contents = contents or [{"delta": {}}]
        if not parts and delta.end is None:
            return []
        *others, last = contents
        return [*(self._chunk(content, None) for content in others), self._chunk(last, delta.end)]

    def _split(self, delta: TokenDelta) -> list[str | Json]:
        """The delta's text as prose and calls, each call in OpenAI's shape."""
        if self.parser is None:
            return [delta.text] if delta.text else []
        parts = self.parser.feed(delta.text)
        if delta.end is not None:
            parts += self.parser.finish()
        return [part if isinstance(part, str) else self._call(part) for part in parts]

    def _call(self, call: ToolCall) -> Json:
        self._n_calls += 1
        return {
            "tool_calls": [
                {
                    "index": self._n_calls - 1,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ]
        }

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
        if reason == FinishReason.STOP and self._n_calls:
            reason = "tool_calls"
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


def _message(parts: list[str | Json]) -> Json:
    """A whole answer's message. A stream's chunks number their calls, a message does not."""
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [call for part in parts if isinstance(part, dict) for call in part["tool_calls"]]
    for call in calls:
        del call["index"]
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


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
            for chunk in answer.chunks(delta):
                yield _event(chunk)
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
