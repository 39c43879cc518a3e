"""Turns a sequence's deltas into OpenAI's response: whole, or as server-sent events.

Source: OpenAI's API reference, "Responses" and its streaming events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from serve_app.apis.responses.items import reasoning_fields
from serve_app.apis.responses.store import Event, StoredRequest, item_prefix
from serve_app.apis.responses.tools import CallForm, forms
from serve_app.base.errors import CorralError
from serve_app.base.values.answers import FinishReason, SequenceEnd, TokenDelta, Usage
from serve_app.prompt.output_parser import Reasoning
from serve_app.prompt.tool_calls import CallPiece, ToolCall
from serve_app.server.answering import streaming
from serve_app.server.answering.answers import EventAnswer
from serve_app.server.answering.timings import Running, prompt_progress, timings
from serve_app.server.http import sse
from serve_app.server.model_registry import ModelInfo

Json = dict[str, Any]


class _TextForm(NamedTuple):
    text: str
    part: str
    place: str
    part_type: str


_MESSAGE = _TextForm("output_text", "content_part", "content_index", "output_text")
_REASONING = _TextForm("reasoning_text", "content_part", "content_index", "reasoning_text")
_SUMMARY = _TextForm(
    "reasoning_summary_text", "reasoning_summary_part", "summary_index", "summary_text"
)
"""The types of the texts that items have."""


class ResponseAnswer(EventAnswer):
    def __init__(
        self,
        request: StoredRequest,
        model: ModelInfo,
        *,
        timings_per_token: bool = False,
        obfuscates: bool = False,
        after: int = -1,
    ) -> None:
        """`obfuscates`: whether pieces come with noise, so that their sizes do not show what they are. Of a
        stream, the events behind the number `after` are sent."""
        self._request, self._after = request, after
        self._tokenizer = model.tokenizer
        self._parser = model.tokenizer.output_parser(
            request.prompt_end, request.tools, request.thinks, in_pieces=True
        )
        self._timings_per_token, self._obfuscates = timings_per_token, obfuscates
        self._forms = forms([*request.asked["tools"], *request.later_tools])
        self._form = CallForm("function", "")
        """The form of the open call."""
        self.status = "queued" if request.is_background else "in_progress"
        self._at = 0
        """Unix time of what came last."""
        self._end: SequenceEnd | None = None
        self._error: Json | None = None
        self._output: list[Json] = []
        """The items that are complete."""
        self._open: Json | None = None
        """The item that is not complete, without its text."""
        self._text: list[str] = []
        """The pieces of the open item's text, or of a call's arguments."""
        self._has_summary = bool(request.asked["reasoning"]["summary"])
        """Whether the client reads reasoning as its summary. The reasoning itself is told there."""
        self._forms_of_text = {
            "message": _MESSAGE,
            "reasoning": _SUMMARY if self._has_summary else _REASONING,
        }
        self._n_items = self._n_events = self._n_reasoning = 0
        self._item_prefix = item_prefix(request.id)
        self.log: list[Event] | None = None
        """The log that this answer is written to as it is made. Its events are numbered by that."""
        self._running = Running()

    def opening(self) -> list[Json]:
        response = self.whole()
        names = ["created", "queued"] if self.status == "queued" else ["created"]
        events = [self._event(name, response=response) for name in names]
        begun = response | {"status": "in_progress"}
        return [*events, self._event("in_progress", response=begun)]

    def encode_event(self, event: Json) -> bytes:
        return sse.named_event(event) if event["sequence_number"] > self._after else b""

    def ping(self) -> bytes:
        """A sign of life in the log: who reads it later counts the same events. The log of a response
        that others make is theirs, and so are its signs of life."""
        if self.log is None or (self.log and self.log[-1].is_last):
            return sse.PING
        self.log.append(Event.wait())
        return b"".join(map(self.encode_event, self.take(self.log[-1])))

    def take(self, entry: Event) -> list[Json]:
        """The events of what came of it."""
        if entry.is_wait:
            return [self._event("in_progress", response=self.whole() | {"status": "in_progress"})]
        self._at, self.status = int(entry.at), "in_progress"
        if entry.delta is not None:
            return self.events(entry.delta)
        return [self._cancel() if entry.error is None else self.failure_event(entry.error)]

    def tell(self, entry: Event) -> list[Json]:
        """The events of what came of it, for a stream. Raises the error of a response that failed."""
        if entry.error is not None:
            raise entry.error
        return self.take(entry)

    def events(self, delta: TokenDelta) -> list[Json]:
        """The events of a delta. The last event of the last delta tells the whole response. As at
        llama-server, a delta's last event tells the timings."""
        self._running.saw(delta)
        events = self._progress(delta) if self._request.return_progress else []
        events += self._news(delta)
        if delta.end is not None:
            events[-1]["timings"] = timings(delta.end)
        elif self._timings_per_token and events:
            events[-1]["timings"] = self._running.to_json()
        return events

    def _progress(self, delta: TokenDelta) -> list[Json]:
        return [
            self._event("in_progress", response=self.whole())
            | {"prompt_progress": prompt_progress(progress)}
            for progress in delta.progress
        ]

    def _news(self, delta: TokenDelta) -> list[Json]:
        events: list[Json] = []
        for part in streaming.parts(self._parser, delta):
            if isinstance(part, Reasoning):
                self._n_reasoning += len(self._tokenizer.tokenize(part.text, False, False))
                events += self._add_text("reasoning", part.text)
            elif isinstance(part, str):
                events += self._add_text("message", part)
            else:
                events += self._add_call(part)
        if delta.end is not None:
            status = "incomplete" if delta.end.reason == FinishReason.LENGTH else "completed"
            events += self._end_of_item(status)
            self.status, self._end = status, delta.end
            # OpenAI's own client waits for that event, and llama-server sends no other: the status tells.
            events.append(self._event("completed", response=self.whole()))
        return events

    def failure_event(self, error: CorralError) -> Json:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self.status, self._error = "failed", {"code": code, "message": error.message}
        return self._event("failed", response=self.whole())

    def _cancel(self) -> Json:
        """OpenAI's clients know no event of that name; the response's status says it."""
        self.status = "cancelled"
        return self._event("incomplete", response=self.whole())

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open["type"] != kind:
            events = self._begin(kind, {"role": "assistant"} if kind == "message" else {})
            part, form = self._part(kind, ""), self._forms_of_text[kind]
            events.append(self._event(f"{form.part}.added", **self._place(), part=part))
        self._text.append(text)
        fields = {**self._place(), "delta": text, **_logprobs(kind)}
        name = f"{self._forms_of_text[kind].text}.delta"
        return [*events, self._obfuscate(self._event(name, **fields))]

    def _add_call(self, call: ToolCall | CallPiece) -> list[Json]:
        """The events of more of a call. Only a function's arguments are told as they come: all other tools
        have what they need only when the call is complete."""
        events: list[Json] = []
        if call.name is not None:
            events = self._end_of_item("completed")
            self._form = self._forms.get(call.name, CallForm("function", call.name))
            events += self._begin(self._form.item_type, {"call_id": self._new_id("call")})
        if call.arguments:
            self._text.append(call.arguments)
            if self._form.kind == "function":
                name = "function_call_arguments.delta"
                delta = self._event(name, **self._place(), delta=call.arguments)
                events.append(self._obfuscate(delta))
        return events

    def _begin(self, kind: str, fields: Json) -> list[Json]:
        events = self._end_of_item("completed")
        self._open = {"type": kind, "id": self._new_id(_PREFIXES.get(kind, "fc")), **fields}
        item = self._item("in_progress")
        return [
            *events,
            self._event("output_item.added", output_index=len(self._output), item=item),
        ]

    def _end_of_item(self, status: str) -> list[Json]:
        if self._open is None:
            return []
        item, text = self._item(status), "".join(self._text)
        kind, place, events = item["type"], self._place(), list[Json]()
        if kind in self._forms_of_text:
            form, done = self._forms_of_text[kind], {**place, "text": text, **_logprobs(kind)}
            events.append(self._event(f"{form.text}.done", **done))
            events.append(self._event(f"{form.part}.done", **place, part=self._part(kind, text)))
        elif self._form.kind == "function":
            done = {"name": item["name"], "arguments": text}
            events.append(self._event("function_call_arguments.done", **place, **done))
        elif self._form.kind == "custom":
            name, said = "custom_tool_call_input", item["input"]
            events.append(self._obfuscate(self._event(f"{name}.delta", **place, delta=said)))
            events.append(self._event(f"{name}.done", **place, input=said))
        events.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        self._text.clear()
        return events

    def _item(self, status: str) -> Json:
        assert self._open is not None
        text, kind = "".join(self._text), self._open["type"]
        if kind == "message":
            fields: Json = {"content": [self._part(kind, text)] if text else []}
        elif kind == "reasoning":
            fields = reasoning_fields(text, is_sealed=True)
            if self._has_summary and text:
                fields |= {"summary": [self._part(kind, text)], "content": []}
        else:
            fields = self._form.fields(text)
        return self._open | fields | {"status": status}

    def _place(self) -> Json:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        form = self._forms_of_text.get(self._open["type"])
        return place if form is None else place | {form.place: 0}

    def _part(self, kind: str, text: str) -> Json:
        part = {"type": self._forms_of_text[kind].part_type, "text": text}
        return part | {"annotations": [], "logprobs": []} if kind == "message" else part

    def _obfuscate(self, event: Json) -> Json:
        return event | sse.obfuscation(event["delta"]) if self._obfuscates else event

    def _new_id(self, kind: str) -> str:
        """The id of an item or a call: the same whoever computes this response."""
        self._n_items += 1
        return f"{kind}_{self._item_prefix}{self._n_items:08x}"

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": f"response.{name}", "sequence_number": self._n_events - 1, **fields}

    def whole(self) -> Json:
        request, status, open_items = self._request, self.status, list[Json]()
        if self._open is not None:
            open_items = [self._item(status if status == "in_progress" else "incomplete")]
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **request.asked,
            "id": request.id,
            "object": "response",
            "created_at": request.created,
            "completed_at": self._at if status in ("completed", "incomplete") else None,
            "status": status,
            "error": self._error,
            "incomplete_details": cut,
            "max_tool_calls": None,
            "model": request.model,
            "output": [*self._output, *open_items],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None if self._end is None else usage_body(self._end.usage, self._n_reasoning),
        }


_PREFIXES = {"message": "msg", "reasoning": "rs", "custom_tool_call": "ctc"}


def _logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "message" else {}


def usage_body(usage: Usage, n_reasoning: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(n_reasoning, usage.completion_tokens)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def collect(answer: ResponseAnswer, entries: AsyncIterator[Event]) -> Json:
    async for entry in entries:
        if entry.error is not None:
            raise entry.error
        answer.take(entry)
    return answer.whole()
