"""Turns a sequence's deltas into Anthropic's message: whole, or as server-sent events.

Source: Anthropic's API reference, "Messages" and "Streaming Messages".
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.base.errors import CorralError, FieldRefusedError, PromptTooLongError
from serve_app.base.values.answers import FinishReason, SequenceEnd, TokenDelta, Usage
from serve_app.prompt.conversation import json_object
from serve_app.prompt.output_parser import OutputParser
from serve_app.prompt.tool_calls import CallPiece, ToolCall
from serve_app.server.answering import streaming
from serve_app.server.answering.answers import ProtocolAnswer
from serve_app.server.http import sse
from serve_app.server.http.errors import ErrorShape, cut

Json = dict[str, Any]

_PING: Json = {"type": "ping"}


@dataclass
class MessageAnswer(ProtocolAnswer):
    id: str
    model: str
    n_prompt: int
    parser: OutputParser
    """Finds the reasoning in the text, and the tool calls where there are tools."""
    shows_reasoning: bool
    _blocks: list[Json] = field(default_factory=list)
    """The blocks that are complete."""
    _open: Literal["text", "thinking", "tool_use"] | None = None
    """The kind of the open block."""
    _pieces: list[str] = field(default_factory=list)
    """The open block's pieces so far."""
    _called: Json = field(default_factory=dict)
    """A call's block, but for its input."""

    def opening(self) -> list[Json]:
        """The events before any text. How much of the prompt was cached is told at the end."""
        usage = usage_body(Usage(self.n_prompt, 0, 0))
        return [{"type": "message_start", "message": self._message(None, usage)}, _PING]

    def waiting(self) -> list[Json]:
        return [_PING]

    def events(self, index: int, delta: TokenDelta) -> list[Json]:
        """The events of a delta. Those of the last delta tell the end."""
        events: list[Json] = []
        for part in streaming.parts(self.parser, delta):
            if isinstance(part, ToolCall | CallPiece):
                events += self._call(part)
            elif isinstance(part, str):
                events += self._add_text("text", part)
            elif self.shows_reasoning:
                events += self._add_text("thinking", part.text)
        if delta.end is not None:
            events += [
                *self._end_of_block(),
                {
                    "type": "message_delta",
                    "delta": self._stop(delta.end),
                    "usage": usage_body(delta.end.usage),
                },
                {"type": "message_stop"},
            ]
        return events

    def whole(self, sequences: Sequence[TokenDelta]) -> Json:
        end = sequences[0].end
        assert end is not None
        self.events(0, sequences[0])
        return self._message(end, usage_body(end.usage))

    def failure_event(self, error: CorralError) -> Json:
        return anthropic_error_body(error, error.status)

    def encode_event(self, event: Json) -> bytes:
        return sse.named_event(event)

    def _add_text(self, kind: Literal["text", "thinking"], text: str) -> list[Json]:
        opening: list[Json] = []
        if self._open != kind:
            opening = [*self._end_of_block(), self._start(_block(kind, ""))]
            self._open = kind
        self._pieces.append(text)
        return [*opening, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall | CallPiece) -> list[Json]:
        events: list[Json] = []
        if call.name is not None:
            events = self._end_of_block()
            named = {"id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}
            self._open, self._called = "tool_use", {"type": "tool_use", **named}
            events.append(self._start(self._called | {"input": {}}))
        if call.arguments:
            self._pieces.append(call.arguments)
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            events.append(self._delta(delta))
        return events

    def _end_of_block(self) -> list[Json]:
        """A thinking block is signed before it ends; nobody checks that here, so the signature is empty."""
        if self._open is None:
            return []
        signing = [self._delta({"type": "signature_delta", "signature": ""})]
        text = "".join(self._pieces)
        ended = (
            self._called | {"input": json_object(text) or {}}
            if self._open == "tool_use"
            else _block(self._open, text)
        )
        before = signing if self._open == "thinking" else []
        self._open = None
        self._pieces.clear()
        return [*before, self._end(ended)]

    def _start(self, block: Json) -> Json:
        return {"type": "content_block_start", "index": len(self._blocks), "content_block": block}

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


def _block(kind: Literal["text", "thinking"], text: str) -> Json:
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error_body(error: CorralError, status: int) -> Json:
    """Anthropic's error object. Source: Anthropic's API reference, "Errors"."""
    otherwise = "invalid_request_error" if status < 500 else "api_error"
    kind = _ERROR_TYPES.get(status, otherwise)
    message = error.message
    if isinstance(error, PromptTooLongError):  # agents that see these words compact their history
        n_prompt, n_ctx = error.details["n_prompt_tokens"], error.details["n_ctx"]
        message = f"prompt is too long: {n_prompt} tokens > {n_ctx - 1} maximum. {error.hint}"
    body: Json = {"type": kind, "message": cut(message)}
    if isinstance(error, FieldRefusedError):
        body["details"] = dict(error.details)
    return {"type": "error", "error": body}


ERRORS = {"/v1/messages/": ErrorShape(anthropic_error_body)}


def usage_body(usage: Usage) -> Json:
    """Anthropic's `usage`, whose `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
