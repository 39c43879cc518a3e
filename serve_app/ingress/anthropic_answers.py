"""A sequence's deltas as Anthropic's message: whole, or as server-sent events.

Source: Anthropic's API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.ingress import chats, sse
from serve_app.ingress.errors import anthropic_error_body
from serve_app.ingress.generation import Deltas
from serve_app.prompt.answer import AnswerParser
from serve_app.prompt.tool_calls import ToolCall
from serve_app.types import FinishReason, SequenceEnd, TokenDelta, Usage

Json = dict[str, Any]


@dataclass
class MessageAnswer:
    """One message on its way."""

    id: str
    model: str
    n_prompt: int
    parser: AnswerParser
    """Finds the tool calls in the text, where there are tools."""
    _blocks: list[Json] = field(default_factory=list)
    """Those that are complete."""
    _text: list[str] = field(default_factory=list)
    """The pieces of the text block that is not; empty if there is none."""

    def opening(self) -> list[Json]:
        """The events before any text. How much of the prompt was cached is told at the end."""
        usage = usage_body(Usage(self.n_prompt, 0, 0))
        return [{"type": "message_start", "message": self._message(None, usage)}, {"type": "ping"}]

    def events(self, delta: TokenDelta) -> list[Json]:
        """One delta's events; the last one's tell the end."""
        events: list[Json] = []
        for part in chats.split(self.parser, delta):
            events += self._said(part) if isinstance(part, str) else self._called(part)
        if delta.end is not None:
            events += [
                *self._end_of_text(),
                {
                    "type": "message_delta",
                    "delta": self._stop(delta.end),
                    "usage": usage_body(delta.end.usage),
                },
                {"type": "message_stop"},
            ]
        return events

    def whole(self, end: SequenceEnd) -> Json:
        """The message, when all of its events were made."""
        return self._message(end, usage_body(end.usage))

    def _said(self, text: str) -> list[Json]:
        opening = [] if self._text else [self._start({"type": "text", "text": ""})]
        self._text.append(text)
        return [*opening, self._delta({"type": "text_delta", "text": text})]

    def _called(self, call: ToolCall) -> list[Json]:
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}
        return [
            *self._end_of_text(),
            self._start(block | {"input": {}}),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            self._end(block | {"input": json.loads(call.arguments)}),
        ]

    def _end_of_text(self) -> list[Json]:
        if not self._text:
            return []
        text = "".join(self._text)
        self._text.clear()
        return [self._end({"type": "text", "text": text})]

    def _start(self, block: Json) -> Json:
        return {
            "type": "content_block_start",
            "index": len(self._blocks),
            "content_block": block,
        }

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _end(self, block: Json) -> Json:
        self._blocks.append(block)
        return {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _message(self, end: SequenceEnd | None, usage: Json) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._blocks),
            **self._stop(end),
            "usage": usage,
        }

    def _stop(self, end: SequenceEnd | None) -> Json:
        reason = None
        if end is not None:
            reason = "max_tokens" if end.reason == FinishReason.LENGTH else "end_turn"
            if end.stop is not None:
                reason = "stop_sequence"
            elif reason == "end_turn" and any(b["type"] == "tool_use" for b in self._blocks):
                reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": end.stop if end else None}


def usage_body(usage: Usage) -> Json:
    """Anthropic's `usage`, whose `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


async def collect(answer: MessageAnswer, deltas: Deltas) -> Json:
    """Read the sequence to its end."""
    found: SequenceEnd | None = None
    async for _, delta in deltas:
        answer.events(delta)
        found = delta.end
    assert found is not None
    return answer.whole(found)


def events(answer: MessageAnswer, deltas: Deltas) -> AsyncIterator[str]:
    """The sequence as server-sent events. A failure on the way is the last of them."""
    return sse.events(
        deltas,
        lambda _, delta: answer.events(delta),
        lambda error: anthropic_error_body(error, error.status),
        opening=answer.opening(),
        write=sse.named,
    )
