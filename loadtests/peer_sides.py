"""The sides of `loadtests.peers`: what each one's server is, and how it is started."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtests.servers import (
    corral_is_ready,
    haproxy_settings,
    is_healthy,
    running,
    serve_run,
    write_config,
)

CORRAL, HAPROXY, BARE, LLAMA_SERVER = "corral", "haproxy", "bare", "llama-server"
SIDES = (CORRAL, HAPROXY, BARE, LLAMA_SERVER)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every side gets, by Corral's names; the rest is each one's default."""

    threads: int
    n_slots: int = 16
    n_ctx_slot: int = 1024
    n_batch: int = 512


def start(side: str, model: Path, sizes: Sizes, llama_server: Path) -> AbstractContextManager[str]:
    """That side's server, which runs inside the `with` block and gives its URL. `model` and
    `llama_server` are absolute paths."""
    entry = {"id": "model", "source": {"path": str(model)}, "engine": asdict(sizes)}

    def bare(directory: Path, port: int) -> list[str | Path]:
        config = write_config(directory, entry, port)
        return [sys.executable, "-m", "loadtests.bare_server", config]

    def peer(_: Path, port: int) -> list[str | Path]:
        return [
            *(llama_server, "--model", model, "--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(sizes.n_slots), "--threads", str(sizes.threads)),
            *("--ctx-size", str(sizes.n_slots * sizes.n_ctx_slot)),
            *("--batch-size", str(sizes.n_batch)),
        ]

    if side == CORRAL:
        return serve_run(entry)
    if side == HAPROXY:
        return serve_run(entry, haproxy_settings())
    if side == BARE:
        return running(bare, corral_is_ready)
    return running(peer, is_healthy)
