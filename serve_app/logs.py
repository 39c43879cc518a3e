"""Corral's log lines inside Serve replicas."""

from __future__ import annotations

import logging


def forward_to_serve() -> None:
    """Send the `corral` loggers' lines where Serve's own go: the replica's log file and the
    terminal of `serve run`. Without this, Serve drops lines below WARNING."""
    logger = logging.getLogger("corral")
    logger.parent = logging.getLogger("ray.serve")
    logger.setLevel(logging.INFO)
