"""An engine that answers parts: what Ray Data runs in each actor of its pool."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import ray
from numpy.typing import NDArray

from serve_app.batch import parts
from serve_app.batch.rows import Question, Reading, parsed
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig
from serve_app.engine import Engine, GenerationRequest, TokenDelta
from serve_app.errors import EngineFailedError, NotSupportedError
from serve_app.folders import cache_folder
from serve_app.ingress.access.auth import Access
from serve_app.ingress.api import build_api
from serve_app.ingress.batch.executor import post
from serve_app.ingress.batch.preparation import prefix_of
from serve_app.ingress.http.request_context import Caller
from serve_app.ingress.model_registry import Answers, ModelFile, ModelInfo
from serve_app.openvino.exported.header import vocabulary_file
from serve_app.placement.pinning import place_on_cpus
from serve_app.progress import nowhere
from serve_app.store.models import locate
from serve_app.store.sharing import ClusterSharing
from serve_app.types import FetchingReplica, ReplicaStats, RequestRecord, Size, SlotAction

if TYPE_CHECKING:
    import httpx2


class LocalClient:
    """An `EngineClient` for an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        stream = self._engine.submit(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            self._engine.abort(request.id)

    async def media_tokens(self, sizes: Sequence[Size]) -> int:
        return self._engine.media_tokens(sizes)

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        return await asyncio.to_thread(self._engine.slot_files.act, action, slot_id, name)

    async def explain(self, request_id: str) -> Answers[RequestRecord]:
        return Answers(tuple(self._engine.explain(request_id)))

    async def embed(
        self, texts: tuple[tuple[int, ...], ...], client: str, *, background: bool = False
    ) -> NDArray[np.float32]:
        return await asyncio.wrap_future(self._engine.embed(texts, client, background=background))

    @property
    def is_loaded(self) -> bool:
        return True

    async def load(self) -> None:
        """Do nothing: the engine is loaded."""

    async def release(self) -> None:
        """Do nothing: the engine stays."""

    async def load_adapter(self, adapter: AdapterConfig) -> None:
        raise NotSupportedError("Adapters are loaded by servers only.", "load")

    async def unload_adapter(self, adapter_id: str) -> None:
        raise NotSupportedError("Adapters are unloaded by servers only.", "unload")

    async def replica_states(self) -> dict[str, int]:
        return {"RUNNING": 1}

    async def fetching(self) -> Sequence[FetchingReplica]:
        return ()

    async def stats(self) -> Answers[ReplicaStats]:
        engine = dataclasses.asdict(self._engine.stats())
        stats = ReplicaStats("bare", "bare", engine, latencies=self._engine.latencies())
        return Answers((stats,))


AT_ONCE = 2
"""Parts that an engine has at a time: the second one's lines take the slots that the first one's leave."""
_LINES_PER_SLOT = 2
_PAUSE_S = 0.2
_BUSY = (429, 503)
_PATIENCE_S = 600.0

logger = logging.getLogger("corral.batch")


@dataclass(frozen=True, slots=True)
class PartSettings:
    """The common settings of all parts."""

    model: ResolvedModel
    reading: Reading
    folder: Path


class _Asked(NamedTuple):
    row: Any
    question: Question | str
    """The question, or a text that says what is wrong with the line."""
    prefix: bytes


class Answerer:
    """An engine with its lease of cores, and the API's own code before it. Ray Data calls it from several
    threads. If the engine dies, so does the process: Ray starts another one and asks again."""

    def __init__(self, work: PartSettings) -> None:
        model, self._work = work.model, work
        path = locate(model.source, model.downloads, nowhere, ClusterSharing())
        placement = place_on_cpus(model, _reserved_cpus())
        options = dataclasses.replace(
            model.options,
            threads=placement.threads,
            computing_cpus=placement.computing_cpus,
            max_stall_s=None,
            profile_folder=cache_folder() / "profiles",
        )
        self._engine = Engine.load(path, options)
        file = ModelFile(
            str(vocabulary_file(path)),
            model.id,
            options.n_ctx_slot,
            defaults=model.defaults,
            aliases=("*",),  # requests may have been written for another server
            tags=model.tags,
            n_ctx_text=options.n_ctx_share,
        )
        served = ModelInfo.open(file).served_by(LocalClient(self._engine))
        self._app = build_api({model.id: served}, Access(allow_anonymous=True))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="corral-lines", daemon=True).start()
        self._places = asyncio.Semaphore(_LINES_PER_SLOT * options.n_slots)

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
            row = parsed(line)
            question = self._work.reading.question(row)
        except ValueError as error:
            return _Asked(row, str(error), b"")
        return _Asked(row, question, prefix_of(orjson.dumps(question.body)))

    async def _line(
        self, n: int, line: _Asked, answers: dict[int, bytes], counts: dict[str, int]
    ) -> None:
        """Whatever goes wrong with a line, the others go on."""
        try:
            status, answer = await self._answered(line.question)
            answers[n] = self._work.reading.line(line.row, status, answer)
        except Exception as error:
            logger.exception("A line could not be answered")
            status, answer = 500, _refusal(f"An unexpected error: {error!r}", "internal_error")
            answers[n] = self._work.reading.line(line.row, status, answer)
        counts["lines"] += 1
        counts["errors"] += status >= 400
        usage = answer.get("usage") or {}
        counts["prompt"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        counts["generated"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts["cached"] += details.get("cached_tokens") or 0

    async def _answered(self, question: Question | str) -> tuple[int, dict[str, Any]]:
        if isinstance(question, str):
            return 400, _refusal(question, "invalid_row")
        body = orjson.dumps(question.body)
        async with self._places:
            told = await self._asked(question.path, body)
        answer: dict[str, Any] = orjson.loads(told.content)
        return told.status_code, answer

    async def _asked(self, path: str, body: bytes) -> httpx2.Response:
        """The answer, when there is room for the request; or, after long, that there is none."""
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            caller = Caller(request_id=uuid.uuid4().hex, is_batch_line=True)
            answer = await post(self._app, path, body, caller)
            self._end_if_broken()
            if answer.status_code not in _BUSY or time.monotonic() > give_up_at:
                return answer
            await asyncio.sleep(_PAUSE_S)

    def _end_if_broken(self) -> None:
        try:
            self._engine.check_health()
        except EngineFailedError:
            os._exit(1)


def _refusal(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def _reserved_cpus() -> float:
    context: Any = ray.get_runtime_context()
    return float(context.get_assigned_resources().get("CPU", 0.0))
