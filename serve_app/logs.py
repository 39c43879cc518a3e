"""Corral's log lines inside Serve replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST_PER_S = 50
"""Lines of Serve's access log that a replica writes in one second."""


class AccessLogBound(logging.Filter):
    """Lets so many lines of the access log through each second: each takes as long as to refuse a request,
    and a flood of those would fill the disk. The next line says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = clock()
        self._n_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written."""
        if not getattr(record, "serve_access_log", False):
            return True
        now = self._clock()
        if now - self._second >= 1:
            left_out = self._n_seen - MOST_PER_S
            self._second, self._n_seen = now, 0
            if left_out > 0:
                record.msg = f"{record.msg} (before it, {left_out} lines were left out)"
        self._n_seen += 1
        return self._n_seen <= MOST_PER_S


def forward_to_serve() -> None:
    """Send the `corral` loggers' lines where Serve's own go: the replica's log file and the
    terminal of `serve run`. Without this, Serve drops lines below WARNING. Its access log gets a bound."""
    logger = logging.getLogger("corral")
    logger.parent = logging.getLogger("ray.serve")
    logger.setLevel(logging.INFO)
    logger.parent.addFilter(AccessLogBound())
