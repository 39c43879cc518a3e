"""A loaded model: an engine, and all that its process does for it. Serve or a local server calls it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from serve_app.base import heap, plugins
from serve_app.base.engine_options import AdapterFile, EngineOptions
from serve_app.base.errors import (
    ChannelBrokenError,
    CorralError,
    EngineFailedError,
    ModelReplacedError,
)
from serve_app.base.folders import cache_folder
from serve_app.base.values.answers import SequenceEnd, TokenDelta
from serve_app.base.values.media import Medium, Size, Sound
from serve_app.base.values.replicas import ReplicaRecords, ReplicaStats, SlotAction
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel.protocol import Address
from serve_app.channel.sender import Channel, Channels
from serve_app.config import shards
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig
from serve_app.engine import Engine, Texts
from serve_app.engine.cache.prefixes import Prefix
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.run import sizing
from serve_app.run.placement.machine import ThrottleWatch, available_memory, cpu_quota, throttled_s
from serve_app.run.placement.pinning import CpuPlacement, place_on_cpus
from serve_app.run.replica.adapters import Files, ReplicaAdapters
from serve_app.run.replica.batching import Batcher
from serve_app.run.replica.kv_transfer import KVTransfer, Offer, TransferTarget
from serve_app.run.replica.place import ReplicaPlace
from serve_app.run.replica.reporting import ReplicaMetrics, Reporting, pressure
from serve_app.store.encryption import check_encrypted
from serve_app.store.shared_entries import LoadedAdapters, publish_progress

logger = logging.getLogger("corral.replica")

MOST_ENTERING = 16
"""Requests that are submitted in one turn of the event loop: the heaviest takes 20 ms, and Serve's health
checks have their turns in between."""
Entry = tuple[GenerationRequest, Callable[[TokenDelta], None]]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelParts:
    """The parts of a loaded model. `closing` gives them back, the last one first."""

    model: ResolvedModel
    place: ReplicaPlace
    cpus: CpuPlacement
    throttling: ThrottleWatch
    engine: Engine
    stage: Any
    """The stage, of a model in stages; None for a whole model."""
    channels: Channels
    reporting: Reporting
    metrics: ReplicaMetrics
    adapters: ReplicaAdapters
    kv_transfer: KVTransfer
    closing: AsyncExitStack


@dataclasses.dataclass(frozen=True, slots=True)
class _ModelFiles:
    """The files of a model, which are here."""

    path: Path
    adapters: tuple[AdapterFile, ...]
    projector: Path | None
    draft: Path | None
    n_fetched_bytes: int

    @property
    def weight_bytes(self) -> int:
        parts = (self.path, self.projector, self.draft)
        return sum(shards.size_on_disk(part) for part in parts if part is not None)


class LoadedModel:
    """A loaded model's engine. Its methods run in the replica's event loop; decoding has its thread."""

    def __init__(self, parts: ModelParts) -> None:
        """The object owns the parts from now on."""
        self._place, self._cpus, self._stage = parts.place, parts.cpus, parts.stage
        self._engine, self._channels = parts.engine, parts.channels
        self._reporting, self._metrics = parts.reporting, parts.metrics
        self._adapters, self._kv_transfer = parts.adapters, parts.kv_transfer
        self._throttling, self._closing = parts.throttling, parts.closing
        self._sizing = parts.model.sizing
        self._batches_may_scale = parts.model.batches_may_scale
        self._vocabulary_key = parts.engine.vocabulary_key
        options = parts.engine.options
        most = min(MOST_ENTERING, options.n_slots + options.max_waiting)
        self._entries = Batcher(parts.engine.submit_to, most)
        self._texts = Batcher(parts.engine.embed_many, most)

    @classmethod
    async def load(cls, model: ResolvedModel, place: ReplicaPlace) -> LoadedModel:
        """Load a model. Raises CorralError: see `load_parts`."""
        return cls(await load_parts(model, place))

    async def generate(
        self, request: GenerationRequest, vocabulary_key: bytes, address: Address, number: int
    ) -> CorralError | None:
        """Run a request to its end, whose tokens are of that vocabulary. That the engine has taken it, and
        its deltas, go over the channel to that address, for the call of that number. Cancelling frees its
        slot. If it is refused, or its channel breaks, that is returned. What is raised, Serve takes for
        an error of the replica, and logs it with its traceback. An error that ends it goes over the
        channel, too: from here, it might overtake what came before."""
        try:
            self._refuse_strange_tokens(vocabulary_key)
            await self._adapters.have(request.adapters)
            channel = await self._channels.to(address)
            await _lay_out(self._engine, request.media)
            end = await self._run(request, channel, number)
            if not request.background:
                self._metrics.on_end(end)
            _log(request, end)
            if isinstance(end.error, EngineFailedError):
                raise end.error
        except ChannelBrokenError as error:
            logger.warning("%s ends: %s", request.id, error)
            return error
        except EngineFailedError as error:
            _end_process(error)
        except CorralError as error:
            logger.info("%s is refused: %s", request.id, error)
            return error
        return None

    async def _run(self, request: GenerationRequest, channel: Channel, number: int) -> SequenceEnd:
        """How it ended. Raises CorralError if it is refused or its channel breaks."""
        call = channel.open_call(number)
        try:
            prepared = None
            if request.sampling.grammar is not None or request.sampling.looks_back:
                prepared = await asyncio.to_thread(self._engine.prepare, request)
            outcome = await self._entries.enter((request, partial(channel.push, number)))
            del prepared  # the sequence has it now
            if isinstance(outcome, CorralError):
                raise outcome
            channel.accept(number, outcome)
            channel.flush()
            return await call
        finally:
            self._engine.abort(request.id)
            channel.close_call(number)

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        vocabulary_key: bytes,
        background: bool = False,  # by its place: see prompt_of
        media: tuple[Medium, ...] = (),
    ) -> NDArray[np.float32] | CorralError:
        """Compute embeddings: see Engine.embed. The texts' tokens are of that vocabulary. Cancelling the
        call spares what was not yet computed. Errors are returned."""
        try:
            self._refuse_strange_tokens(vocabulary_key)
            await _lay_out(self._engine, media)
            return await self._embed(Texts(texts, client, background=background, media=media))
        except EngineFailedError as error:
            _end_process(error)
        except CorralError as error:
            logger.info("Texts are refused or failed: %s", error)
            return error

    async def _embed(self, texts: Texts) -> NDArray[np.float32]:
        entering = self._texts.enter(texts)  # a batch computes what fits of all that came together
        try:
            outcome = await entering
        except asyncio.CancelledError:
            if entering.done() and not entering.cancelled():
                accepted = entering.result()  # a moment ago, and nobody waits for it any more
                if isinstance(accepted, Future):
                    accepted.cancel()
            raise
        if isinstance(outcome, CorralError):
            raise outcome
        return await asyncio.wrap_future(outcome)

    def _refuse_strange_tokens(self, vocabulary_key: bytes) -> None:
        """A `serve deploy` with another model replaces replicas one by one. Raises ModelReplacedError."""
        if vocabulary_key != self._vocabulary_key:
            raise ModelReplacedError("The model is being replaced by one with another vocabulary.")

    async def stats(self) -> ReplicaStats:
        return ReplicaStats(
            replica_id=self._place.replica_id,
            node_id=self._place.node_id,
            engine=dataclasses.asdict(self._engine.stats()),
            cores=self._cpus.pinning.cores,
            numa_node=self._cpus.pinning.numa_node,
            placement=f"{self._cpus.pinning.report}; {self._sizing}",
            latencies=self._engine.latencies(),
            stage=None if self._stage is None else dataclasses.asdict(self._stage.chain.counts),
        )

    async def media_tokens(self, sizes: Sequence[Size]) -> int | CorralError:
        """Tokens of pictures of these sizes. Errors are returned."""
        try:
            return await asyncio.to_thread(self._engine.media_tokens, sizes)
        except CorralError as error:
            return error

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction | CorralError | None:
        """Save, restore or erase a slot; None if another replica is meant. Errors are returned."""
        if replica_id != self._place.replica_id:
            return None
        try:
            return await asyncio.to_thread(self._engine.slot_files.act, action, slot_id, name)
        except CorralError as error:
            return error

    async def load_adapter(self, config: AdapterConfig) -> str | CorralError:
        """Load an adapter, and return its version. Errors are returned."""
        try:
            return await self._adapters.load(config)
        except CorralError as error:
            return error

    async def unload_adapter(self, adapter_id: str, version: str) -> bool:
        self._adapters.unload(adapter_id, version)
        return True

    async def explain(self, request_id: str) -> ReplicaRecords:
        replica_id, node_id = self._place.replica_id, self._place.node_id
        records = (
            dataclasses.replace(record, replica_id=replica_id, node_id=node_id)
            for record in self._engine.explain(request_id)
        )
        return ReplicaRecords(replica_id, tuple(records))

    async def offer_prefixes(self, asker: str) -> Offer | None:
        return await self._kv_transfer.offer(asker)

    async def send_prefix(self, source: str, prefix: Prefix) -> list[Any] | None:
        return await self._kv_transfer.send(source, prefix)

    async def lack_prefixes(self, asker: str, prefixes: list[Prefix]) -> TransferTarget | None:
        return await self._kv_transfer.lacks(asker, prefixes)

    async def take_prefix(self, target: str, sent: list[Any]) -> int | None:
        return await self._kv_transfer.take(target, sent)

    async def attach(self, address: Address) -> bool:
        """Tell that ingress from now on what this replica holds. Returns whether it can be reached."""
        try:
            await self._reporting.attach(address)
        except ChannelBrokenError:
            return False
        return True

    async def is_there(self) -> None:
        """Return: the model is loaded."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `serve_app.cluster.autoscaling` learns of this replica."""
        engine, scales = self._engine, self._batches_may_scale
        return pressure(engine.stats(), with_background=scales)

    def check_health(self) -> None:
        """Serve asks every few seconds. Ends the process if the engine failed or hangs."""
        try:
            self._engine.check_health()
            if self._stage is not None:
                self._stage.check_health()
        except EngineFailedError as error:
            _end_process(error)
        throttled = self._throttling.look(throttled_s(), cpu_quota(), time.monotonic())
        if throttled is not None:
            logger.warning("%s", throttled)
        self._metrics.update(self._engine.stats())

    async def leave(self) -> None:
        """Close, after other replicas have been sent what they lack."""
        await self._kv_transfer.push()
        await self.close()

    async def close(self) -> None:
        """Unload the model, and give all back. Running requests end with an error, and go on when
        there is a replica. Idempotent."""
        await self._closing.aclose()

    def forget(self) -> None:
        """Let go of everything, after `close` and when no call runs any more. Serve's queues keep the
        object whose method they called last, and with it the model's memory."""
        vars(self).clear()


async def load_parts(model: ResolvedModel, place: ReplicaPlace) -> ModelParts:
    """Load the model. Raises CorralError, and whatever else may go wrong: nothing is left of it then."""
    closing = AsyncExitStack()
    try:
        return await _load_into(closing, model, place)
    except BaseException as error:
        await closing.aclose()
        traceback.clear_frames(error.__traceback__)  # they have the model's memory
        raise


async def _load_into(
    closing: AsyncExitStack, model: ResolvedModel, place: ReplicaPlace
) -> ModelParts:
    if model.encrypts_folders:
        check_encrypted("engine.cache_folder", model.options.prefix_folder)
        check_encrypted("engine.slot_folder", model.options.slot_folder)
    files = await _find_files(model, place)
    on_demand = model.on_demand
    cpus = place_on_cpus(model, place.reserved_cpus if on_demand is None else on_demand.num_cpus)
    closing.callback(cpus.pinning.undo)
    throttling = ThrottleWatch(throttled_s(), time.monotonic())
    options = _options(model, place, cpus, files)
    channels = Channels(place.node_id, place.replica_id)
    closing.callback(channels.close)
    engine, stage = await _load_engine(closing, files.path, options, place)
    engine.on_delivered(channels.flush)
    metrics = ReplicaMetrics(model.id)
    closing.callback(metrics.rest)
    metrics.count_download(files.n_fetched_bytes)
    _log_plan(model, options, cpus, engine)
    adapters = ReplicaAdapters(model, engine, LoadedAdapters(place.app))
    await adapters.catch_up()
    kv_transfer = KVTransfer(engine, place)
    if on_demand is None or on_demand.has_peers:
        await kv_transfer.pull()
    reporting = Reporting(engine, channels)
    closing.callback(asyncio.create_task(reporting.run()).cancel)
    heap.trim_soon()
    return ModelParts(
        model,
        place,
        cpus=cpus,
        throttling=throttling,
        engine=engine,
        stage=stage,
        channels=channels,
        reporting=reporting,
        metrics=metrics,
        adapters=adapters,
        kv_transfer=kv_transfer,
        closing=closing,
    )


async def _find_files(model: ResolvedModel, place: ReplicaPlace) -> _ModelFiles:
    """The model's files, downloaded if they are not here. Raises CorralError."""
    async with publish_progress(
        place.app, place.deployment, place.replica_id, place.node_id
    ) as tell:
        files = Files(model.downloads, tell)
        find = files.find
        path = await find(model.source)
        adapters = [AdapterFile(part.id, await find(part.source)) for part in model.adapters]
        projector = None if model.projector is None else await find(model.projector)
        draft = None if model.draft is None else await find(model.draft)
    return _ModelFiles(path, tuple(adapters), projector, draft, files.n_bytes)


def _options(
    model: ResolvedModel, place: ReplicaPlace, cpus: CpuPlacement, files: _ModelFiles
) -> EngineOptions:
    """The engine's options, with what this machine has for it now."""
    weight_bytes = files.weight_bytes // (1 if place.gang is None else place.gang.size)
    memory_bytes = available_memory()
    return dataclasses.replace(
        sizing.bound(model.options, model.memory_shares, memory_bytes - weight_bytes),
        memory_bytes=memory_bytes,
        threads=cpus.threads,
        computing_cpus=cpus.computing_cpus,
        turns=cpus.turns,
        pinned=_prefixes(files.path, model.system_prompts, model.defaults.chat_template),
        profile_folder=cache_folder() / "profiles",
        measures_again=place.measures_again and model.on_demand is None,
        adapters=files.adapters,
        projector=files.projector,
        draft=files.draft,
        max_converted_bytes=model.downloads.max_converted_bytes,
    )


async def _load_engine(
    closing: AsyncExitStack, path: Path, options: EngineOptions, place: ReplicaPlace
) -> tuple[Engine, Any]:
    """The engine, and the stage of a model in stages. Raises CorralError."""
    stage: Any = None
    async with publish_progress(
        place.app, place.deployment, place.replica_id, place.node_id
    ) as tell:
        load = partial(Engine.load, path, options, tell)
        if place.gang is not None:
            stage = plugins.load_plugin("stages").ReplicaStage(place, place.gang)
            closing.callback(stage.chain.close)
            load = partial(stage.load, path, options, tell)
        with ThreadPoolExecutor(1) as pool:  # a new thread: it inherits this one's processors
            engine = await asyncio.get_running_loop().run_in_executor(pool, load)
    closing.push_async_callback(asyncio.to_thread, engine.close, timeout_s=0)
    return engine, stage


def _log_plan(
    model: ResolvedModel, options: EngineOptions, cpus: CpuPlacement, engine: Engine
) -> None:
    logger.info(
        "Model %s: %d slots, %d tokens together, %d in a request; %d threads (%s), %s; %s.",
        model.id,
        options.n_slots,
        options.n_ctx_together,
        options.n_ctx_slot,
        options.threads,
        cpus.reason,
        cpus.pinning.report,
        model.sizing,
    )
    logger.info("Model %s: %s.", model.id, engine.stats().memory_report())


def _end_process(error: EngineFailedError) -> NoReturn:
    """Serve replaces the replica at once then, and streams go on elsewhere. Else it would send requests
    here until three health checks have failed."""
    logger.error("The replica ends, as its engine failed: %s", error)
    os._exit(1)


async def _lay_out(engine: Engine, media: Sequence[Medium]) -> None:
    """Have the layouts of sounds known: each takes some tenths of a second."""
    if sizes := [one.size for one in media if isinstance(one, Sound)]:
        await asyncio.to_thread(engine.media_tokens, sizes)


def _log(request: GenerationRequest, end: SequenceEnd) -> None:
    usage, spent = end.usage, end.timings
    if end.error is not None:
        logger.info("%s failed: %s", request.id, end.error)
    logger.info(
        "%s ended (%s): %d prompt tokens, %d of them cached, %d generated; queue %.3f s, prefill %.3f s, "
        "decode %.3f s, stalled %.3f s.",
        request.id,
        end.reason.value,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        spent.queue_s,
        spent.prefill_s,
        spent.decode_s,
        spent.stalled_s,
    )


def _prefixes(
    path: Path, system_prompts: Sequence[str], chat_template: str | None
) -> tuple[tuple[int, ...], ...]:
    if not system_prompts:
        return ()
    tokenizer = Tokenizer(path, chat_template)
    return tuple(tokenizer.encode_system_prompt(text) for text in system_prompts)
