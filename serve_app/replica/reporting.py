"""An engine replica's reports to the ingresses that it has channels to."""

from __future__ import annotations

import asyncio
import logging

from serve_app.channel.address import Address
from serve_app.channel.sender import Channel, Channels
from serve_app.engine import Engine
from serve_app.routing.changes import change
from serve_app.routing.reporter import Reporter
from serve_app.routing.score import Report

logger = logging.getLogger("corral.replica")

_EVERY_S = 1.0


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
        """For ever."""
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
