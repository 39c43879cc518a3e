"""Works on batches, in every ingress: claims those that nobody works on, and asks for their lines."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from starlette.types import ASGIApp

from serve_app.ingress.batch.client import LineResponse, post
from serve_app.ingress.batch.execution import BatchExecution
from serve_app.ingress.batch.journal import BatchLine, LineResult, line_of
from serve_app.ingress.batch.store import BatchStore, ClaimedBatch
from serve_app.ingress.batch.window import LineWindow
from serve_app.ingress.http.api_keys import KeyAccounts
from serve_app.ingress.http.request_context import Caller

logger = logging.getLogger("corral.ingress")

_LOOK_S, _SWEEP_S = 1.0, 60.0
_BATCHES = 4
"""Batches that one ingress works on at once."""
_TRIES = 3
"""How often a line is asked for that the server fails to answer; while it is full, for ever."""
_MOST_PAUSE_S = 5.0
_RISE_S = 1.0
"""So often is looked whether a line that waits behind everybody should not wait any longer."""


class LeaseLostError(Exception):
    """Another process works on the batch."""


class BatchExecutor:
    """One ingress's. Event loop only; what touches a disk runs in threads."""

    def __init__(
        self,
        app: ASGIApp,
        store: BatchStore,
        accounts: KeyAccounts | None,
        most_lines: int,
        lease_s: float,
    ) -> None:
        """Lines are asked of `app`, at most so many at once. `accounts` are those who have keys."""
        self._app = app
        self.store = store
        self._accounts = accounts
        self.most_lines = most_lines
        self._lease_s = lease_s
        self._holder = uuid.uuid4().hex
        self._working: dict[str, asyncio.Task[None]] = {}
        self._woken = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """Lines by how they ended: `completed`, `failed`; and `refused`, which are asked for again."""

    @asynccontextmanager
    async def running(self, _: object = None) -> AsyncIterator[None]:
        """While the application is there."""
        self._window = LineWindow(self.most_lines)
        looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            tasks = [looking, *self._working.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        """There is a new batch."""
        self._woken.set()

    async def _look(self) -> None:
        """For ever: take what nobody works on."""
        swept = 0.0
        while True:
            try:
                free = _BATCHES - len(self._working)
                if free > 0:
                    claimed = await asyncio.to_thread(
                        self.store.claim, self._holder, self._lease_s, free
                    )
                    for batch in claimed:
                        self._begin(batch)
                if time.monotonic() > swept + _SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self.store.delete_expired)
            except Exception:
                logger.exception("The store of batches cannot be read.")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK_S)
            self._woken.clear()

    def _begin(self, batch: ClaimedBatch) -> None:
        task = asyncio.create_task(self._work(batch))
        self._working[batch.id] = task
        task.add_done_callback(lambda _: self._working.pop(batch.id, None))

    async def _work(self, batch: ClaimedBatch) -> None:
        logger.info("Batch %s: %s.", batch.id, batch.status)
        thread = ThreadPoolExecutor(1, thread_name_prefix="corral-batch")
        try:
            await BatchExecution(self, batch, thread).run()
        except LeaseLostError:
            logger.warning("Batch %s: another ingress works on it.", batch.id)
        except Exception:
            logger.exception("Batch %s failed for now. It is tried again.", batch.id)
            await asyncio.sleep(_MOST_PAUSE_S)
        finally:
            with suppress(Exception):
                await asyncio.shield(asyncio.to_thread(self.store.release, self._holder, batch.id))
            thread.shutdown(wait=False)

    def caller(
        self, batch: ClaimedBatch, request_id: str, *, is_promoted: bool = False
    ) -> Caller | None:
        """Whose name a line is asked in; None if that key is gone. A promoted line waits for nobody."""
        accounts = self._accounts
        account = None if accounts is None else accounts.named(batch.owner)
        if accounts is not None and account is None:
            return None
        return Caller(
            request_id,
            account,
            "batch",
            is_operator=False,
            is_batch_line=True,
            is_promoted=is_promoted,
        )

    async def answer(
        self, batch: ClaimedBatch, line: BatchLine, is_promoted: Callable[[], bool]
    ) -> LineResult:
        """Ask for a line, until there is an answer. When the batch is promoted, the line is asked for again
        if it still waits behind everybody."""
        tries = 0
        while True:
            await self._window.enter()
            refused = True
            try:
                request_id = uuid.uuid4().hex
                is_urgent = is_promoted()
                caller = self.caller(batch, request_id, is_promoted=is_urgent)
                if caller is None:
                    error = {"code": "invalid_api_key", "message": "The batch's API key is gone."}
                    return LineResult(line.n, False, line_of(line.custom_id, None, error))
                asking = post(self._app, batch.endpoint, line.body, caller)
                told = await (asking if is_urgent else _until(is_promoted, asking))
                refused = told is not None and told.status in (429, 503)
            finally:
                await asyncio.shield(self._window.leave(refused=refused))
            if told is None:
                continue
            tries += told.status >= 500 and not refused
            if not refused and (told.status < 500 or tries >= _TRIES):
                break
            self.counts["refused"] += 1
            await asyncio.sleep(min(told.retry_after_s or 1.0, _MOST_PAUSE_S))
        good = told.status < 400
        self.counts["completed" if good else "failed"] += 1
        return LineResult(line.n, good, line_of(line.custom_id, _response(told, request_id)))

    async def renew(self, batch: ClaimedBatch) -> str:
        """The status that the batch has now. Raises LeaseLostError."""
        status = await asyncio.to_thread(self.store.renew, self._holder, batch.id, self._lease_s)
        if status is None:
            raise LeaseLostError
        return status


async def _until(
    is_promoted: Callable[[], bool], asking: Coroutine[Any, Any, LineResponse]
) -> LineResponse | None:
    """The answer; None if the batch rose before that."""
    task = asyncio.create_task(asking)
    try:
        while not (await asyncio.wait([task], timeout=_RISE_S))[0]:
            if is_promoted():
                return None
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _response(told: LineResponse, request_id: str) -> dict[str, Any]:
    try:
        body = orjson.loads(told.body)
    except orjson.JSONDecodeError:
        body = told.body.decode("utf-8", "replace")
    return {"status_code": told.status, "request_id": request_id, "body": body}
