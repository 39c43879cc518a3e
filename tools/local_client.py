"""The way to an engine in the same process, for tests and measurements without a server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import CorralError, NotSupportedError
from serve_app.base.values.media import Medium, Size
from serve_app.base.values.replicas import FetchingReplica, ReplicaStats, RequestRecord, SlotAction
from serve_app.config.sources import AdapterConfig
from serve_app.engine import Engine, GenerationRequest, Texts, TokenDelta
from serve_app.server.model_registry import Answers


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
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        *,
        background: bool = False,
        media: tuple[Medium, ...] = (),
    ) -> NDArray[np.float32]:
        request = Texts(texts, client, background=background, media=media)
        (outcome,) = self._engine.embed_many([request])
        if isinstance(outcome, CorralError):
            raise outcome
        return await asyncio.wrap_future(outcome)

    @property
    def failure(self) -> None:
        """Its engine runs."""

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
