"""The engine replicas' reports to the process of an ingress, which its routers read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from serve_app.channel.address import Address
from serve_app.routing.changes import applied
from serve_app.routing.score import Report


class Heard(NamedTuple):
    """A report, and when it came."""

    report: Report
    at: float


class ReplicaConnection:
    """Receives the reports of one replica over one connection."""

    def __init__(self, reports: Reports, replica_id: str) -> None:
        self._reports = reports
        self.replica_id = replica_id
        self.heard: Heard | None = None
        """The newest report."""

    def take(self, report: bytes) -> None:
        """A change of the last one."""
        before = None if self.heard is None else self.heard.report
        self.heard = Heard(applied(before, report), time.monotonic())

    def end(self) -> None:
        """The connection is gone."""
        self._reports.left(self)


class Reports:
    """The newest report of each replica that has a channel to this process.

    Any thread may read. Everything else is for one thread, the listener's.
    """

    def __init__(self) -> None:
        self.address: Address | None = None
        """Where this process listens; None if it is no ingress's."""
        self._connections: dict[str, ReplicaConnection] = {}
        self._watchers: list[Callable[[str], None]] = []

    def connection(self, replica_id: str) -> ReplicaConnection:
        """For a new connection of that replica: if an older one is left, it counts no more."""
        connection = self._connections[replica_id] = ReplicaConnection(self, replica_id)
        return connection

    def left(self, connection: ReplicaConnection) -> None:
        """A connection is gone, and with it what was heard over it."""
        if self._connections.get(connection.replica_id) is connection:
            del self._connections[connection.replica_id]
            for watcher in tuple(self._watchers):
                watcher(connection.replica_id)

    def hears(self, replica_id: str) -> bool:
        """Whether that replica has a channel to this process."""
        return replica_id in self._connections

    def newest(self, replica_id: str) -> Heard | None:
        """The replica's last report over its channel, if there is one."""
        connection = self._connections.get(replica_id)
        return None if connection is None else connection.heard

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Have it called, in the listener's thread, with each replica that is heard no more."""
        self._watchers.append(watcher)


HERE = Reports()
"""The reports of this process. Serve makes the routers, and nothing can be handed to them."""
