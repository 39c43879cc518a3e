"""Turns a sequence's deltas into Ollama's answers: whole, or line by line.

Source: ollama, api/types.go, `ChatResponse`, `GenerateResponse` and `Metrics`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import JSONResponse, Response

from serve_app.base.errors import CorralError, ModelNotFoundError
from serve_app.base.values.answers import SequenceEnd, TokenDelta
from serve_app.prompt.output_parser import OutputParser, Reasoning
from serve_app.prompt.tool_calls import ToolCall
from serve_app.server.answering import logprobs, streaming
from serve_app.server.answering.answers import EventAnswer, ProtocolAnswer
from serve_app.server.http import sse
from serve_app.server.http.errors import ErrorShape, cut
from serve_app.server.http.sse import EventStream

if TYPE_CHECKING:
    from serve_app.server.model_control import PullProgress

Json = dict[str, Any]
Kind = Literal["chat", "generate"]

_NS = 1_000_000_000


def timestamp(seconds: float | None = None) -> str:
    """A Unix time, or now, as Ollama writes it."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def load_answer(kind: Kind, name: str, reason: str) -> Json:
    """The answer to a request that only asks for the model."""
    return _envelope(kind, name, _Said()) | {"done": True, "done_reason": reason}


@dataclass
class _Said:
    text: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)


def _envelope(kind: Kind, name: str, content: _Said) -> Json:
    line: Json = {"model": name, "created_at": timestamp()}
    thinking = {"thinking": content.thinking} if content.thinking else {}
    calls = {"tool_calls": content.calls} if content.calls else {}
    if kind == "chat":
        line["message"] = {"role": "assistant", "content": content.text, **thinking, **calls}
    else:
        line |= {"response": content.text, **thinking, **calls}
    if content.logprobs:
        line["logprobs"] = content.logprobs
    return line


class OllamaLines(EventAnswer):
    """A stream whose events are lines of JSON."""

    media_type = "application/x-ndjson"

    def ping(self) -> bytes:
        """NDJSON has no comments, and readers fail at empty lines. Space before a value is its line's,
        and JSON allows it there."""
        return b"".join(map(self.encode_event, self.waiting())) or b" "

    def failure_event(self, error: CorralError) -> Json:
        return ollama_error_body(error)

    def encode_event(self, event: Json) -> bytes:
        return sse.one_line(event) + b"\n"


class PullLines(OllamaLines):
    """The progress of a download."""

    _told: PullProgress | None = None

    def waiting(self) -> list[Json]:
        """The last line again."""
        return [] if self._told is None else [self._line(self._told)]

    async def respond(self, steps: AsyncIterator[PullProgress], *, in_lines: bool) -> Response:
        """Answer with all steps as they come, or with the last one. Raises CorralError."""
        if in_lines:
            return EventStream(self.stream(steps, self._lines), self)
        async for step in steps:
            last = step
        return JSONResponse(self._line(last))

    def _lines(self, step: PullProgress) -> list[Json]:
        self._told = step
        return [self._line(step)]

    def _line(self, step: PullProgress) -> Json:
        return {name: value for name, value in asdict(step).items() if value is not None}


@dataclass
class OllamaAnswer(OllamaLines, ProtocolAnswer):
    """An answer on its way, line by line."""

    kind: Kind
    name: str
    """The model's, as it was asked."""
    parser: OutputParser
    shows_thinking: bool
    piece: logprobs.Piece | None = None
    """The written form of tokens, if log probabilities are wanted."""
    context: list[int] | None = None
    """The conversation's tokens so far, if they are wanted."""
    began: float = field(default_factory=time.perf_counter)
    """The time when the request came, by `time.perf_counter`."""
    _n_calls: int = 0

    def waiting(self) -> list[Json]:
        return [_envelope(self.kind, self.name, _Said()) | {"done": False}]

    def events(self, index: int, delta: TokenDelta) -> list[Json]:
        """The lines of a delta. The last line of an answer tells the end, and nothing else."""
        said = self._take_delta(delta)
        lines = [_envelope(self.kind, self.name, said) | {"done": False}] if said else []
        if delta.end is not None:
            lines.append(_envelope(self.kind, self.name, _Said()) | self._end(delta.end))
        return lines

    def whole(self, sequences: Sequence[TokenDelta]) -> Json:
        end = sequences[0].end
        assert end is not None
        return _envelope(self.kind, self.name, self._take_delta(sequences[0])) | self._end(end)

    def _take_delta(self, delta: TokenDelta) -> _Said:
        content = _Said()
        if self.context is not None:
            self.context += delta.token_ids
        if self.piece is not None:
            content.logprobs = logprobs.of_chat(delta, self.piece)["content"]
        for part in streaming.parts(self.parser, delta):
            if isinstance(part, ToolCall):
                content.calls.append(self._call(part))
            elif isinstance(part, str):
                content.text += part
            elif isinstance(part, Reasoning) and self.shows_thinking:
                content.thinking += part.text
        return content

    def _call(self, call: ToolCall) -> Json:
        self._n_calls += 1
        function = {
            "index": self._n_calls - 1,
            "name": call.name,
            "arguments": json.loads(call.arguments),
        }
        return {"id": f"call_{uuid.uuid4().hex[:8]}", "function": function}

    def _end(self, end: SequenceEnd) -> Json:
        """Durations are in nanoseconds; to wait for a slot is to wait for the model."""
        spent, usage = end.timings, end.usage
        fields: Json = {
            "done": True,
            "done_reason": end.reason.value,
            "total_duration": round((time.perf_counter() - self.began) * _NS),
            "load_duration": round((spent.queue_s + spent.failed_over_s) * _NS),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": round(spent.prefill_s * _NS),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(spent.decode_s * _NS),
        }
        return fields if self.context is None else fields | {"context": self.context}


def ollama_error_body(error: CorralError) -> Json:
    """Ollama's error object. Clients look for its words where a model is missing. Source: ollama,
    server/routes.go."""
    if isinstance(error, ModelNotFoundError):
        return {"error": cut(f"model '{error.args[0]}' not found")}
    return {"error": cut(error.message)}


ERRORS = {"/api/": ErrorShape(lambda error, _: ollama_error_body(error), full_status=503)}
