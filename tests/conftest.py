"""Property-based tests try the same examples every time; `--hypothesis-profile=explore` tries others."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from typing import Any

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
    parser.addoption("--soak-seconds", type=float, default=1800.0, help="the length of the soak")


def pytest_configure() -> None:
    """Have SIGTERM end a run as Ctrl-C does: with the servers that it has started, and with what failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking at ten thousand tests again and again: they stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the collector find what has not been closed."""
    gc.unfreeze()


@pytest.fixture
def vocabularies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files may have a vocabulary and nothing else, which the product refuses."""
    import llama_cpp  # takes long, and most tests do without

    usual = llama_cpp.llama_model_default_params

    def params() -> Any:
        made = usual()
        made.vocab_only = True
        return made

    monkeypatch.setattr(llama_cpp, "llama_model_default_params", params)
