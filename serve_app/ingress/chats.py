"""From chats to the engine's requests, and from deltas to prose and calls: what every chat protocol
shares."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from serve_app.ingress import generation
from serve_app.ingress.encoding import encoded, sampling_of
from serve_app.ingress.protocol import ChatCompletionRequest
from serve_app.ingress.served import ServedModel
from serve_app.prompt import grammars
from serve_app.prompt.tool_calls import HERMES_TAGS, HermesParser, ToolCall
from serve_app.types import GenerationRequest, SamplingParams, TokenDelta


def with_calls(model: ServedModel, body: ChatCompletionRequest) -> SamplingParams:
    """The sampling parameters, with the calls that the answer must consist of, if it must."""
    sampling = body.sampling(body.max_completion_tokens or body.max_tokens)
    forced = body.forced_tools()
    if not forced:
        return sampling
    grammar = grammars.from_tool_calls(
        [tool.function.model_dump() for tool in forced],
        parallel=body.parallel_tool_calls is not False,
        tags_are_tokens=model.tokenizer.is_mark(HERMES_TAGS[0]),
        param="tools",
    )
    return dataclasses.replace(sampling, grammar=grammar)


async def encode_chat(
    model: ServedModel, body: ChatCompletionRequest, tools: list[dict[str, Any]]
) -> tuple[int, ...]:
    """The prompt that asks for the chat's next turn. Raises InvalidRequestError."""
    messages = [message.for_template() for message in body.messages]
    size = sum(len(message["content"]) for message in messages) + len(str(tools))
    return await encoded(model, "messages", size, model.tokenizer.encode_chat, messages, tools)


async def request(
    model: ServedModel, answer_id: str, body: ChatCompletionRequest, prompt_field: str
) -> GenerationRequest:
    """The one request that answers a chat. Raises InvalidRequestError."""
    sampling = await sampling_of(body, lambda: with_calls(model, body))
    prompt = await encode_chat(model, body, body.tools_for_template())
    (only,) = generation.requests(model, answer_id, [prompt], 1, body, sampling, prompt_field)
    return only


def parser_for(body: ChatCompletionRequest) -> HermesParser | None:
    """What finds the calls in the answer; None if there are no tools to call."""
    return HermesParser() if body.tools_for_template() else None


def split(parser: HermesParser | None, delta: TokenDelta) -> list[str | ToolCall]:
    """The delta's text as prose and calls; no prose is empty."""
    if parser is None:
        return [delta.text] if delta.text else []
    parts = parser.feed(delta.text)
    return parts if delta.end is None else parts + parser.finish()


def event(body: dict[str, Any]) -> str:
    """A server-sent event that is named after its `type`."""
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"event: {body['type']}\ndata: {data}\n\n"


def streamed(events: AsyncIterator[str]) -> StreamingResponse:
    """A response of server-sent events, which no proxy shall hold back."""
    return StreamingResponse(
        events,
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
