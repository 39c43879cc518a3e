"""The routes of OpenAI's files and batches.

Source: OpenAI's API reference, "Files" and "Batch".
"""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from serve_app.apis.batches import preparation
from serve_app.apis.batches.executor import MOST_FILE_BYTES, BatchExecutor
from serve_app.apis.batches.objects import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from serve_app.apis.batches.store import BatchStore, is_full
from serve_app.base.databases import make_private
from serve_app.base.errors import InvalidRequestError, NotSupportedError, StorageFullError
from serve_app.server.access.bodies import mark_streamed, mark_unread
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import of_app, prepare_with
from serve_app.server.http.description import also, api_router, form
from serve_app.server.http.upload_form import UploadForm

_BUFFER_BYTES = 2**20
_PIECE_BYTES = 2**16  # each download that is not read holds two
_EXPIRES_S = 3600, 2_592_000
FileLimit = Annotated[int, Query(ge=1, le=10_000)]
BatchLimit = Annotated[int, Query(ge=1, le=100)]
T = TypeVar("T")


_NOT_CONFIGURED = "Files and batches are not configured. Set ingress.batch.folder."
BatchesArgument = Annotated[
    BatchExecutor, of_app("batches", lambda: NotSupportedError(_NOT_CONFIGURED))
]
ROUTER = api_router()
_UPLOAD = form(
    {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            "purpose": {"const": "batch"},
            "expires_after[seconds]": {"type": "integer", "minimum": 3600},
        },
        "required": ["file", "purpose"],
    }
)


def _owner() -> str:
    """The owner of the caller's files: its API key; without keys, all callers together."""
    return request_context.current().key_name


@ROUTER.post("/v1/files", openapi_extra=_UPLOAD)
@mark_streamed
async def create_file(request: Request, batches: BatchesArgument) -> FileObject:
    """Upload a file of requests, as a form: `file`, and `purpose`, which is `batch`."""
    store, owner = batches.store, _owner()
    await _do(store, store.check_room, owner)
    arriving = store.folder / "arriving" / uuid.uuid4().hex
    try:
        form = await _receive_form(request, batches, arriving)
        return await _do(store, _take_file, store, owner, arriving, form)
    finally:
        await asyncio.to_thread(arriving.unlink, missing_ok=True)


@ROUTER.get("/v1/files")
async def list_files(
    batches: BatchesArgument,
    purpose: str | None = None,
    limit: FileLimit = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """Your files, the newest first."""
    newest_first = order == "desc"
    files = await asyncio.to_thread(
        batches.store.files, _owner(), purpose, limit, after, newest_first=newest_first
    )
    return FileList.of(files, limit)


@ROUTER.get("/v1/files/{file_id}")
async def get_file(batches: BatchesArgument, file_id: str) -> FileObject:
    """The file with that id, without its content."""
    return await asyncio.to_thread(batches.store.file, _owner(), file_id)


@ROUTER.get(
    "/v1/files/{file_id}/content",
    response_class=StreamingResponse,
    responses=also("application/octet-stream"),
)
async def get_file_content(batches: BatchesArgument, file_id: str) -> Response:
    """The content of a file."""
    store = batches.store
    file = await asyncio.to_thread(store.file, _owner(), file_id)
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(
        _contents(store.path(file_id)), media_type="application/octet-stream", headers=headers
    )


@ROUTER.delete("/v1/files/{file_id}")
async def delete_file(batches: BatchesArgument, file_id: str) -> DeletedFile:
    """Delete a file that no running batch needs."""
    await _do(batches.store, batches.store.delete_file, _owner(), file_id)
    return DeletedFile(id=file_id)


@ROUTER.post("/v1/batches")
async def create_batch(
    batches: BatchesArgument, body: Annotated[BatchRequest, prepare_with(preparation.batch)]
) -> BatchObject:
    """Have a file's requests answered, behind everybody else's."""
    store = batches.store
    batch = await _do(store, store.add_batch, _owner(), body)
    batches.wake()
    return batch


@ROUTER.get("/v1/batches")
async def list_batches(
    batches: BatchesArgument, limit: BatchLimit = 20, after: str | None = None
) -> BatchList:
    """Your batches, the newest first."""
    listed = await asyncio.to_thread(batches.store.batches, _owner(), limit, after)
    return BatchList.of(listed, limit)


@ROUTER.get("/v1/batches/{batch_id}")
async def get_batch(batches: BatchesArgument, batch_id: str) -> BatchObject:
    """The batch with that id, and how far it is."""
    return await asyncio.to_thread(batches.store.batch, _owner(), batch_id)


@ROUTER.post("/v1/batches/{batch_id}/cancel")
@mark_unread
async def cancel_batch(batches: BatchesArgument, batch_id: str) -> BatchObject:
    """Have a batch end soon; what has been answered by then is kept."""
    batch = await _do(batches.store, batches.store.cancel, _owner(), batch_id)
    batches.wake()
    return batch


async def _receive_form(request: Request, batches: BatchExecutor, arriving: Path) -> UploadForm:
    """The form, whose file is on the disk. Raises CorralError."""
    store, buffer = batches.store, bytearray()
    content_type = request.headers.get("content-type", "")
    form = UploadForm(content_type, buffer.extend, MOST_FILE_BYTES)

    async def take(piece: bytes) -> None:
        form.feed(piece)
        if len(buffer) >= _BUFFER_BYTES:
            await _do(store, _append, arriving, bytes(buffer))
            buffer.clear()

    holder = request_context.current().holder
    await batches.uploads.stream(holder, request.headers, request.receive, take)
    await _do(store, _append, arriving, bytes(buffer))
    if not form.complete:
        raise InvalidRequestError("The form ends too early.")
    return form


def _append(path: Path, data: bytes) -> None:
    make_private(path)
    with path.open("ab") as file:
        file.write(data)


async def _do(store: BatchStore, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    try:
        return await asyncio.to_thread(function, *arguments, **options)
    except (OSError, sqlite3.Error) as error:
        if not is_full(error, store.folder):
            raise
        raise StorageFullError("The disk for files and batches is full.") from None


def _take_file(store: BatchStore, owner: str, arriving: Path, form: UploadForm) -> FileObject:
    if form.filename is None:
        raise InvalidRequestError("Field required: the form has no file.", "file")
    if form.fields.get("purpose") != "batch":
        raise InvalidRequestError("`purpose` must be `batch`.", "purpose")
    seconds = form.fields.get("expires_after[seconds]")
    least, most = _EXPIRES_S
    if seconds is not None and not (seconds.isdecimal() and least <= float(seconds) <= most):
        raise InvalidRequestError(
            f"`expires_after[seconds]` must be {least} to {most}.", "expires_after"
        )
    expires_s = None if seconds is None else float(seconds)
    return store.add_file(owner, arriving, form.filename, "batch", expires_s)


async def _contents(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece
    finally:
        await asyncio.to_thread(file.close)
