"""The routes of OpenAI's files and batches.

Source: OpenAI's API reference, "Files" and "Batch".
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from serve_app.errors import (
    InvalidRequestError,
    RateLimitError,
    SlowRequestError,
)
from serve_app.ingress.batch import preparation
from serve_app.ingress.batch.multipart import UploadForm
from serve_app.ingress.batch.objects import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    paged,
)
from serve_app.ingress.batch.service import MOST_UPLOADS, BatchService
from serve_app.ingress.batch.store import BatchStore
from serve_app.ingress.http import request_context
from serve_app.ingress.http.dependencies import prepared
from serve_app.ingress.http.limits.bodies import streamed, unread

_BUFFER_BYTES = 2**20
_PROGRESS_S, _MIN_RATE = 10.0, 500
"""So many seconds of a file must bring so many bytes each."""
_EXPIRES_S = 3600, 2_592_000
Limit = Annotated[int, Query(ge=1, le=10_000)]


async def _service(request: Request) -> BatchService:
    service: BatchService = request.app.state.batches
    return service


ServiceArgument = Annotated[BatchService, Depends(_service)]
ROUTER = APIRouter()


def _owner() -> str:
    """Whose files these are: an API key's; without keys, those of all who may ask."""
    caller = request_context.current()
    return "" if caller.account is None else caller.account.key.name


@ROUTER.post("/v1/files")
@streamed
async def create_file(request: Request, service: ServiceArgument) -> FileObject:
    """Upload a file of requests, as a form: `file`, and `purpose`, which is `batch`."""
    store, owner = service.store, _owner()
    if service.uploads.locked():
        raise RateLimitError(f"{MOST_UPLOADS} files are being uploaded here.", 1)
    async with service.uploads:
        await asyncio.to_thread(store.check_room, owner)
        arriving = store.folder / f"arriving-{uuid.uuid4().hex}"
        try:
            form = await _received(request, arriving, store.limits.max_file_bytes)
            return await asyncio.to_thread(_taken, store, owner, arriving, form)
        finally:
            arriving.unlink(missing_ok=True)


@ROUTER.get("/v1/files")
async def list_files(
    service: ServiceArgument,
    purpose: str | None = None,
    limit: Limit = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """Your files, the newest first."""
    newest_first = order == "desc"
    found = await asyncio.to_thread(
        service.store.files, _owner(), purpose, limit, after, newest_first=newest_first
    )
    return paged(FileList, found, limit)  # type: ignore[no-any-return]


@ROUTER.get("/v1/files/{file_id}")
async def get_file(service: ServiceArgument, file_id: str) -> FileObject:
    """One file."""
    return await asyncio.to_thread(service.store.file, _owner(), file_id)


@ROUTER.get("/v1/files/{file_id}/content", response_model=None)
async def get_file_content(service: ServiceArgument, file_id: str) -> Response:
    """The content of a file."""
    store = service.store
    found = await asyncio.to_thread(store.file, _owner(), file_id)
    headers = {"content-length": str(found.bytes)}
    return StreamingResponse(
        _contents(store.path(file_id)), media_type="application/octet-stream", headers=headers
    )


@ROUTER.delete("/v1/files/{file_id}")
async def delete_file(service: ServiceArgument, file_id: str) -> DeletedFile:
    """Delete a file that no running batch needs."""
    await asyncio.to_thread(service.store.delete_file, _owner(), file_id)
    return DeletedFile(id=file_id)


@ROUTER.post("/v1/batches")
async def create_batch(
    service: ServiceArgument, body: Annotated[BatchRequest, prepared(preparation.batch)]
) -> BatchObject:
    """Have a file's requests answered, behind everybody else's."""
    store = service.store
    batch = await asyncio.to_thread(store.add_batch, _owner(), body)
    service.wake()
    return batch


@ROUTER.get("/v1/batches")
async def list_batches(
    service: ServiceArgument, limit: Limit = 20, after: str | None = None
) -> BatchList:
    """Your batches, the newest first."""
    found = await asyncio.to_thread(service.store.batches, _owner(), limit, after)
    return paged(BatchList, found, limit)  # type: ignore[no-any-return]


@ROUTER.get("/v1/batches/{batch_id}")
async def get_batch(service: ServiceArgument, batch_id: str) -> BatchObject:
    """One batch, and how far it is."""
    return await asyncio.to_thread(service.store.batch, _owner(), batch_id)


@ROUTER.post("/v1/batches/{batch_id}/cancel")
@unread
async def cancel_batch(service: ServiceArgument, batch_id: str) -> BatchObject:
    """Have a batch end soon; what has been answered by then is kept."""
    batch = await asyncio.to_thread(service.store.cancel, _owner(), batch_id)
    service.wake()
    return batch


async def _received(request: Request, arriving: Path, max_bytes: int) -> UploadForm:
    """The form, whose file is on the disk. Raises CorralError."""
    buffer = bytearray()
    form = UploadForm(request.headers.get("content-type", ""), buffer.extend, max_bytes)
    pieces = aiter(request.stream())
    file = await asyncio.to_thread(arriving.open, "wb")
    try:
        while not form.complete:
            await _progress(form, pieces)
            if len(buffer) >= _BUFFER_BYTES or form.complete:
                await asyncio.to_thread(file.write, bytes(buffer))
                buffer.clear()
    except (StopAsyncIteration, ClientDisconnect):
        raise InvalidRequestError("The form ends too early.") from None
    except TimeoutError:
        raise SlowRequestError(
            f"The file came too slowly. Send at least {_MIN_RATE} bytes in each {_PROGRESS_S:.0f} seconds."
        ) from None
    finally:
        await asyncio.to_thread(file.close)
    return form


async def _progress(form: UploadForm, pieces: AsyncIterator[bytes]) -> None:
    """As many bytes as must come, or as a write is worth, or the end."""
    n_bytes = 0
    async with asyncio.timeout(_PROGRESS_S):
        while not form.complete and n_bytes < _MIN_RATE * _PROGRESS_S:
            piece = await anext(pieces)
            n_bytes += len(piece)
            form.feed(piece)


def _taken(store: BatchStore, owner: str, arriving: Path, form: UploadForm) -> FileObject:
    if form.filename is None:
        raise InvalidRequestError("Field required: the form has no file.", "file")
    if form.fields.get("purpose") != "batch":
        raise InvalidRequestError("`purpose` must be `batch`.", "purpose")
    given = form.fields.get("expires_after[seconds]")
    least, most = _EXPIRES_S
    if given is not None and not (given.isdecimal() and least <= int(given) <= most):
        raise InvalidRequestError(
            f"`expires_after[seconds]` must be {least} to {most}.", "expires_after"
        )
    expires_s = None if given is None else float(given)
    return store.add_file(owner, arriving, form.filename, "batch", expires_s)


async def _contents(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, _BUFFER_BYTES):
            yield piece
    finally:
        await asyncio.to_thread(file.close)
