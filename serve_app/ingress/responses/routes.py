"""The routes that make OpenAI's responses.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from serve_app.errors import (
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    PreviousResponseError,
    ResponseNotFoundError,
)
from serve_app.ingress.generation import generation
from serve_app.ingress.generation.generation import Deltas
from serve_app.ingress.generation.preparation import PromptLength
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.http.dependencies import ModelsArgument, PreparedBody
from serve_app.ingress.model_registry import find
from serve_app.ingress.openai.answers import InputTokens
from serve_app.ingress.responses import preparation, serving, stored
from serve_app.ingress.responses.background import BackgroundResponses
from serve_app.ingress.responses.log import Event, StoredRequest
from serve_app.ingress.responses.preparation import After, PreparedResponse
from serve_app.ingress.responses.serving import ResponseAnswer
from serve_app.ingress.responses.store import Owner
from serve_app.ingress.responses.stored import ResponsesArgument
from serve_app.ingress.workers.bodies import Bodies
from serve_app.ingress.workers.worker import Models

T = TypeVar("T")
Keep = Callable[[list[Event]], Awaitable[None]]


ROUTER = APIRouter()


@dataclass(frozen=True)
class Continued(PreparedBody[T | After]):
    """The dependency on a body that may go on from an earlier response, whose conversation it is then
    prepared with by `prepare_after`."""

    prepare_after: Callable[[Models, bytes], T]

    async def __call__(self, request: Request) -> T:
        """Read the body in a worker. Raises CorralError."""
        bodies: Bodies = request.app.state.bodies
        pieces = await bodies.pieces(request)
        result = await bodies.work(self.prepare, *pieces)
        if not isinstance(result, After):
            return result
        request_context.current().ignored.clear()  # they are told again
        before, output = await _conversation(request.app.state.responses, result.response_id)
        pieces = preparation.with_conversation(before, output, pieces)
        return await bodies.work(self.prepare_after, *pieces)


async def _conversation(
    responses: BackgroundResponses, response_id: str
) -> tuple[bytes, Sequence[object]]:
    try:
        stored_request, entries = await responses.found(response_id, stored.key())
        answer = await asyncio.to_thread(stored.told, responses.models, stored_request, entries)
    except ResponseNotFoundError:
        raise PreviousResponseError(response_id) from None
    if not (entries and entries[-1].is_last):
        message = f"The response {response_id!r} is still being made."
        raise InvalidRequestError(message, "previous_response_id")
    return stored_request.items, answer.whole()["output"]


@ROUTER.post("/v1/responses", response_model=None)
@ROUTER.post("/responses", response_model=None)
async def responses(
    models: ModelsArgument,
    responses: ResponsesArgument,
    prepared: Annotated[
        PreparedResponse, Depends(Continued(preparation.response, preparation.response_after))
    ],
) -> Response:
    """Answer a chat as a response, which is kept for some minutes unless `store` is false; `stream`
    sends server-sent events, and `background` does not wait for it."""
    # Kept responses are few, and those of who chats: a batch's would take their places.
    may_keep = responses.keep_any and not request_context.current().is_batch_line
    told = prepared.asked | ({} if may_keep else {"store": False})
    wanted = prepared.chat.generation
    if told["background"] and not responses.keep_any:
        raise NotSupportedError(
            "This server keeps no responses, so none can run in the background."
        )
    model = find(models, wanted.model)
    (started,) = generation.requests(f"resp_{uuid.uuid4().hex}", wanted)
    made = StoredRequest(
        model.id,
        int(time.time()),
        told,
        started,
        prepared.chat.tools,
        prepared.chat.thinks,
        wanted.return_progress,
        prepared.items,
    )
    answer = ResponseAnswer(
        made.id,
        model.id,
        told,
        generation.output_parser(model, prepared.chat, in_pieces=True),
        generation.token_counter(model),
        return_progress=wanted.return_progress,
        timings_per_token=wanted.timings_per_token,
        obfuscates=prepared.obfuscates,
        created=made.created,
    )
    if told["background"]:
        response = await responses.start(made, _owner())
        if not wanted.stream:
            return JSONResponse(answer.whole())
        entries = response.follow(0)
    else:
        keep = _keeping(responses, made) if told["store"] else None
        entries = _logged(await generation.start(model, [started]), keep)
    if wanted.stream:
        return sse.EventStream(serving.events(answer, entries), wanted.sse_ping_interval)
    return JSONResponse(await serving.collect(answer, entries))


@ROUTER.post("/v1/responses/input_tokens")
@ROUTER.post("/responses/input_tokens")
async def response_input_tokens(
    models: ModelsArgument,
    length: Annotated[
        PromptLength,
        Depends(Continued(preparation.input_tokens, preparation.input_tokens_after)),
    ],
) -> InputTokens:
    """How many tokens the prompt of such a response has."""
    return InputTokens(input_tokens=await generation.n_tokens(models, length))


def _owner() -> Owner:
    return Owner(stored.key(), request_context.current().holder)


def _keeping(responses: BackgroundResponses, made: StoredRequest) -> Keep:
    """A function that keeps it for this task's caller."""
    responses.prepare()
    owner = _owner()
    return lambda entries: responses.keep(made, owner, entries)


async def _logged(deltas: Deltas, keep: Keep | None) -> AsyncGenerator[Event]:
    """The log of a response that ends when its client leaves. It is kept before its end is told."""
    entries: list[Event] = []
    try:
        async for _, delta in deltas:
            entry = Event(delta, time.time())
            if keep is not None:
                entries.append(entry)
                if entry.is_last:
                    await keep(entries)
            yield entry
    except CorralError as error:
        entry = Event(error, time.time())
        if keep is not None:
            await keep([*entries, entry])
        yield entry
    finally:
        await deltas.aclose()
