"""Turns bodies of requests for responses into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson
from pydantic import TypeAdapter

from serve_app.ingress.generation import preparation, sampling_fields
from serve_app.ingress.generation.preparation import Chat, PromptLength
from serve_app.ingress.http.json_body import loads, parsed
from serve_app.ingress.model_registry import find
from serve_app.ingress.responses import items
from serve_app.ingress.responses.items import AnyItem, Items
from serve_app.ingress.responses.protocol import ResponsesRequest
from serve_app.ingress.responses.tools import (
    AnyTool,
    CustomTextTool,
    FunctionTool,
    NamespaceTool,
)
from serve_app.ingress.workers.worker import Models
from serve_app.sampling import Api, SamplingParams

_ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(Items)


class PreparedResponse(msgspec.Struct, frozen=True, tag=True):
    """The prepared request for a response."""

    chat: Chat
    asked: dict[str, Any]
    """The fields that the response repeats of its request."""
    items: bytes
    """The conversation that it answers."""
    obfuscates: bool


class After(msgspec.Struct, frozen=True, tag=True):
    """The request goes on from a response, whose conversation it must be read with."""

    response_id: str


def response(models: Models, body: bytes) -> PreparedResponse | After:
    """POST /v1/responses. Raises CorralError."""
    request = parsed(ResponsesRequest, body)
    if request.previous_response_id is not None:
        return After(request.previous_response_id)
    return _response(models, request, [])


def response_after(models: Models, body: bytes) -> PreparedResponse:
    """A request behind a conversation: see `with_conversation`. Raises CorralError."""
    before, body = _conversation(body)
    return _response(models, parsed(ResponsesRequest, body), before)


def input_tokens(models: Models, body: bytes) -> PromptLength | After:
    """POST /v1/responses/input_tokens: how many the prompt would have. Raises CorralError."""
    request = parsed(ResponsesRequest, body)
    if request.previous_response_id is not None:
        return After(request.previous_response_id)
    return _input_tokens(models, request, [])


def input_tokens_after(models: Models, body: bytes) -> PromptLength:
    """A request behind a conversation: see `with_conversation`. Raises CorralError."""
    before, body = _conversation(body)
    return _input_tokens(models, parsed(ResponsesRequest, body), before)


def with_conversation(before: bytes, output: Sequence[Any], pieces: list[bytes]) -> list[bytes]:
    """The pieces of a body behind a conversation, which is that of an earlier response, and its output."""
    told = orjson.dumps(output)
    return [b"%d %d\n" % (len(before), len(told)), before, told, *pieces]


def page(models: Models, body: bytes) -> bytes:
    """GET /v1/responses/{id}/input_items: what is asked for, and a conversation."""
    query, _, conversation = body.partition(b"\n")
    order, limit, after = orjson.loads(query)
    listed = loads(conversation.decode())
    if order == "desc":
        listed.reverse()
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        listed = listed[places[0] + 1 :] if places else []
    shown = listed[:limit]
    return orjson.dumps(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(listed) > len(shown),
        }
    )


def _conversation(body: bytes) -> tuple[list[Any], bytes]:
    """The items of an earlier conversation, and the body behind it."""
    sizes, _, rest = body.partition(b"\n")
    n_before, n_told = map(int, sizes.split())
    before = loads(rest[:n_before].decode())
    output = loads(rest[n_before : n_before + n_told].decode())
    return [*before, *output], rest[n_before + n_told :]


def _response(models: Models, request: ResponsesRequest, before: Sequence[Any]) -> PreparedResponse:
    chat = request.as_chat(_ITEMS.validate_python(before))
    model = find(models, request.model, preparation.chat_beginning(chat.conversation))
    prepared = preparation.chat(model, chat, 1, "input")
    kept = items.kept(before, request.input)
    return PreparedResponse(
        prepared, _told(request, prepared.generation.sampling), kept, request.obfuscates
    )


def _input_tokens(models: Models, request: ResponsesRequest, before: Sequence[Any]) -> PromptLength:
    chat = request.as_chat(_ITEMS.validate_python(before))
    model = find(models, request.model, preparation.chat_beginning(chat.conversation))
    return preparation.length(model, chat, "input")


def _told(request: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": None,
        },
        "store": request.store is not False,
        "text": request.text.model_dump(
            by_alias=True, include={"format", "verbosity"}, exclude_none=True
        ),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_told(tool) for tool in request.tools],
        "user": request.user,
        **sampling_fields.told(sampling, Api.RESPONSES),
    }


def _tool_told(tool: AnyTool) -> dict[str, Any]:
    """The tool as the response repeats it."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump() | {"strict": bool(tool.strict)}
    body = tool.model_dump(exclude_none=True)
    if isinstance(tool, NamespaceTool):
        body["tools"] = [_tool_told(inner) for inner in tool.tools]
    if isinstance(tool, CustomTextTool):
        body["format"] |= body["format"].pop("grammar", {})
    return body
