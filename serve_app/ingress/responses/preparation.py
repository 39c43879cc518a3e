"""Turns bodies of requests for responses into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serve_app.ingress.generation import preparation, sampling_fields
from serve_app.ingress.generation.preparation import Chat
from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.model_registry import find
from serve_app.ingress.responses.protocol import FunctionChoice, ResponsesRequest
from serve_app.ingress.workers.worker import Models
from serve_app.sampling import Api, SamplingParams


@dataclass(frozen=True, slots=True)
class Response:
    """What is left of the body of a request for a response."""

    chat: Chat
    asked: dict[str, Any]
    """What the response says of its request."""


def response(models: Models, body: bytes) -> Response:
    """POST /v1/responses. Raises CorralError."""
    asked = parsed(ResponsesRequest, body)
    found = preparation.chat(find(models, asked.model), asked.as_chat(), 1, "input")
    return Response(found, _told(asked, found.generation.sampling))


def input_tokens(models: Models, body: bytes) -> int:
    """POST /v1/responses/input_tokens: how many the prompt would have. Raises CorralError."""
    asked = parsed(ResponsesRequest, body)
    return len(preparation.chat_prompt(find(models, asked.model), asked.as_chat()))


def _told(asked: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    choice = asked.tool_choice or "auto"
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "text": asked.text.model_dump(by_alias=True, include={"format"}),
        "tool_choice": choice.model_dump() if isinstance(choice, FunctionChoice) else choice,
        "tools": [tool.model_dump() | {"strict": bool(tool.strict)} for tool in asked.tools],
        "user": asked.user,
        **sampling_fields.told(sampling, Api.RESPONSES),
    }
