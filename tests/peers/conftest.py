"""llama-server and Corral, each started once, with the same file, the same slots and the same defaults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loadtests.common.servers import (
    corral_is_ready,
    is_healthy,
    local_command,
    running,
    write_config,
)
from loadtests.compare import llama_server
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.peers.answers import Pair

N_SLOTS, N_CTX_SLOT, N_PREDICT = 2, 256, 24
DEFAULTS = {"temperature": 0.0, "seed": 42, "max_tokens": N_PREDICT}


def server_binary() -> Path:
    """llama-server, built if it was not."""
    if llama_server.is_built():
        return llama_server.folder() / "llama-server"
    return llama_server.build(os.cpu_count() or 1)


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    with servers() as pair:
        yield pair


@contextmanager
def servers(template: Path | None = None) -> Iterator[Pair]:
    """Both servers with the built-in model, and with this chat template in place of the model's."""
    server = server_binary()

    def theirs(_: Path, port: int) -> list[str | Path]:
        return [
            *(server, "--model", BUILTIN_MODEL, "--port", str(port), "--alias", "model"),
            *("--parallel", str(N_SLOTS), "--ctx-size", str(N_SLOTS * N_CTX_SLOT)),
            *("--threads", "1", "--temp", "0", "--seed", "42", "--n-predict", str(N_PREDICT)),
            *("--metrics", "--slots", "--no-warmup"),
            *(() if template is None else ("--chat-template-file", template)),
        ]

    def ours(directory: Path, port: int) -> list[str | Path]:
        engine = {"n_slots": N_SLOTS, "n_ctx_slot": N_CTX_SLOT, "threads": 1}
        own = {} if template is None else {"chat_template_file": str(template)}
        model = {
            "id": "model",
            "aliases": ["*"],
            "source": {"builtin": True},
            "projector": False,  # llama-server is not given one either
            "defaults": DEFAULTS | own,
            "engine": engine,
        }
        config = write_config(directory, [model], port)
        return local_command(config)

    with (
        running(theirs, is_healthy) as a,
        running(ours, corral_is_ready) as b,
        client(a.url) as one,
        client(b.url) as other,
    ):
        yield Pair(one, other)


def client(url: str) -> httpx.Client:
    """With a connection for each request: llama-server closes those that are kept, at any time."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=url, timeout=60, limits=limits)
