"""An engine replica's reports to the ingresses that it has channels to, and to Serve's autoscaler."""

from __future__ import annotations

import asyncio
import logging

from serve_app.channel.protocol import Address
from serve_app.channel.sender import Channel, Channels
from serve_app.engine import CachedPrefixes, Engine, EngineStats
from serve_app.routing.autoscaling import PRESSURE, engine_pressure
from serve_app.routing.blocks import Inventory, request_key, turn_key
from serve_app.routing.reports import change
from serve_app.routing.score import Report

logger = logging.getLogger("corral.replica")

_EVERY_S = 1.0


class Reporter:
    """Makes one replica's reports. Used in its event loop."""

    def __init__(self) -> None:
        self._inventory = Inventory()
        self._last: tuple[EngineStats, CachedPrefixes, Report] | None = None

    def report(self, stats: EngineStats, cached_prefixes: CachedPrefixes) -> Report:
        """The report; the same object for the same arguments, as an idle engine has nothing new to say."""
        last = self._last
        if last is not None and last[0] is stats and last[1] is cached_prefixes:
            return last[2]
        queue, costs = stats.queue, stats.costs
        report = Report(
            n_slots=stats.n_slots,
            n_live=queue.running + queue.waiting,
            work_s=queue.backlog_s,
            prefill_s=queue.prefill_backlog_s,
            prompt_token_s=costs.prompt_token_s,
            token_s=costs.token_s,
            answer_tokens=costs.answer_tokens,
            n_background=queue.background_running + queue.background_waiting,
            background_s=queue.background_backlog_s,
            blocks=frozenset(self._inventory.blocks(cached_prefixes.prompts)),
            requests=frozenset(map(request_key, cached_prefixes.taken)),
            turns=frozenset(map(turn_key, cached_prefixes.adapters)),
        )
        self._last = stats, cached_prefixes, report
        return report


def pressure(stats: EngineStats, *, with_background: bool = False) -> dict[str, float]:
    """The figures for `serve_app.routing.autoscaling`; background requests count if they may add
    replicas."""
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
    """Tells every ingress what has changed, once a second, and a new one everything. Event loop only.

    One that does not read is passed over, until it does. It reads the state that the decoder
    published last, and does not disturb it.
    """

    def __init__(self, engine: Engine, channels: Channels) -> None:
        self._engine = engine
        self._channels = channels
        self._reporter = Reporter()
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
        """Tell all of them what is new."""
        channels = self._channels.open
        self._said = {one: self._said[one] for one in channels if one in self._said}
        if channels:
            report = self._report()
            for channel in channels:
                self._tell(channel, report)

    def _report(self) -> Report:
        return self._reporter.report(self._engine.stats(), self._engine.cached_prefixes())

    def _tell(self, channel: Channel, report: Report) -> None:
        body = change(self._said.get(channel), report)
        if body is not None and channel.report(body):
            self._said[channel] = report
