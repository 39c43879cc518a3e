"""An engine that answers parts, behind the API's own code: what Ray Data runs in each actor of its pool."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import ray

from serve_app.apis.batches.executor import post
from serve_app.apis.batches.preparation import prefix_of
from serve_app.base import metrics
from serve_app.base.errors import ConfigError
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import IngressConfig
from serve_app.plugins.batch import parts
from serve_app.plugins.batch.rows import Question, Reading, parse_line
from serve_app.run.ingress import IngressPlace, IngressServer, IngressSettings
from serve_app.run.local.handle import EngineChild, LocalHandle, folder_for
from serve_app.server.http.request_context import Caller
from serve_app.store import shared_entries

AT_ONCE = 2
"""Parts that an engine has at a time: the second one's lines take the slots that the first one's leave."""
_LINES_PER_SLOT = 2
_LOOK_S, _PAUSE_S = 0.5, 0.2
_BUSY = (429, 503)
_PATIENCE_S = 600.0

logger = logging.getLogger("corral.batch")


@dataclass(frozen=True, slots=True)
class PartSettings:
    model: ResolvedModel
    reading: Reading
    folder: Path


class _Asked(NamedTuple):
    row: Any
    question: Question | str
    """The question, or a text that says what is wrong with the line."""
    prefix: bytes


class Answerer:
    """An engine's process with its lease of cores, and the API's own code before it, as in a server of one
    machine. Ray Data calls it from several threads."""

    def __init__(self, work: PartSettings) -> None:
        """Raises CorralError if the model cannot be loaded."""
        self._work = work
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="corral-lines", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(work.model), self._loop).result()

    async def _start(self, model: ResolvedModel) -> None:
        self._places = asyncio.Semaphore(_LINES_PER_SLOT * model.options.n_slots)
        model = dataclasses.replace(
            model,
            options=dataclasses.replace(model.options, max_stall_ms=math.inf),
            aliases=("*",),  # requests may have been written for another server
            on_demand=None,
        )
        folder = _own_folder()
        metrics.keep_in(folder / "metrics")
        shared_entries.keep_in(folder / "entries")
        handle, child = LocalHandle(model, folder, _reserved_cpus()), EngineChild(folder)
        self._keeping = asyncio.create_task(handle.keep(child))
        loading = handle.call("is_there")
        while not (await asyncio.wait([loading], timeout=_LOOK_S))[0]:
            if self._keeping.done():
                await self._keeping
            if child.process.poll() is not None:
                raise ConfigError(f"The process of model {model.id} cannot load it.")
        place = IngressPlace("corral", "local", "", [handle])
        settings = IngressSettings(IngressConfig(allow_anonymous=True))
        ingress = await IngressServer.open([model], settings, place)
        self._app = ingress.api()

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, list[int]]:
        """Answer one part and write it. Returns the counts of its work, as one row."""
        lines = [bytes(line) for line in batch["lines"][0]]
        answering = self._answer(str(batch["name"][0]), lines)
        done = asyncio.run_coroutine_threadsafe(answering, self._loop).result()
        return {name: [n] for name, n in {**done, "read": int(batch["read"][0])}.items()}

    async def _answer(self, part: str, lines: list[bytes]) -> dict[str, int]:
        counts = dict.fromkeys(("lines", "errors", "prompt", "cached", "generated"), 0)
        if lines:  # else it was done before
            lines_read = [self._read(line) for line in lines]
            answers: dict[int, bytes] = {}
            alike = sorted(range(len(lines)), key=lambda n: lines_read[n].prefix)
            await asyncio.gather(*(self._line(n, lines_read[n], answers, counts) for n in alike))
            content = b"".join(answers[n] for n in range(len(lines)))
            await asyncio.to_thread(parts.write, self._work.folder / part, content)
        return counts

    def _read(self, line: bytes) -> _Asked:
        row = None
        try:
            row = parse_line(line)
            question = self._work.reading.question(row)
        except ValueError as error:
            return _Asked(row, str(error), b"")
        return _Asked(row, question, prefix_of(orjson.dumps(question.body)))

    async def _line(
        self, n: int, line: _Asked, answers: dict[int, bytes], counts: dict[str, int]
    ) -> None:
        """Whatever goes wrong with a line, the others go on."""
        try:
            status, answer = await self._await_answer(line.question)
            answers[n] = self._work.reading.line(line.row, status, answer)
        except Exception as error:
            logger.exception("A line could not be answered")
            status, answer = 500, _error_body(f"An unexpected error: {error!r}", "internal_error")
            answers[n] = self._work.reading.line(line.row, status, answer)
        counts["lines"] += 1
        counts["errors"] += status >= 400
        usage = answer.get("usage") or {}
        counts["prompt"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        counts["generated"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts["cached"] += details.get("cached_tokens") or 0

    async def _await_answer(self, question: Question | str) -> tuple[int, dict[str, Any]]:
        """The status and the answer, when there is room for it; or, after long, that there is none."""
        if isinstance(question, str):
            return 400, _error_body(question, "invalid_row")
        body = orjson.dumps(question.body)
        async with self._places:
            give_up_at = time.monotonic() + _PATIENCE_S
            while True:
                caller = Caller(request_id=uuid.uuid4().hex, is_batch_line=True)
                answer = await post(self._app, question.path, body, caller)
                if answer.status_code not in _BUSY or time.monotonic() > give_up_at:
                    return answer.status_code, orjson.loads(answer.content)
                await asyncio.sleep(_PAUSE_S)


def _own_folder() -> Path:
    """A new folder of this process. Ray kills processes, so what those left that are gone is removed."""
    for left in Path(tempfile.gettempdir()).glob("corral-batch-*"):
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return folder_for(Path(tempfile.mkdtemp(f"-{os.getpid()}", "corral-batch-")))


def _error_body(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _reserved_cpus() -> float:
    context: Any = ray.get_runtime_context()
    return float(context.get_assigned_resources().get("CPU", 0.0))
