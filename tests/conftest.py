"""Property-based tests try the same examples every time; `--hypothesis-profile=explore` tries others."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of these tests."""
    parser.addoption(
        "--without-ray",
        action="store_true",
        help="start the servers of end-to-end tests of one node as `corral serve` does",
    )


def pytest_configure() -> None:
    """Have SIGTERM end a run as Ctrl-C does: with the servers that it has started, and with what failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
