"""The routes that make OpenAI's responses.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.errors import (
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    PreviousResponseError,
    ResponseNotFoundError,
)
from serve_app.ingress.generation import chat, generation
from serve_app.ingress.generation.generation import Deltas
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai.answers import InputTokens
from serve_app.ingress.responses import preparation, serving, stored
from serve_app.ingress.responses.log import Entry, Recipe
from serve_app.ingress.responses.preparation import After
from serve_app.ingress.responses.runs import Runs
from serve_app.ingress.responses.serving import ResponseAnswer
from serve_app.ingress.responses.store import Owner
from serve_app.ingress.workers.bodies import Bodies
from serve_app.ingress.workers.worker import Models

T = TypeVar("T")
Keep = Callable[[list[Entry]], Awaitable[None]]


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies, runs: Runs) -> None:
    """Add the routes."""

    @app.post("/v1/responses", response_model=None)
    @app.post("/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """Answer a chat as a response, which is kept for some minutes unless `store` is false; `stream`
        sends server-sent events, and `background` does not wait for it."""
        read = _Reader(bodies, runs, await bodies.pieces(request))
        asked = await read(preparation.response, preparation.response_after)
        told = asked.asked | ({} if runs.keep_any else {"store": False})
        wanted = asked.chat.generation
        if told["background"] and not runs.keep_any:
            raise NotSupportedError(
                "This server keeps no responses, so none can run in the background."
            )
        model = find(models, wanted.model)
        (started,) = generation.requests(f"resp_{uuid.uuid4().hex}", wanted)
        made = Recipe(
            model.id,
            int(time.time()),
            told,
            started,
            asked.chat.tools,
            asked.chat.thinks,
            wanted.return_progress,
            asked.items,
        )
        answer = ResponseAnswer(
            made.id,
            model.id,
            told,
            chat.parser(model, asked.chat, in_pieces=True),
            return_progress=wanted.return_progress,
            timings_per_token=wanted.timings_per_token,
            obfuscates=asked.obfuscates,
            created=made.created,
        )
        if told["background"]:
            run = await runs.start(made, _owner())
            if not wanted.stream:
                return JSONResponse(answer.whole())
            entries = run.follow(0)
        else:
            keep = _keeping(runs, made) if told["store"] else None
            entries = _logged(await generation.start(model, [started]), keep)
        if wanted.stream:
            return sse.EventStream(serving.events(answer, entries), wanted.sse_ping_interval)
        return JSONResponse(await serving.collect(answer, entries))

    @app.post("/v1/responses/input_tokens")
    @app.post("/responses/input_tokens")
    async def response_input_tokens(request: Request) -> InputTokens:
        """How many tokens the prompt of such a response has."""
        read = _Reader(bodies, runs, await bodies.pieces(request))
        found = await read(preparation.input_tokens, preparation.input_tokens_after)
        return InputTokens(input_tokens=await generation.n_tokens(runs.models, found))

    stored.add(app, models, bodies, runs)


class _Reader:
    """Reads one body, with the conversation that it goes on from, if it does."""

    def __init__(self, bodies: Bodies, runs: Runs, pieces: list[bytes]) -> None:
        self._bodies = bodies
        self._runs = runs
        self._pieces = pieces

    async def __call__(
        self,
        alone: Callable[[Models, bytes], T | After],
        behind: Callable[[Models, bytes], T],
    ) -> T:
        """A worker's result for it. Raises CorralError."""
        found = await self._bodies.work(alone, *self._pieces)
        if not isinstance(found, After):
            return found
        request_context.current().ignored.clear()  # they are told again
        before, output = await self._conversation(found.response_id)
        pieces = preparation.with_conversation(before, output, self._pieces)
        return await self._bodies.work(behind, *pieces)

    async def _conversation(self, response_id: str) -> tuple[bytes, Sequence[object]]:
        key = stored.key()
        try:
            recipe, entries = await self._runs.found(response_id, key)
            answer = stored.told(self._runs.models, recipe, entries)
        except ResponseNotFoundError:
            raise PreviousResponseError(response_id) from None
        if not (entries and entries[-1].is_last):
            message = f"The response {response_id!r} is still being made."
            raise InvalidRequestError(message, "previous_response_id")
        return recipe.items, answer.whole()["output"]


def _owner() -> Owner:
    return Owner(stored.key(), request_context.current().holder)


def _keeping(runs: Runs, made: Recipe) -> Keep:
    """A function that keeps it for this task's caller."""
    runs.prepare()
    owner = _owner()
    return lambda entries: runs.keep(made, owner, entries)


async def _logged(deltas: Deltas, keep: Keep | None) -> AsyncGenerator[Entry]:
    """The log of a response that ends when its client leaves. It is kept before its end is told."""
    entries: list[Entry] = []
    try:
        async for _, delta in deltas:
            entry = Entry(delta, time.time())
            if keep is not None:
                entries.append(entry)
                if entry.is_last:
                    await keep(entries)
            yield entry
    except CorralError as error:
        entry = Entry(error, time.time())
        if keep is not None:
            await keep([*entries, entry])
        yield entry
    finally:
        await deltas.aclose()
