"""Turns a sequence's deltas into OpenAI's response: whole, or as server-sent events.

Source: OpenAI's API reference, "Responses" and its streaming events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.errors import CorralError
from serve_app.ingress.generation import chat
from serve_app.ingress.generation.generation import Deltas
from serve_app.ingress.http import sse
from serve_app.ingress.http.timings import Running, prompt_progress, timings
from serve_app.prompt.output_parser import OutputParser
from serve_app.prompt.tool_calls import ToolCall
from serve_app.types import FinishReason, SequenceEnd, TokenDelta, Usage

Json = dict[str, Any]


@dataclass
class ResponseAnswer:
    """One response on its way."""

    id: str
    model: str
    asked: Json
    """What it says of its request."""
    parser: OutputParser
    """Finds the tool calls in the text, where there are tools."""
    return_progress: bool = False
    timings_per_token: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _output: list[Json] = field(default_factory=list)
    """The items that are complete."""
    _message_id: str = ""
    """Of the message that is not; empty if there is none."""
    _text: list[str] = field(default_factory=list)
    """Its pieces."""
    _n_events: int = 0
    _running: Running = field(default_factory=Running)

    def opening(self) -> list[Json]:
        """The events before any text."""
        response = self._response("in_progress")
        return [
            self._event("created", response=response),
            self._event("in_progress", response=response),
        ]

    def events(self, delta: TokenDelta) -> list[Json]:
        """One delta's events; the last one's last tells the whole response. As at llama-server, the last of
        them tells the timings."""
        self._running.saw(delta)
        events = self._progress(delta) if self.return_progress else []
        events += self._news(delta)
        if self.timings_per_token and events:
            events[-1]["timings"] = timings(delta.end) if delta.end else self._running.told()
        return events

    def _progress(self, delta: TokenDelta) -> list[Json]:
        return [
            self._event("in_progress", response=self._response("in_progress"))
            | {"prompt_progress": prompt_progress(progress)}
            for progress in delta.progress
        ]

    def _news(self, delta: TokenDelta) -> list[Json]:
        events: list[Json] = []
        for part in chat.split(self.parser, delta):
            events += self._said(part) if isinstance(part, str) else self._called(part)
        if delta.end is not None:
            status = "incomplete" if delta.end.reason == FinishReason.LENGTH else "completed"
            events += self._end_of_message(status)
            response = self._response(status, end=delta.end)
            events.append(self._event(status, response=response))
        return events

    def failed(self, error: CorralError) -> Json:
        """The event that takes the place of the end."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        details = {"code": code, "message": error.message}
        return self._event("failed", response=self._response("failed", error=details))

    def _said(self, text: str) -> list[Json]:
        opening = [] if self._message_id else self._start_of_message()
        self._text.append(text)
        delta = self._event("output_text.delta", **self._place(), delta=text, logprobs=[])
        return [*opening, delta]

    def _start_of_message(self) -> list[Json]:
        self._message_id = f"msg_{uuid.uuid4().hex}"
        item = self._message("in_progress", [])
        return [
            self._event("output_item.added", output_index=len(self._output), item=item),
            self._event("content_part.added", **self._place(), part=_part("")),
        ]

    def _end_of_message(self, status: str) -> list[Json]:
        if not self._message_id:
            return []
        text = "".join(self._text)
        item = self._message(status, [_part(text)])
        events = [
            self._event("output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("content_part.done", **self._place(), part=_part(text)),
            self._event("output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._message_id = ""
        self._text.clear()
        return events

    def _called(self, call: ToolCall) -> list[Json]:
        ending = self._end_of_message("completed")
        index = len(self._output)
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"arguments": "", "status": "in_progress"}
        name = "function_call_arguments"
        return [
            *ending,
            self._event("output_item.added", output_index=index, item=begun),
            self._event(f"{name}.delta", **place, delta=call.arguments),
            self._event(f"{name}.done", **place, arguments=call.arguments),
            self._event("output_item.done", output_index=index, item=item),
        ]

    def _message(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> Json:
        """Where the open message's text is."""
        return {
            "item_id": self._message_id,
            "output_index": len(self._output),
            "content_index": 0,
        }

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._n_events += 1
        return {
            "type": f"response.{name}",
            "sequence_number": self._n_events - 1,
            **fields,
        }

    def _response(
        self, status: str, *, end: SequenceEnd | None = None, error: Json | None = None
    ) -> Json:
        """The response as it is now."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.asked,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status in ("completed", "incomplete") else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": cut,
            "max_tool_calls": None,
            "model": self.model,
            "output": list(self._output),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if end is None else usage_body(end.usage),
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_body(usage: Usage) -> Json:
    """The response's `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def collect(answer: ResponseAnswer, deltas: Deltas) -> Json:
    """Read the sequence to its end: the response is what the last event tells."""
    found: list[Json] = []
    async for _, delta in deltas:
        found = answer.events(delta)
    response: Json = found[-1]["response"]
    return response


def events(answer: ResponseAnswer, deltas: Deltas) -> AsyncIterator[bytes]:
    """The sequence as server-sent events; the last one tells the whole response, or what failed."""
    return sse.events(
        deltas,
        lambda _, delta: answer.events(delta),
        answer.failed,
        opening=answer.opening(),
        write=sse.named,
    )
