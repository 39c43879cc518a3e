"""Turns a sequence's deltas into OpenAI's response: whole, or as server-sent events.

Source: OpenAI's API reference, "Responses" and its streaming events.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from serve_app.errors import CorralError
from serve_app.ingress.generation import generation
from serve_app.ingress.http import sse
from serve_app.ingress.http.errors import unexpected
from serve_app.ingress.openai.timings import Running, prompt_progress, timings
from serve_app.ingress.responses.items import reasoning_fields
from serve_app.ingress.responses.log import Event
from serve_app.ingress.responses.tools import CallForm, forms
from serve_app.prompt.output_parser import OutputParser, Reasoning
from serve_app.prompt.tool_calls import CallPiece, ToolCall
from serve_app.types import FinishReason, SequenceEnd, TokenDelta, Usage

Json = dict[str, Any]

logger = logging.getLogger("corral.ingress")


@dataclass
class ResponseAnswer:
    """One response on its way."""

    id: str
    model: str
    asked: Json
    """The fields that it repeats of its request."""
    parser: OutputParser
    """Finds the reasoning in the text, and the tool calls where there are tools."""
    count: Callable[[str], int]
    """The number of tokens of a text."""
    return_progress: bool = False
    timings_per_token: bool = False
    obfuscates: bool = False
    """Whether pieces come with noise, so that their sizes do not show what they are."""
    created: int = field(default_factory=lambda: int(time.time()))
    status: str = ""
    _at: int = 0
    """Unix time of what came last."""
    _end: SequenceEnd | None = None
    _error: Json | None = None
    _n_items: int = 0
    _output: list[Json] = field(default_factory=list)
    """The items that are complete."""
    _message_id: str = ""
    """The id of the message that is not complete; empty if there is none."""
    _text: list[str] = field(default_factory=list)
    """The pieces of the open message or call."""
    _call: Json | None = None
    """The call that is not complete, without the fields that say what is called."""
    _reasoning_id: str = ""
    """The id of the reasoning that is not complete; empty if there is none."""
    _n_reasoning: int = 0
    _n_events: int = 0
    _running: Running = field(default_factory=Running)

    def __post_init__(self) -> None:
        self.forms = forms(self.asked["tools"])
        self._form = CallForm("function", "")
        self.status = "queued" if self.asked["background"] else "in_progress"

    def opening(self) -> list[Json]:
        """The events before any text."""
        response = self.whole()
        names = ["created", "queued"] if self.status == "queued" else ["created"]
        events = [self._event(name, response=response) for name in names]
        begun = response | {"status": "in_progress"}
        return [*events, self._event("in_progress", response=begun)]

    def take(self, entry: Event) -> list[Json]:
        """The events of what came of it."""
        self._at, self.status = int(entry.at), "in_progress"
        if isinstance(entry.what, TokenDelta):
            return self.events(entry.what)
        return [self._cancelled() if entry.what is None else self.failed(entry.what)]

    def events(self, delta: TokenDelta) -> list[Json]:
        """One delta's events; the last one's last tells the whole response. As at llama-server, the last of
        them tells the timings."""
        self._running.saw(delta)
        events = self._progress(delta) if self.return_progress else []
        events += self._news(delta)
        if delta.end is not None:
            events[-1]["timings"] = timings(delta.end)
        elif self.timings_per_token and events:
            events[-1]["timings"] = self._running.told()
        return events

    def _progress(self, delta: TokenDelta) -> list[Json]:
        return [
            self._event("in_progress", response=self.whole())
            | {"prompt_progress": prompt_progress(progress)}
            for progress in delta.progress
        ]

    def _news(self, delta: TokenDelta) -> list[Json]:
        events: list[Json] = []
        for part in generation.parts(self.parser, delta):
            if isinstance(part, Reasoning):
                events += self._thought(part.text)
            else:
                events += self._said(part) if isinstance(part, str) else self._called(part)
        if delta.end is not None:
            status = "incomplete" if delta.end.reason == FinishReason.LENGTH else "completed"
            events += self._end_of_items(status)
            self.status, self._end = status, delta.end
            # OpenAI's own client waits for that event, and llama-server sends no other: the status tells.
            events.append(self._event("completed", response=self.whole()))
        return events

    def failed(self, error: CorralError) -> Json:
        """The event that takes the place of the end."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.status, self._error = "failed", {"code": code, "message": error.message}
        return self._event("failed", response=self.whole())

    def _cancelled(self) -> Json:
        """OpenAI's clients know no event of that name; the response's status says it."""
        self.status = "cancelled"
        return self._event("incomplete", response=self.whole())

    def _said(self, text: str) -> list[Json]:
        opening: list[Json] = []
        if not self._message_id:
            opening = self._end_of_items("completed") + self._start_of_message()
        self._text.append(text)
        delta = self._event("output_text.delta", **self._place(), delta=text, logprobs=[])
        return [*opening, self._obfuscated(delta)]

    def _obfuscated(self, event: Json) -> Json:
        return event | sse.obfuscation(event["delta"]) if self.obfuscates else event

    def _new_id(self, kind: str) -> str:
        """The id of an item or a call: the same whoever computes this response."""
        self._n_items += 1
        digest = hashlib.blake2b(f"{self.id} {self._n_items}".encode(), digest_size=16)
        return f"{kind}_{digest.hexdigest()}"

    def _start_of_message(self) -> list[Json]:
        self._message_id = self._new_id("msg")
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

    def _called(self, call: ToolCall | CallPiece) -> list[Json]:
        events: list[Json] = []
        if call.name is not None:
            events = self._end_of_items("completed")
            events += self._start_of_call(call.name)
        if call.arguments:
            self._text.append(call.arguments)
            if self._form.kind == "function":
                name = "function_call_arguments.delta"
                delta = self._event(name, **self._call_place(), delta=call.arguments)
                events.append(self._obfuscated(delta))
        return events

    def _start_of_call(self, name: str) -> list[Json]:
        """The event that a call begins. Only a function's arguments are told as they come: all other tools
        have what they need only when the call is complete."""
        form = self._form = self.forms.get(name, CallForm("function", name))
        self._call = {
            "type": form.item_type,
            "id": self._new_id("ctc" if form.kind == "custom" else "fc"),
            "call_id": self._new_id("call"),
            "status": "in_progress",
        }
        item = self._call | form.fields("")
        return [self._event("output_item.added", output_index=len(self._output), item=item)]

    def _end_of_call(self, status: str) -> list[Json]:
        if self._call is None:
            return []
        text, form = "".join(self._text), self._form
        item = self._call | form.fields(text) | {"status": status}
        events: list[Json] = []
        if form.kind == "function":
            name = "function_call_arguments.done"
            events.append(self._event(name, **self._call_place(), arguments=text))
        elif form.kind == "custom":
            name, place = "custom_tool_call_input", self._call_place()
            delta = self._event(f"{name}.delta", **place, delta=item["input"])
            events.append(self._obfuscated(delta))
            events.append(self._event(f"{name}.done", **place, input=item["input"]))
        events.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._call = None
        self._text.clear()
        return events

    def _call_place(self) -> Json:
        """Where the open call is."""
        assert self._call is not None
        return {"item_id": self._call["id"], "output_index": len(self._output)}

    # -- reasoning ---------------------------------------------------------------------------------

    def _thought(self, text: str) -> list[Json]:
        opening: list[Json] = []
        if not self._reasoning_id:
            opening = self._end_of_items("completed")
            self._reasoning_id = self._new_id("rs")
            item = self._reasoning("in_progress", "")
            opening += [
                self._event("output_item.added", output_index=len(self._output), item=item),
                self._event("content_part.added", **self._place(), part=_thought_part("")),
            ]
        self._text.append(text)
        self._n_reasoning += self.count(text)
        delta = self._event("reasoning_text.delta", **self._place(), delta=text)
        return [*opening, self._obfuscated(delta)]

    def _end_of_reasoning(self, status: str) -> list[Json]:
        if not self._reasoning_id:
            return []
        text = "".join(self._text)
        item = self._reasoning(status, text)
        events = [
            self._event("reasoning_text.done", **self._place(), text=text),
            self._event("content_part.done", **self._place(), part=_thought_part(text)),
            self._event("output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._reasoning_id = ""
        self._text.clear()
        return events

    def _reasoning(self, status: str, text: str) -> Json:
        fields = reasoning_fields(text, is_sealed=True)
        return {"type": "reasoning", "id": self._reasoning_id, "status": status, **fields}

    # -- items and events ----------------------------------------------------------------------------

    def _end_of_items(self, status: str) -> list[Json]:
        """The events that end the open item, of whatever kind."""
        events = self._end_of_reasoning(status)
        events += self._end_of_message(status)
        return events + self._end_of_call(status)

    def _message(self, status: str, content: list[Json]) -> Json:
        return {
            "type": "message",
            "id": self._message_id,
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> Json:
        """Where the text of the open message or reasoning is."""
        return {
            "item_id": self._message_id or self._reasoning_id,
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

    def whole(self) -> Json:
        """The response as it is now."""
        status, open_items = self.status, list[Json]()
        of_open = status if status == "in_progress" else "incomplete"
        if self._message_id:
            open_items = [self._message(of_open, [_part("".join(self._text))])]
        if self._call is not None:
            fields = self._form.fields("".join(self._text))
            open_items = [self._call | fields | {"status": of_open}]
        if self._reasoning_id:
            open_items = [self._reasoning(of_open, "".join(self._text))]
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.asked,
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self._at if status in ("completed", "incomplete") else None,
            "status": status,
            "error": self._error,
            "incomplete_details": cut,
            "max_tool_calls": None,
            "model": self.model,
            "output": [*self._output, *open_items],
            "service_tier": "default",
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if self._end is None else usage_body(self._end.usage, self._n_reasoning),
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def usage_body(usage: Usage, n_reasoning: int) -> Json:
    """The response's `usage`, with so many tokens of reasoning."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(n_reasoning, usage.completion_tokens)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def collect(answer: ResponseAnswer, entries: AsyncIterator[Event]) -> Json:
    """Read the response to its end. Raises CorralError."""
    async for entry in entries:
        if isinstance(entry.what, CorralError):
            raise entry.what
        answer.take(entry)
    return answer.whole()


async def events(
    answer: ResponseAnswer, entries: AsyncGenerator[Event], after: int = -1
) -> AsyncIterator[bytes]:
    """The response as server-sent events, those behind that number; the last one tells the whole
    response, or what failed. The entries are closed at the end, whatever happens."""

    def written(events: Iterable[Json]) -> bytes:
        return b"".join(sse.named(one) for one in events if one["sequence_number"] > after)

    async with aclosing(entries):
        if begun := written(answer.opening()):
            yield begun
        try:
            async for entry in entries:
                if found := written(answer.take(entry)):
                    yield found
        except CorralError as error:
            yield written([answer.failed(error)])
        except Exception:
            logger.exception("A stream failed")
            yield written([answer.failed(unexpected())])
