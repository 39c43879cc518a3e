"""The routes of OpenAI's transcriptions and translations.

Source: OpenAI's API reference, "Audio".
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import Response

from serve_app.apis.audio.preparation import TranscriptionRequest
from serve_app.apis.audio.serving import Transcriber
from serve_app.server.access.bodies import mark_streamed
from serve_app.server.http import request_context
from serve_app.server.http.description import also, api_router, form

ROUTER = api_router()
_ANSWERS = also("text/plain", "text/vtt", "text/event-stream")
_FIELDS = TranscriptionRequest.model_json_schema()
_FILE = {"file": {"type": "string", "format": "binary"}}
_FORM = form(_FIELDS | {"properties": _FIELDS["properties"] | _FILE, "required": ["file"]})


async def _transcriber(request: Request) -> AsyncIterator[Transcriber]:
    """The application's, with a place for the caller until the answer is sent."""
    transcriber: Transcriber = request.app.state.transcriber
    async with transcriber.places(request.headers).place(request_context.current().holder):
        yield transcriber


TranscriberArgument = Annotated[Transcriber, Depends(_transcriber)]


@ROUTER.post("/v1/audio/transcriptions", responses=_ANSWERS, openapi_extra=_FORM)
@ROUTER.post("/audio/transcriptions", responses=_ANSWERS, openapi_extra=_FORM)
@mark_streamed
async def transcribe(request: Request, transcriber: TranscriberArgument) -> Response:
    """The text that is spoken in a file, as a form with `file`; `stream` sends server-sent events."""
    return await transcriber.respond(request, translates=False)


@ROUTER.post("/v1/audio/translations", responses=_ANSWERS, openapi_extra=_FORM)
@mark_streamed
async def translate(request: Request, transcriber: TranscriberArgument) -> Response:
    """English text of what is spoken in a file, in whatever language; else like a transcription."""
    return await transcriber.respond(request, translates=True)
