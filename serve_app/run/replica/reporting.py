"""An engine replica's reports: to ingresses, to Serve's autoscaler, and to Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from serve_app.base import metrics
from serve_app.base.metrics import Counter, Histogram
from serve_app.base.values.answers import GAP_BOUNDARIES_S, FinishReason, SequenceEnd
from serve_app.channel.blocks import Inventory, request_key, turn_key
from serve_app.channel.pressure import PRESSURE, engine_pressure
from serve_app.channel.protocol import Address
from serve_app.channel.score import Report
from serve_app.channel.sender import Channel, Channels
from serve_app.engine import CachedPrefixes, Engine, EngineStats
from serve_app.run.placement.machine import throttled_s

logger = logging.getLogger("corral.replica")

_EVERY_S = 1.0


def report_of(stats: EngineStats, cached_prefixes: CachedPrefixes, inventory: Inventory) -> Report:
    """A replica's report; `inventory` keeps the blocks of the prompts that were in its last one."""
    queue, costs = stats.queue, stats.costs
    return Report(
        n_slots=stats.n_slots,
        n_live=queue.running + queue.waiting,
        work_s=queue.backlog_s,
        prefill_s=queue.prefill_backlog_s,
        first_end_s=queue.first_end_s,
        prompt_token_s=costs.prompt_token_s,
        token_s=costs.token_s,
        answer_tokens=costs.answer_tokens,
        n_background=queue.background_running + queue.background_waiting,
        background_s=queue.background_backlog_s,
        blocks=frozenset(inventory.blocks(cached_prefixes.prompts)),
        requests=frozenset(map(request_key, cached_prefixes.taken)),
        turns=frozenset(map(turn_key, cached_prefixes.adapters)),
    )


def pressure(stats: EngineStats, *, with_background: bool = False) -> dict[str, float]:
    """The figures for autoscaling, background requests left out unless they may add replicas."""
    queue = stats.queue
    backlog_s, n_requests = queue.backlog_s, queue.running + queue.waiting
    if with_background:
        backlog_s += queue.background_backlog_s
        n_requests += queue.background_running + queue.background_waiting
    n_cells = sum(
        slot.n_past
        for slot in stats.slots
        if slot.request_id is not None and (with_background or not slot.background)
    )
    cells = n_cells / stats.n_ctx
    return {PRESSURE: engine_pressure(backlog_s, n_requests / stats.n_slots, cells)}


class Reporting:
    """Sends every ingress a report, once a second if anything has changed. Event loop only.

    One that does not read is passed over, until it does. It reads the state that the decoder
    published last, and does not disturb it.
    """

    def __init__(self, engine: Engine, channels: Channels) -> None:
        self._engine = engine
        self._channels = channels
        self._inventory = Inventory()
        self._said: dict[Channel, Report] = {}

    async def attach(self, address: Address) -> None:
        """Open a channel to that ingress, if there is none. Raises ChannelBrokenError."""
        channel = await self._channels.to(address)
        if channel not in self._said:
            self._tell(channel, self._report())

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                self.tell()
            except Exception:
                logger.exception("The routers could not be told what this replica holds")

    def tell(self) -> None:
        channels = self._channels.open
        self._said = {one: self._said[one] for one in channels if one in self._said}
        if channels:
            report = self._report()
            for channel in channels:
                self._tell(channel, report)

    def _report(self) -> Report:
        engine = self._engine
        return report_of(engine.stats(), engine.cached_prefixes(), self._inventory)

    def _tell(self, channel: Channel, report: Report) -> None:
        if report != self._said.get(channel) and channel.report(msgspec.msgpack.encode(report)):
            self._said[channel] = report


_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120]
# Counters by their group in EngineStats, and what they count.
_COUNTED = {
    "tokens": {
        "prompt_tokens": "Prompt tokens that were computed, in tokens.",
        "cached_tokens": "Prompt tokens that a slot's cache held already, in tokens.",
        "restored_tokens": "Prompt tokens that came back from the memory tier, in tokens.",
        "generated_tokens": "Tokens that were generated, in tokens.",
    },
    "cache": {
        "received_prefixes": "Prefixes that other replicas sent here.",
        "received_bytes": "Prefixes that other replicas sent here, in bytes.",
        "sent_prefixes": "Prefixes that were sent to other replicas.",
        "sent_bytes": "Prefixes that were sent to other replicas, in bytes.",
    },
    "speculation": {
        "drafted_tokens": "Draft tokens of all kinds of speculative decoding, in tokens.",
        "accepted_tokens": "Draft tokens that were accepted, in tokens.",
        "proposed_tokens": "Draft tokens of a draft model, in tokens.",
        "accepted_proposed_tokens": "Draft tokens of a draft model that were accepted, in tokens.",
    },
    "requests": {
        "preemptions": "Preemptions: sequences that lost their slot and went on later.",
        "context_shifts": "Context shifts: contexts that were full and went on.",
        "failovers": "Requests that were taken over from replicas that were lost.",
    },
    "embeddings": {
        "embedded_texts": "Texts that were embedded.",
        "embedded_tokens": "Texts that were embedded, in tokens.",
    },
    "pictures": {
        "encoded_tiles": "Tiles of images and audio that were encoded.",
        "found_tiles": "Tiles of images and audio that the cache of encoded tiles had.",
    },
    "timing": {
        "steps": "Steps of the engine: scheduling, decoding and sampling of a batch.",
        "turn_seconds": "Turns of the engine on cores that models share, in seconds.",
        "turn_wait_seconds": "Waits of the engine for its turn on cores that models share, in seconds.",
    },
}


def lost_replicas(model: str) -> Counter:
    """The counter of a server without Ray, which starts what is lost again."""
    what = "Replicas whose process was lost, without Ray."
    return metrics.counter("lost_replicas", what, tags={"model": model})


class ReplicaMetrics:
    """A replica's metrics. Used in its event loop.

    Times are observed as requests end. Counters and gauges follow the engine's statistics, as often as
    `update` is called.
    """

    def __init__(self, model: str) -> None:
        tags = {"model": model}

        def histogram(name: str, what: str, ends: Sequence[float] = _SECONDS) -> Histogram:
            return metrics.histogram(f"{name}_seconds", what, ends, tags=tags)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return metrics.counter(name, what, ("model", *labels), tags)

        self._queue = histogram("queue_time", "Queue time: from arrival to a slot, in seconds.")
        self._prefill = histogram(
            "prefill_time", "Prefill time: from a slot to the first token, in seconds."
        )
        self._ttft = histogram(
            "time_to_first_token", "Time to first token (TTFT): from arrival, in seconds."
        )
        self._itl = histogram(
            "inter_token_latency",
            "Inter-token latency (ITL): from a token to the next, in seconds.",
            GAP_BOUNDARIES_S,
        )
        self._e2e = histogram(
            "request_latency", "Request latency: from arrival to the end, in seconds."
        )
        self._counters = {
            (group, name): counter(name, what)
            for group, counters in _COUNTED.items()
            for name, what in counters.items()
        }
        self._requests = counter("requests", "Requests that ended, by `reason`.", "reason")
        for reason in FinishReason:
            self._requests.inc(0.0, {"reason": str(reason)})
        self._throttled = counter(
            "cpu_throttled_seconds", "CPU throttling: time that a quota withheld, in seconds."
        )
        self._encoding = counter("encode_seconds", "Encoding of images and audio, in seconds.")
        self._downloaded = counter(
            "downloaded_bytes", "Model files that were downloaded, in bytes."
        )
        gauges = {
            "slots_busy": "Slots that run a request.",
            "requests_waiting": "Requests that wait for a slot.",
            "kv_cache_used_ratio": "KV cache in use, as a part of its tokens, from 0 to 1.",
            "memory_tier_bytes": "Memory tier: prefixes without a slot, in bytes.",
            "backlog_seconds": "Backlog: forecast of the time until all accepted work is done, in seconds.",
        }
        self._gauges = {name: metrics.gauge(name, what, tags=tags) for name, what in gauges.items()}
        self._seen: dict[str, float] = {"throttled": throttled_s()}

    def on_end(self, end: SequenceEnd) -> None:
        spent, n_own = end.timings, end.usage.completion_tokens - end.timings.n_resumed
        self._queue.observe(spent.queue_s)
        if n_own:
            self._prefill.observe(spent.prefill_s)
        if n_own and not spent.n_resumed:
            self._ttft.observe(spent.first_token_s)
        for n_gaps, seconds in spent.gaps:
            metrics.observe_all(self._itl, n_gaps, seconds)
        in_engine_s = spent.queue_s + spent.prefill_s + spent.decode_s
        self._e2e.observe(spent.failed_over_s + in_engine_s)

    def count_download(self, n_bytes: int) -> None:
        """Count the bytes that were downloaded for this replica."""
        if n_bytes:
            self._downloaded.inc(n_bytes)

    def update(self, stats: EngineStats) -> None:
        for (group, name), counter in self._counters.items():
            value = getattr(getattr(stats, group), name.replace("_seconds", "_s"))
            self._follow(counter, name, value)
        for reason, n_ended in stats.requests.ended.items():
            self._follow(self._requests, f"ended {reason}", n_ended, reason=reason)
        self._follow(self._throttled, "throttled", throttled_s())
        self._follow(self._encoding, "encoding", stats.pictures.encode_s)
        used = sum(slot.n_past for slot in stats.slots)
        queue, stored = stats.queue, stats.cache.stored_bytes
        values = queue.running, queue.waiting, used / stats.n_ctx, stored, queue.backlog_s
        for present, value in zip(self._gauges.values(), values, strict=True):
            present.set(value)

    def rest(self) -> None:
        """The model is unloaded: nothing runs, waits or is kept any more."""
        for present in self._gauges.values():
            present.set(0.0)

    def _follow(self, counter: Counter, name: str, value: float, **tags: str) -> None:
        more = value - self._seen.get(name, 0)
        if more > 0:
            counter.inc(more, tags)
            self._seen[name] = value
