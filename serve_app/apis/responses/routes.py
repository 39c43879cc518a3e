"""The routes that make OpenAI's responses.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import Depends, Query, Request
from fastapi.responses import Response

from serve_app.apis.responses import preparation, serving
from serve_app.apis.responses.background import BackgroundResponses
from serve_app.apis.responses.preparation import After, PreparedResponse, ResponsesRequest
from serve_app.apis.responses.serving import ResponseAnswer
from serve_app.apis.responses.store import Event, Owner, StoredRequest, StoredResponse
from serve_app.base.errors import (
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    PreviousResponseError,
    ResponseNotFoundError,
)
from serve_app.server.access.bodies import mark_unread
from serve_app.server.answering import streaming
from serve_app.server.answering.openai_answers import InputTokens
from serve_app.server.answering.preparation import PromptLength
from serve_app.server.answering.streaming import Deltas
from serve_app.server.http import request_context, sse
from serve_app.server.http.dependencies import (
    Bodies,
    BodiesArgument,
    ModelsArgument,
    PreparedBody,
    bytes_response,
    of_app,
)
from serve_app.server.http.description import STREAMED, api_router
from serve_app.server.model_registry import Models, find


def key() -> str | None:
    """The name of this task's caller's API key."""
    account = request_context.current().account
    return None if account is None else account.key.name


ResponsesArgument = Annotated[BackgroundResponses, of_app("responses")]
ROUTER = api_router()
"""A response is there for its own API key only."""


T = TypeVar("T")
PROMPT_END = 64
"""The last tokens of a prompt that tell whether its answer begins with reasoning."""


class Continued(PreparedBody[T | After]):
    """The dependency on a body that may go on from what is kept, and is then prepared behind it."""

    async def __call__(self, request: Request) -> T | After:
        """Read the body in a worker. Raises CorralError."""
        bodies: Bodies = request.app.state.bodies
        pieces = await bodies.pieces(request)
        if pieces and pieces[0].startswith(preparation.RECORD):
            raise InvalidRequestError(
                "The body cannot be read as JSON: it begins with a zero byte."
            )
        result = await bodies.work(self.prepare, *pieces)
        if not isinstance(result, After):
            return result
        request_context.current().ignored.clear()  # they are told again
        stored = await _find_kept(request.app.state.responses, result)
        return await bodies.work(self.prepare, *preparation.record(*stored), *pieces)


def _continue_with(prepare: Callable[[Models, bytes], Any]) -> Any:
    example = {"input": "Tell me a story.", "max_output_tokens": 32}
    return Depends(Continued(prepare, kind=ResponsesRequest, example=example))


@ROUTER.post("/v1/responses", responses=STREAMED)
@ROUTER.post("/responses", responses=STREAMED)
async def responses(
    models: ModelsArgument,
    responses: ResponsesArgument,
    prepared: Annotated[PreparedResponse, _continue_with(preparation.response)],
) -> Response:
    """Answer a chat as a response, which is kept for some minutes unless `store` is false; `stream`
    sends server-sent events, and `background` does not wait for it."""
    # Kept responses are few, and those of who chats: a batch's would take their places.
    may_keep = responses.keep_any and not request_context.current().is_batch_line
    fields = prepared.asked | ({} if may_keep else {"store": False})
    wanted = prepared.chat.generation
    if fields["background"] and not responses.keep_any:
        raise NotSupportedError(
            "This server keeps no responses, so none can run in the background."
        )
    model = find(models, wanted.model)
    (request,) = await streaming.requests(model, f"resp_{uuid.uuid4().hex}", wanted)
    stored = StoredRequest(
        id=request.id,
        model=model.id,
        created=int(time.time()),
        is_background=fields["background"],
        asked=fields,
        tools=prepared.chat.tools,
        thinks=prepared.chat.thinks,
        return_progress=wanted.return_progress,
        prompt_end=request.prompt[-PROMPT_END:],
        items=prepared.items,
        item_ids=prepared.item_ids,
        later_tools=prepared.later_tools,
    )
    answer = ResponseAnswer(
        stored, model, timings_per_token=wanted.timings_per_token, obfuscates=wanted.obfuscates
    )
    owner = Owner(key(), request_context.current().holder)
    if fields["background"]:
        await responses.start(model, request, stored, owner)
        if not wanted.stream:
            return sse.json_response(answer.whole())
        entries = responses.follow(stored.id, owner.key)
    else:
        if fields["store"]:
            responses.prepare()
        deltas = await streaming.start(model, [request])
        answer.log = []
        keeper = responses if fields["store"] else None
        entries = _log(deltas, stored, owner, answer.log, keeper)
    if wanted.stream:
        told = answer.stream(entries, answer.tell)
        return sse.EventStream(told, answer, wanted.sse_ping_interval)
    return sse.json_response(await serving.collect(answer, entries))


@ROUTER.post("/v1/responses/input_tokens")
@ROUTER.post("/responses/input_tokens")
async def response_input_tokens(
    models: ModelsArgument,
    length: Annotated[PromptLength, _continue_with(preparation.count_input_tokens)],
) -> InputTokens:
    """How many tokens the prompt of such a response has."""
    return InputTokens(input_tokens=await streaming.n_tokens(models, length))


@ROUTER.post("/v1/responses/render")
async def render_response(answer: Annotated[bytes, _continue_with(preparation.render)]) -> Response:
    """The tokens of such a response's prompt, which vLLM's routers ask for."""
    return bytes_response(answer)


@ROUTER.get("/v1/responses/{response_id}", responses=STREAMED)
async def get_response(
    models: ModelsArgument,
    responses: ResponsesArgument,
    bodies: BodiesArgument,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
    include_obfuscation: bool = False,
) -> Response:
    """A response as far as it is; `stream` sends its events, those behind the number
    `starting_after`, from its beginning and then as they come."""
    stored, request = await _find_stored(responses, response_id)
    if not stream:
        return bytes_response(
            await bodies.work(preparation.response_json, *preparation.record(stored))
        )
    answer = preparation.answer_to(
        models, request, obfuscates=include_obfuscation, after=starting_after
    )
    with responses.open_requests.count(request_context.current().holder):
        pass  # a refusal has a status here
    entries = _follow_response(responses, response_id)
    return sse.EventStream(answer.stream(entries, answer.tell), answer)


@ROUTER.delete("/v1/responses/{response_id}")
async def delete_response(responses: ResponsesArgument, response_id: str) -> dict[str, Any]:
    """Forget a response. If it is being made, that ends."""
    await responses.delete(response_id, key())
    return {"id": response_id, "object": "response", "deleted": True}


@ROUTER.post("/v1/responses/{response_id}/cancel")
@mark_unread
async def cancel_response(
    responses: ResponsesArgument, bodies: BodiesArgument, response_id: str
) -> Response:
    """End a response that is made in the background. One that has ended stays as it is."""
    _, request = await _find_stored(responses, response_id)
    if not request.is_background:
        raise InvalidRequestError("Cannot cancel a synchronous response.")
    await responses.cancel(response_id, key())
    stored = await responses.find(response_id, key())
    return bytes_response(await bodies.work(preparation.response_json, *preparation.record(stored)))


@ROUTER.get("/v1/responses/{response_id}/input_items")
async def response_input_items(
    responses: ResponsesArgument,
    bodies: BodiesArgument,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The conversation that a response answers, that of `previous_response_id` included."""
    stored, _ = await _find_stored(responses, response_id)
    query = orjson.dumps([order, limit, after]) + b"\n"
    return bytes_response(await bodies.work(preparation.page, query, *preparation.record(stored)))


async def _find_stored(
    responses: BackgroundResponses, response_id: str
) -> tuple[StoredResponse, StoredRequest]:
    """The caller's response, and its request. Raises ResponseNotFoundError, and PermissionDeniedError if
    the caller may use its model no more."""
    stored = await responses.find(response_id, key())
    return stored, _check_model(stored)


def _check_model(stored: StoredResponse) -> StoredRequest:
    request = StoredRequest.unpack(stored.stored_request)
    request_context.current().check_model(request.model, request.model)
    return request


async def _find_kept(responses: BackgroundResponses, after: After) -> list[StoredResponse]:
    """The response that a request goes on from, if there is one, and those with the items that it refers
    to. Raises PreviousResponseError, KeyLimitError, and PermissionDeniedError as above."""
    stored = await responses.find_items(after.item_ids, key()) if after.item_ids else []
    if after.response_id is not None:
        try:
            stored.insert(0, await responses.find(after.response_id, key()))
        except ResponseNotFoundError:
            raise PreviousResponseError(after.response_id) from None
    for one in stored:
        _check_model(one)
    return stored


async def _follow_response(
    responses: BackgroundResponses, response_id: str
) -> AsyncGenerator[Event]:
    caller = request_context.current()
    with responses.open_requests.count(caller.holder):
        async for entry in responses.follow(response_id, key()):
            yield entry


async def _log(
    deltas: Deltas,
    stored: StoredRequest,
    owner: Owner,
    entries: list[Event],
    responses: BackgroundResponses | None,
) -> AsyncGenerator[Event]:
    """The log of a response that ends when its client leaves, which `entries` has too. It is kept before
    its end is told."""
    try:
        async for _, delta in deltas:
            entries.append(Event(time.time(), delta))
            if responses is not None and entries[-1].is_last:
                await responses.keep(stored, owner, entries)
            yield entries[-1]
    except CorralError as error:
        entries.append(Event(time.time(), error=error))
        if responses is not None:
            await responses.keep(stored, owner, entries)
        yield entries[-1]
    finally:
        await deltas.aclose()
