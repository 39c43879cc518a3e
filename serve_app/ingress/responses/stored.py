"""The routes of responses that are kept.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from serve_app.errors import InvalidRequestError, ModelNotFoundError, ResponseNotFoundError
from serve_app.ingress.access.limits.bodies import unread
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.http.dependencies import BodiesArgument, written
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.responses import log, preparation, serving
from serve_app.ingress.responses.background import BackgroundResponses
from serve_app.ingress.responses.log import Event, StoredRequest
from serve_app.ingress.responses.serving import ResponseAnswer


def key() -> str | None:
    """The name of this task's caller's API key."""
    account = request_context.current().account
    return None if account is None else account.key.name


def told(
    models: Mapping[str, ServedModel], stored_request: StoredRequest, entries: Sequence[Event]
) -> ResponseAnswer:
    """A response as far as it is. Raises ResponseNotFoundError if its model is no more."""
    try:
        model = find(models, stored_request.model)
    except ModelNotFoundError:
        raise ResponseNotFoundError(stored_request.id) from None
    answer = ResponseAnswer(
        stored_request.id,
        stored_request.model,
        dict(stored_request.asked),
        model.tokenizer.output_parser(
            stored_request.request.prompt,
            stored_request.tools,
            stored_request.thinks,
            in_pieces=True,
        ),
        generation.token_counter(model),
        return_progress=stored_request.return_progress,
        created=stored_request.created,
    )
    if entries:
        answer.opening()
        for entry in log.merged(entries):
            answer.take(entry)
    return answer


async def json_of(
    responses: BackgroundResponses, stored_request: StoredRequest, entries: Sequence[Event]
) -> bytes:
    """A response as far as it is, as JSON. Raises ResponseNotFoundError if its model is no more."""
    answer = await asyncio.to_thread(told, responses.models, stored_request, entries)
    return orjson.dumps(answer.whole())


async def _responses(request: Request) -> BackgroundResponses:
    responses: BackgroundResponses = request.app.state.responses
    return responses


ResponsesArgument = Annotated[BackgroundResponses, Depends(_responses)]
ROUTER = APIRouter()
"""A response is there for its own API key only."""


@ROUTER.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    responses: ResponsesArgument,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
    include_obfuscation: bool = False,
) -> Response:
    """A response as far as it is; `stream` sends its events, those behind the number
    `starting_after`, from its beginning and then as they come."""
    stored_request, entries = await responses.found(response_id, key())
    if not stream:
        return written(await json_of(responses, stored_request, entries))
    answer = told(responses.models, stored_request, [])
    answer.obfuscates = include_obfuscation
    with responses.open_requests.entered(request_context.current().holder):
        pass  # a refusal has a status here
    following = _held(responses, stored_request.id)
    return sse.EventStream(serving.events(answer, following, starting_after))


@ROUTER.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(responses: ResponsesArgument, response_id: str) -> dict[str, Any]:
    """Forget a response. If it is being made, that ends."""
    await responses.delete(response_id, key())
    return {"id": response_id, "object": "response", "deleted": True}


@ROUTER.post("/v1/responses/{response_id}/cancel", response_model=None)
@unread
async def cancel_response(responses: ResponsesArgument, response_id: str) -> Response:
    """End a response that is made in the background. One that has ended stays as it is."""
    stored_request, entries = await responses.found(response_id, key())
    if not stored_request.is_background:
        raise InvalidRequestError("Cannot cancel a synchronous response.")
    if not (entries and entries[-1].is_last):
        await responses.cancel(response_id, key())
        async for _ in responses.follow(response_id, key(), 0):
            pass  # up to its end
        stored_request, entries = await responses.found(response_id, key())
    return written(await json_of(responses, stored_request, entries))


@ROUTER.get("/v1/responses/{response_id}/input_items", response_model=None)
async def response_input_items(
    responses: ResponsesArgument,
    bodies: BodiesArgument,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The conversation that a response answers, that of `previous_response_id` included."""
    stored_request, _ = await responses.found(response_id, key())
    wanted = orjson.dumps([order, limit, after]) + b"\n"
    return written(await bodies.work(preparation.page, wanted, stored_request.items))


async def _held(responses: BackgroundResponses, response_id: str) -> AsyncGenerator[Event]:
    """A response's entries, for one of the readers that the caller may have."""
    caller = request_context.current()
    with responses.open_requests.entered(caller.holder):
        async for entry in responses.follow(response_id, key(), 0):
            yield entry
