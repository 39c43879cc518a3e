"""The work on one batch, from wherever it is to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from serve_app.ingress.batch.journal import EXPIRED, BatchJournal, BatchLine, LineResult
from serve_app.ingress.batch.pace import BatchPace
from serve_app.ingress.batch.store import BatchStore, ClaimedBatch

_RENEW_S, _LOOK_S, _COUNT_S = 2.0, 0.5, 1.0
_PAGE = 64
"""Lines that are read ahead."""
_FLUSH_S = 0.25
"""So long an answer waits for others to be written with."""
T = TypeVar("T")


class LineClient(Protocol):
    """The methods that it needs of a BatchExecutor."""

    store: BatchStore
    most_lines: int

    async def answer(
        self, batch: ClaimedBatch, line: BatchLine, is_promoted: Callable[[], bool]
    ) -> LineResult:
        """Ask for a line, until there is an answer. `is_promoted` says whether it is in a hurry."""

    async def renew(self, batch: ClaimedBatch) -> str:
        """The status that the batch has now. Raises LeaseLostError."""


class BatchExecution:
    """Reads the lines, asks for those without an answer, and writes the files. Whatever was done before,
    by whichever process, is not done again; but for what was asked and not yet written."""

    def __init__(self, asker: LineClient, batch: ClaimedBatch, thread: ThreadPoolExecutor) -> None:
        """The thread is for the disk."""
        self._asker = asker
        self._store = asker.store
        self._batch = batch
        self._thread = thread
        self._status = batch.status
        self._answers: asyncio.Queue[LineResult | None] = asyncio.Queue()
        self._counted = 0.0
        self._pace = BatchPace(time.time(), batch.deadline, 0)

    async def _do(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def run(self) -> None:
        """Until the batch has ended. Raises LeaseLostError, OSError and sqlite3.Error."""
        batch = self._batch
        source = self._store.path(batch.input_file_id)
        run = await self._do(
            BatchJournal, self._store.folder / "runs", batch.id, source, batch.endpoint
        )
        try:
            await self._while_renewing(self._steps(run))
        except BaseException:
            await asyncio.shield(self._do(run.close))
            raise
        await self._do(run.delete)

    async def _while_renewing(self, steps: Coroutine[Any, Any, None]) -> None:
        working = asyncio.create_task(steps)
        try:
            while not (await asyncio.wait([working], timeout=_RENEW_S))[0]:
                self._status = await self._asker.renew(self._batch)
            await working
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _steps(self, run: BatchJournal) -> None:
        batch, store = self._batch, self._store
        ended = "cancelled"
        if batch.status in ("validating", "cancelling"):
            errors = await self._do(run.read, store.limits.max_lines)
            if errors and batch.status == "cancelling":
                await self._do(store.finish, batch.id, ended, {}, (0, 0, 0))
                return
            if errors:
                await self._do(store.fail, batch.id, errors)
                return
            if not await self._do(store.move, batch.id, "validating", "in_progress"):
                self._status = "cancelling"
        if self._status == "finalizing":
            ended = "expired" if await self._do(run.has_given_up) else "completed"
        elif self._status != "cancelling":
            await self._count(run)
            ended = await self._lines(run)
        if ended == "expired":
            await self._do(run.give_up, *EXPIRED)
        if ended != "cancelled":
            await self._do(store.move, batch.id, "in_progress", "finalizing")
        made = await self._do(run.export)
        await self._do(store.finish, batch.id, ended, made, await self._do(run.counts))

    async def _lines(self, run: BatchJournal) -> str:
        """Ask for all lines that have no answer. The status that the batch ends with."""
        lines: asyncio.Queue[BatchLine | None] = asyncio.Queue(_PAGE)
        n_askers = self._asker.most_lines
        n_lines, *n_ended = await self._do(run.counts)
        self._pace = BatchPace(time.time(), self._batch.deadline, n_lines - sum(n_ended))
        asking: asyncio.Future[Any] = asyncio.gather(
            self._feed(run, lines, n_askers), *(self._ask(lines) for _ in range(n_askers))
        )
        writing = asyncio.create_task(self._write(run))
        try:
            while not asking.done():
                if ended := self._ends():
                    return ended
                both: list[asyncio.Future[Any]] = [asking, writing]
                done, _ = await asyncio.wait(
                    both, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for one in done:
                    one.result()
            return "completed"
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.exception()  # was raised above, or is that it was cancelled
            self._answers.put_nowait(None)
            await writing

    def _ends(self) -> str:
        """As what, if it is to end before it is done."""
        if self._status == "cancelling":
            return "cancelled"
        return "expired" if time.time() >= self._batch.deadline else ""

    async def _feed(
        self, run: BatchJournal, lines: asyncio.Queue[BatchLine | None], n_askers: int
    ) -> None:
        last: BatchLine | None = None
        while page := await self._do(run.unanswered, _PAGE, last):
            for line in page:
                await lines.put(line)
            last = page[-1]
        for _ in range(n_askers):
            await lines.put(None)

    async def _ask(self, lines: asyncio.Queue[BatchLine | None]) -> None:
        while (line := await lines.get()) is not None:
            self._answers.put_nowait(await self._asker.answer(self._batch, line, self._rises))
            self._pace.answered(1, time.time())

    def _rises(self) -> bool:
        return self._pace.runs_out(time.time())

    async def _write(self, run: BatchJournal) -> None:
        """Until None comes."""
        found: list[LineResult | None] = []
        while None not in found:
            found = [await self._answers.get()]
            if found != [None]:
                await asyncio.sleep(_FLUSH_S)
            while not self._answers.empty():
                found.append(self._answers.get_nowait())
            await self._do(run.write, [one for one in found if one is not None])
            if time.monotonic() > self._counted + _COUNT_S:
                await self._count(run)

    async def _count(self, run: BatchJournal) -> None:
        self._counted = time.monotonic()
        await self._do(self._store.count, self._batch.id, *await self._do(run.counts))
