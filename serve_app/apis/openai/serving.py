"""Turns sequences' deltas into OpenAI's answers: whole, or as server-sent events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.base.values.answers import FinishReason, SequenceEnd, TokenDelta
from serve_app.prompt.output_parser import OutputParser, Part, Reasoning
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import CallPiece, ToolCall
from serve_app.server.answering import logprobs, streaming
from serve_app.server.answering.answers import ProtocolAnswer
from serve_app.server.answering.openai_tools import input_of
from serve_app.server.answering.preparation import Generation
from serve_app.server.answering.timings import (
    BUILD,
    Running,
    llama_timings,
    prompt_progress,
    timings,
)
from serve_app.server.http import sse

Json = dict[str, Any]
"""The build, as llama-server calls its own: its clients look for the first letter."""


@dataclass
class Choice:
    """A text of an answer, on its way."""

    index: int
    kind: Literal["chat", "text"]
    piece: logprobs.Piece | None = None
    """The written form of tokens, if log probabilities are wanted."""
    parser: OutputParser | None = None
    """Finds the reasoning and the tool calls in a chat's text."""
    echo: str = ""
    """The beginning of the text."""
    prompt: tuple[int, ...] = ()
    """The tokens of `echo`, if their log probabilities are wanted."""
    shares: bool = False
    """Whether probabilities after sampling are told instead."""
    custom_tools: frozenset[str] = frozenset()
    """The names of the tools that take a text, and no arguments."""
    tokenizer: Tokenizer | None = None
    """Counts the tokens of reasoning."""
    n_reasoning: int = 0
    """The tokens of reasoning so far."""
    end: SequenceEnd | None = None
    _n_calls: int = 0
    _offset: int = 0
    _begun: bool = False
    """Whether the prompt's log probabilities were told."""

    def whole(self, delta: TokenDelta) -> Json:
        """The choice of an answer without `stream`."""
        self.end = delta.end
        parts = self._split(delta)
        if self.kind == "chat":
            return self._body({"message": _message(parts)}, delta)
        return self._body({"text": self.echo + delta.text}, delta)

    def opening(self) -> Json | None:
        """The first event, before any text: in a chat, it has the role."""
        if self.kind == "chat":
            return self._body({"delta": {"role": "assistant", "content": None}}, None)
        return self._body({"text": self.echo}, None) if self.echo and not self.prompt else None

    def waiting(self) -> Json:
        """The event that goes with news of the prompt: it has no text."""
        is_chat = self.kind == "chat"
        content = {"delta": {"role": "assistant", "content": None}} if is_chat else self._nothing
        return self._body(content, None)

    def silence(self) -> Json:
        """The event that goes where nothing comes for long."""
        return self._body(self._nothing, None)

    @property
    def _nothing(self) -> Json:
        return {"delta": {}} if self.kind == "chat" else {"text": ""}

    def chunks(self, delta: TokenDelta) -> list[Json]:
        """The chunks of a delta; none if there is nothing to tell yet. The end has a chunk of its own,
        without any text, as llama-server has it."""
        self.end = delta.end
        parts = self._split(delta)
        if self.kind == "text":
            lead = self.echo if self.prompt and not self._begun else ""
            contents: list[Json] = [{"text": lead + delta.text}] if lead or parts else []
        else:
            contents = [
                {"delta": part if isinstance(part, dict) else {"content": part}} for part in parts
            ]
        if self.piece and delta.logprobs:
            contents = contents or [self._nothing]
        found = [self._body(content, None) for content in contents[:-1]]
        found += [self._body(content, delta.without_end) for content in contents[-1:]]
        return found if delta.end is None else [*found, self._body(self._nothing, delta.only_end)]

    def _split(self, delta: TokenDelta) -> list[str | Json]:
        """The delta's text as content, and reasoning and calls in the shape that they have in a stream."""
        if self.parser is None:
            return [delta.text] if delta.text else []
        parts = [self._shape(part) for part in streaming.parts(self.parser, delta)]
        if self.echo and not self._begun:
            self._begun = True
            return [self.echo, *parts]
        return parts

    def _shape(self, part: Part) -> str | Json:
        if isinstance(part, Reasoning):
            if self.tokenizer is not None:
                self.n_reasoning += len(self.tokenizer.tokenize(part.text, False, False))
            return {"reasoning_content": part.text}
        return part if isinstance(part, str) else self._call(part)

    def _call(self, call: ToolCall | CallPiece) -> Json:
        if call.name in self.custom_tools:
            self._n_calls += 1
            custom = {"name": call.name, "input": input_of(call.arguments)}
            named = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "custom", "custom": custom}
            return {"tool_calls": [{"index": self._n_calls - 1, **named}]}
        function = {"arguments": call.arguments}
        begun: Json = {}
        if call.name is not None:
            self._n_calls += 1
            begun = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            function = {"name": call.name, **function}
        return {"tool_calls": [{"index": self._n_calls - 1, **begun, "function": function}]}

    def _body(self, content: Json, delta: TokenDelta | None) -> Json:
        """The choice with this content, which is, or ends with, this delta's."""
        reason = None if delta is None or delta.end is None else delta.end.reason.value
        if reason == FinishReason.STOP and self._n_calls:
            reason = "tool_calls"
        found = None if delta is None or self.piece is None else self._logprobs(delta, self.piece)
        return {"index": self.index, **content, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, delta: TokenDelta, piece: logprobs.Piece) -> Json:
        if self.kind == "chat":
            return logprobs.of_chat(delta, piece, shares=self.shares)
        offset, every = len(self.echo) + self._offset, bool(self.prompt)
        lists = logprobs.of_text(delta, piece, offset, every=every)
        self._offset += logprobs.n_chars(delta, piece)
        if self.prompt and not self._begun:
            self._begun = True
            of_prompt = logprobs.of_prompt(self.prompt, delta.prompt_logprobs, piece, self.echo)
            lists = {name: of_prompt[name] + lists[name] for name in lists}
        return lists


@dataclass
class Answer(ProtocolAnswer):
    """An answer on its way: which endpoint asked, which model speaks."""

    kind: Literal["chat", "text"]
    id: str
    model: str
    choices: list[Choice]
    """The choices of one prompt after those of another."""
    plan: Generation
    n_best: int | None = None
    """How many of a prompt's choices are given, if not all."""
    verbose: Json | None = None
    """The content of `__verbose`."""
    created: int = field(default_factory=lambda: int(time.time()))
    _running: Running = field(default_factory=Running)

    def opening(self) -> list[Json]:
        bodies = [choice.opening() for choice in self.choices]
        return [self._chunk(body) for body in bodies if body is not None]

    def waiting(self) -> list[Json]:
        running = [choice for choice in self.choices if choice.end is None]
        return [self._chunk(choice.silence()) for choice in running[:1]]

    def closing(self) -> list[bytes]:
        usage = [sse.data(self._usage_chunk())] if self.plan.include_usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def events(self, index: int, delta: TokenDelta) -> list[Json]:
        if not (self.plan.return_progress or self._times_tokens):
            return self._chunks(index, delta)
        self._running.saw(delta)
        progress = self._progress(index, delta) if self.plan.return_progress else []
        chunks = self._chunks(index, delta)
        if self._times_tokens and chunks and delta.end is None:
            chunks[-1]["timings"] = self._running.to_json()
        return progress + chunks

    @property
    def _times_tokens(self) -> bool:
        return self.plan.timings_per_token and self.plan.timings

    def _progress(self, index: int, delta: TokenDelta) -> list[Json]:
        chunks = []
        for progress in delta.progress:
            chunk = self._chunk(self.choices[index].waiting())
            chunk["prompt_progress"] = prompt_progress(progress)
            if self._times_tokens:
                chunk["timings"] = self._running.to_json(progress)
            chunks.append(chunk)
        return chunks

    def _chunks(self, index: int, delta: TokenDelta) -> list[Json]:
        chunks = [self._chunk(body) for body in self.choices[index].chunks(delta)]
        if delta.end is not None:
            chunks[-1] |= self._timings(delta.end) | self._verbose
        return chunks

    def whole(self, sequences: Sequence[TokenDelta]) -> Json:
        bodies = [choice.whole(own) for choice, own in zip(self.choices, sequences, strict=True)]
        if self.n_best is not None:
            bodies = self._best(bodies, sequences, self.n_best)
        object_name = "chat.completion" if self.kind == "chat" else "text_completion"
        answer = self._envelope(object_name, bodies) | {"usage": self.usage()}
        return answer | self._timings(self.choices[0].end) | self._verbose

    def _best(self, bodies: list[Json], deltas: Sequence[TokenDelta], n_best: int) -> list[Json]:
        """The answers with the highest log probability per token, of each prompt."""
        choices = []
        for start in range(0, len(bodies), self.plan.n):
            group = range(start, start + self.plan.n)
            ranked = sorted(group, key=lambda i: -_mean_logprob(deltas[i]))
            choices += [bodies[i] for i in ranked[:n_best]]
        return [body | {"index": i} for i, body in enumerate(choices)]

    def usage(self) -> Json:
        """All choices' tokens; a prompt counts once."""
        usages = [choice.end.usage for choice in self.choices if choice.end is not None]
        firsts = usages[:: self.plan.n]
        n_prompt = sum(usage.prompt_tokens for usage in firsts)
        n_completion = sum(usage.completion_tokens for usage in usages)
        n_reasoning = sum(choice.n_reasoning for choice in self.choices)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens for usage in firsts)
            },
            "completion_tokens_details": {"reasoning_tokens": min(n_reasoning, n_completion)},
        }

    def _usage_chunk(self) -> Json:
        """The chunk that `stream_options.include_usage` asks for."""
        chunk = self._envelope(self._chunk_name, []) | {"usage": self.usage()}
        return chunk | self._timings(self.choices[0].end)

    def _timings(self, end: SequenceEnd | None) -> Json:
        """llama-server's, of one choice, and more if the request asks for it."""
        if end is None or len(self.choices) > 1:
            return {}
        return {"timings": timings(end) if self.plan.timings else llama_timings(end)}

    @property
    def _verbose(self) -> Json:
        return {} if self.verbose is None else {"__verbose": self.verbose}

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(self, choice: Json) -> Json:
        chunk = self._envelope(self._chunk_name, [choice])
        if self.plan.include_usage:
            chunk["usage"] = None
        return chunk | sse.obfuscation(_piece(choice)) if self.plan.obfuscates else chunk

    def _envelope(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": BUILD,
            "choices": choices,
        }


def _piece(choice: Json) -> str:
    if "delta" not in choice:
        return str(choice["text"])
    delta: Json = choice["delta"]
    calls = "".join(
        call["function"]["arguments"] if "function" in call else call["custom"]["input"]
        for call in delta.get("tool_calls", ())
    )
    return f"{delta.get('content') or ''}{delta.get('reasoning_content', '')}{calls}"


def _mean_logprob(delta: TokenDelta) -> float:
    found = [token.logprob for token in delta.logprobs]
    return sum(found) / len(found) if found else float("-inf")


def _message(parts: list[str | Json]) -> Json:
    """A whole answer's message. A stream's chunks number their calls, a message does not."""
    text = "".join(part for part in parts if isinstance(part, str))
    others = [part for part in parts if isinstance(part, dict)]
    calls = [call for part in others for call in part.get("tool_calls", ())]
    for call in calls:
        del call["index"]
    reasoning = "".join(part.get("reasoning_content", "") for part in others)
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message
