"""Works on batches, in every ingress: claims those that nobody works on, and asks for their lines."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.apis.batches import preparation
from serve_app.apis.batches.journal import EXPIRED, MOST_ERRORS, BatchJournal, LineResult, line_of
from serve_app.apis.batches.objects import LineError
from serve_app.apis.batches.preparation import BatchLine
from serve_app.apis.batches.store import BatchStore, ClaimedBatch, is_full
from serve_app.apis.batches.window import BatchPace, LineWindow
from serve_app.base.errors import CorralError, EngineClosedError, QueueFullError
from serve_app.base.values.requests import account
from serve_app.config.schema import BatchConfig
from serve_app.server.access.api_keys import KeyAccounts
from serve_app.server.access.auth import BATCH_LINE
from serve_app.server.access.bodies import BodyLimits, BodyReader
from serve_app.server.http.request_context import Caller
from serve_app.server.workers.pool import Workers

if TYPE_CHECKING:
    import httpx2

logger = logging.getLogger("corral.ingress")

_LOOK_S, _MOST_LOOK_S, _SWEEP_S = 1.0, 60.0, 60.0
_BATCHES, _BATCHES_EACH = 64, 4
"""The batches that one ingress works on at once, and those of one owner."""
_TRIES = 3
"""How often a line is asked for that the server fails to answer; while it is full, for ever."""
_MOST_PAUSE_S = 5.0
_PROMOTION_S = 1.0
"""The time between two looks whether a line that waits behind everybody should not wait any longer."""
_ROOM_S = 5.0
"""The time between two tries to write on a full disk."""
_RENEW_S, _COUNT_S = 2.0, 1.0
_PAGE = 64
"""Lines that are looked up together."""
_FLUSH_S = 0.25
"""The longest that an answer waits for others to be written with."""
_BUSY = (429, 503)
_FINAL = (501,)
"""Statuses of 500 and more that another try does not change."""
_LEASE_S = 15.0
"""A process that dies keeps others from its batches for so long at most."""
MOST_UPLOADS, MOST_UPLOADS_EACH = 32, 4
UPLOAD_S = 3600.0
MOST_FILE_BYTES = 200 * 2**20
"""OpenAI's limit."""
MOST_AT_ONCE = 256
"""Lines that an ingress asks the engines for at once. If they have fewer places, it asks for fewer."""
_FORM_BYTES = 64 * 2**10
"""The most bytes of an upload besides the file."""
T = TypeVar("T")


class LeaseLostError(Exception): ...


class DiskRoom:
    """The room on the disk of batches. While there is none, all work on batches waits here.

    Event loop only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_room, self._closed = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    def close(self) -> None:
        """Wait for room no more: calls raise what the disk says."""
        self._closed.set()

    async def wait(self) -> None:
        """Return when there is room, as far as anybody knows."""
        await self._has_room.wait()

    async def do(
        self, function: Callable[..., T], *arguments: Any, thread: Executor | None = None
    ) -> T:
        """The function's result, in a thread. While the disk is full, it is called again and again: a call
        that fails must have changed nothing."""
        run, is_waiting = asyncio.get_running_loop().run_in_executor, False
        try:
            while True:
                try:
                    return await run(thread, function, *arguments)
                except (OSError, sqlite3.Error) as error:
                    if self._closed.is_set() or not is_full(error, self._folder):
                        raise
                is_waiting = True
                if self._has_room.is_set():
                    logger.error("Batches wait: the disk of %s is full.", self._folder)
                    self._has_room.clear()
                # Unlike `wait_for`, a timeout never swallows a cancellation that comes with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ROOM_S):
                        await self._closed.wait()
        finally:
            if is_waiting and not self._has_room.is_set():
                logger.info("Batches go on: the disk of %s has room.", self._folder)
                self._has_room.set()


class BatchExecutor:
    """The work on batches of one ingress. Event loop only; what touches a disk runs in threads."""

    def __init__(
        self, app: ASGIApp, config: BatchConfig, workers: Workers, accounts: KeyAccounts | None
    ) -> None:
        """`app` is asked for lines. `workers` read the files. `accounts` are those who have keys. Raises
        OSError for a folder that cannot be used."""
        assert config.folder is not None
        self.app = app
        self.store = BatchStore(config.folder.expanduser(), config.keep_days)
        self.workers = workers
        self.uploads = BodyReader(
            BodyLimits(
                MOST_UPLOADS,
                max_each=MOST_UPLOADS_EACH,
                max_bytes=MOST_FILE_BYTES + _FORM_BYTES,
                timeout_s=UPLOAD_S,
            )
        )
        self._accounts = accounts
        self._lease_s = _LEASE_S
        self._holder = uuid.uuid4().hex
        self._working: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()

    @asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """Work on batches while the application is there."""
        self.window, self.room = LineWindow(MOST_AT_ONCE), DiskRoom(self.store.folder)
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self.room.close()
            tasks = [looking, *self._working.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._woken.set()

    @property
    def lines_each(self) -> int:
        """The lines of one batch that are on their way, or wait for a place."""
        return max(2, min(MOST_AT_ONCE, 2 * self.window.size) // max(1, len(self._working)))

    async def _look(self) -> None:
        """Take batches that nobody works on, for ever."""
        swept, pause_s = 0.0, _LOOK_S
        while True:
            try:
                if time.monotonic() > swept + _SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self.store.sweep)
                free = _BATCHES - len(self._working)
                claim = self.store.claim, self._holder, self._lease_s, free, _BATCHES_EACH
                for batch in await self.room.do(*claim) if free > 0 else ():
                    if batch.id not in self._working:  # its lease was not renewed in time
                        self._begin(batch)
                pause_s = _LOOK_S
            except Exception:
                logger.exception("The store of batches cannot be read.")
                pause_s = min(_MOST_LOOK_S, 2 * pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
            self._woken.clear()

    def _begin(self, batch: ClaimedBatch) -> None:
        task = asyncio.create_task(self._work(batch))
        self._working[batch.id] = task
        task.add_done_callback(lambda _: self._working.pop(batch.id, None))

    async def _work(self, batch: ClaimedBatch) -> None:
        logger.info("Batch %s: %s.", batch.id, batch.status)
        thread, failed = ThreadPoolExecutor(1, thread_name_prefix="corral-batch"), False
        try:
            await BatchExecution(self, batch, thread).run()
        except LeaseLostError:
            logger.warning("Batch %s: another ingress works on it.", batch.id)
        except Exception:
            failed = True
            logger.exception("Batch %s failed for now. It is tried again.", batch.id)
        finally:
            release = partial(self.store.release, self._holder, batch.id, failed=failed)
            with suppress(Exception):
                await asyncio.shield(asyncio.to_thread(release))
            thread.shutdown(wait=False)

    async def renew(self, batch: ClaimedBatch) -> str:
        status = await self.room.do(self.store.renew, self._holder, batch.id, self._lease_s)
        if status is None:
            raise LeaseLostError
        return status

    async def caller(
        self, batch: ClaimedBatch, request_id: str, is_promoted: bool
    ) -> Caller | None:
        """The name in which a line is asked for; None if that key is gone."""
        key_account = None
        if self._accounts is not None:
            await self._accounts.follow()
            key_account = self._accounts.find_by_name(batch.owner)
            if key_account is None:
                return None
        return Caller(
            request_id,
            key_account,
            "batch",
            is_operator=False,
            is_batch_line=True,
            is_promoted=is_promoted,
        )


class BatchExecution:
    """The work on one batch, from wherever it is to its end.

    It checks the lines, asks for those without an answer, and writes the files. Whatever was done before,
    by whichever process, is not done again; but for what was asked and not yet written."""

    def __init__(
        self, executor: BatchExecutor, batch: ClaimedBatch, thread: ThreadPoolExecutor
    ) -> None:
        self._executor = executor
        self._store = executor.store
        self._batch = batch
        self._thread = thread
        self._status = batch.status
        self._results: list[LineResult] = []
        """The results that are not written yet."""
        self._counted = 0.0
        self._pace = BatchPace(time.time(), batch.deadline, 0)
        self._patient_until = 0.0
        """The Unix time until which no line is promoted: the key has used up what it may."""

    async def _do(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._executor.room.do(function, *arguments, thread=self._thread)

    async def run(self) -> None:
        """Work alone until the batch has ended. Raises LeaseLostError, OSError and sqlite3.Error."""
        batch, source = self._batch, self._store.path(self._batch.input_file_id)
        folder = self._store.folder / "runs"
        self._journal = await self._do(BatchJournal, folder, batch.id, source)
        working = asyncio.create_task(self._steps())
        try:
            while not (await asyncio.wait([working], timeout=_RENEW_S))[0]:
                self._status = await self._executor.renew(batch)
            await working
        except BaseException:
            working.cancel()
            await asyncio.wait([working])
            await asyncio.shield(self._do(self._journal.close))
            raise

    async def _conclude(self, conclude: Callable[..., None], *arguments: Any) -> None:
        """End the batch and remove its journal in one call of its thread, which no cancelling divides."""

        def conclude_and_delete() -> None:
            conclude(self._batch.id, *arguments)
            self._journal.delete()

        await self._do(conclude_and_delete)

    def _end(self) -> str:
        """The status with which the batch ends before it is done; empty if it goes on."""
        if self._status == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= self._batch.deadline else ""

    async def _steps(self) -> None:
        batch, store = self._batch, self._store
        if self._status == "finalizing":
            end = "expired" if await self._do(self._journal.has_given_up) else "completed"
        else:
            errors = await self._check()
            is_checked = await self._do(lambda: self._journal.is_checked)
            if is_checked and not (errors or (await self._do(self._journal.counts))[0]):
                errors = [LineError(code="empty_file", message="The file has no lines.")]
            if errors:
                await self._conclude(store.fail, errors)
                return
            if not is_checked:
                await self._conclude(store.finish, self._end(), {}, (0, 0, 0))
                return
            if self._status == "validating":
                moved = await self._do(store.move, batch.id, "validating", "in_progress")
                self._status = "in_progress" if moved else "cancelling"
            end = self._end() or await self._lines()
        if end == "expired":
            await self._do(self._journal.give_up, *EXPIRED)
        if end != "cancelled":
            await self._do(store.move, batch.id, "in_progress", "finalizing")
        made = await self._do(self._journal.export)
        await self._conclude(store.finish, end, made, await self._do(self._journal.counts))

    # -- the file ---------------------------------------------------------------------------------

    async def _check(self) -> list[LineError]:
        errors: list[LineError] = []
        while not self._end() and len(errors) < MOST_ERRORS:
            chunk = await self._do(self._journal.next_chunk)
            if chunk is None:
                break
            checked = await self._check_lines(chunk.data) if chunk.data else []
            errors += await self._do(self._journal.note, chunk, checked)
        return errors[:MOST_ERRORS]

    async def _check_lines(self, data: bytes) -> list[BatchLine]:
        """The lines as a worker has checked them. A line that no worker can check is wrong."""
        head = f"{self._batch.endpoint}\n".encode()
        holder = account(self._batch.owner, background=True)
        while not self._end():
            try:
                return await self._executor.workers.run(holder, preparation.lines, head, data)
            except QueueFullError:
                await asyncio.sleep(_MOST_PAUSE_S)
            except EngineClosedError:
                raise
            except CorralError as error:
                middle = data.rfind(b"\n", 0, max(1, len(data) // 2)) + 1
                middle = middle or data.find(b"\n") + 1
                if middle in (0, len(data)):
                    wrong = LineError(code="invalid_line", message=error.message)
                    return [BatchLine(1, error=wrong)]
                first = await self._check_lines(data[:middle])
                n, rest = data[:middle].count(b"\n"), await self._check_lines(data[middle:])
                return [*first, *(line.move(n, middle) for line in rest)]
        return []

    # -- the lines --------------------------------------------------------------------------------

    async def _lines(self) -> str:
        """Ask for all lines that have no answer. The status that the batch ends with."""
        await self._count()
        n_lines, *n_ended = await self._do(self._journal.counts)
        self._pace = BatchPace(time.time(), self._batch.deadline, n_lines - sum(n_ended))
        asking = asyncio.create_task(self._ask_all())
        try:
            while not (await asyncio.wait([asking], timeout=_FLUSH_S))[0]:
                await self._write()
                if end := self._end():
                    return end
            asking.result()
            return "completed"
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.exception()  # was raised above, or is that it was cancelled
            await self._write()

    async def _ask_all(self) -> None:
        asking: set[asyncio.Task[None]] = set()
        last: BatchLine | None = None
        async with asyncio.TaskGroup() as group:
            while page := await self._do(self._journal.unanswered_lines, _PAGE, last):
                for line in page:
                    await self._executor.room.wait()
                    while len(asking) >= self._executor.lines_each:
                        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                    task = group.create_task(self._ask(line))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                last = page[-1]

    async def _ask(self, line: BatchLine) -> None:
        result = await self._result(line)
        self._results.append(result)
        self._pace.on_answers(1, time.time())

    def _is_promoted(self) -> bool:
        now = time.time()
        return now >= self._patient_until and self._pace.runs_out(now)

    async def _result(self, line: BatchLine) -> LineResult:
        """Ask for a line, until there is an answer. When the batch is promoted, the line is asked for again
        if it still waits behind everybody."""
        executor, batch, tries = self._executor, self._batch, 0
        while True:
            await executor.room.wait()
            async with executor.window.place(batch.owner, line.size) as place:
                is_promoted, request_id = self._is_promoted(), uuid.uuid4().hex
                caller = await executor.caller(batch, request_id, is_promoted)
                if caller is None:
                    error = {"code": "invalid_api_key", "message": "The batch's API key is gone."}
                    return LineResult(line.n, False, line_of(line.custom_id, None, error))
                body = await self._do(self._journal.body, line)
                asking = post(executor.app, batch.endpoint, body, caller)
                del body
                answer = await (asking if is_promoted else _unless(self._is_promoted, asking))
                if answer is None:
                    continue
                status = answer.status_code
                place.refused = status in _BUSY
            tries += status >= 500 and not place.refused
            is_final = status < 500 or status in _FINAL or tries >= _TRIES
            if is_final and not place.refused:
                break
            if is_promoted and status == 429:
                self._patient_until = time.time() + _retry_after_s(answer, _MOST_PAUSE_S)
            await asyncio.sleep(min(_retry_after_s(answer, 1.0), _MOST_PAUSE_S))
        result = line_of(line.custom_id, _response(answer, request_id))
        return LineResult(line.n, status < 400, result)

    async def _write(self) -> None:
        results, self._results = self._results, []
        if results:
            await self._do(self._journal.write, results)
            if time.monotonic() > self._counted + _COUNT_S:
                await self._count()

    async def _count(self) -> None:
        self._counted = time.monotonic()
        await self._do(self._store.count, self._batch.id, *await self._do(self._journal.counts))


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> httpx2.Response:
    """POST this JSON for that caller. Whatever the application raises is an answer with status 500, also
    if an answer with another status has begun. Cancelling this ends the request."""
    import httpx2  # only who has batches needs it

    least_status = 0

    async def answer_line(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal least_status
        try:
            await app({**scope, "state": {}, BATCH_LINE: caller}, receive, send)
        except Exception:
            least_status = 500
            raise

    headers = {"content-type": "application/json", "x-request-id": caller.request_id}
    request = httpx2.Request("POST", f"http://batch{path}", headers=headers, content=body)
    transport = httpx2.ASGITransport(answer_line, raise_app_exceptions=False)
    answer = await transport.handle_async_request(request)
    await answer.aread()
    answer.status_code = max(answer.status_code, least_status)
    return answer


def _retry_after_s(answer: httpx2.Response, default: float) -> float:
    seconds = answer.headers.get("retry-after", "")
    return float(seconds) if seconds.isdigit() else default


async def _unless(is_promoted: Callable[[], bool], asking: Coroutine[Any, Any, T]) -> T | None:
    """The answer; None if the batch is promoted before that."""
    task = asyncio.create_task(asking)
    try:
        while not (await asyncio.wait([task], timeout=_PROMOTION_S))[0]:
            if is_promoted():
                return None
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _response(answer: httpx2.Response, request_id: str) -> dict[str, Any]:
    """The answer as a field of a line. JSON is not read: lines break nowhere but between its values."""
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    body: Any = orjson.Fragment(answer.content.replace(b"\n", b" ")) if is_json else answer.text
    return {"status_code": answer.status_code, "request_id": request_id, "body": body}
