"""The sides of `loadtests.compare`: what each one's server is, and how it is started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from loadtests.common.servers import (
    DISABLED,
    NO_SETTINGS,
    Server,
    corral_is_ready,
    is_healthy,
    lists_models,
    local_command,
    running,
    serve_run,
    write_config,
)
from loadtests.compare import llama_server, vllm
from serve_app.cli.measure.benchmark import BenchmarkError
from serve_app.cluster.one_machine import environment_of

CORRAL, RAY, LLAMA_SERVER = "corral", "ray", "llama-server"
SERVE_RUN, SERVE_PROXY, RAY_DEFAULTS = "serve-run", "serve-proxy", "ray-defaults"
OPENVINO, OPENVINO_BF16, OPENVINO_W8A8 = "openvino", "openvino-bf16", "openvino-w8a8"
VLLM: Mapping[str, str] = {"vllm": "w8a8", "vllm-bf16": "bf16"}
"""Its sides, and the form of each one's weights."""
PYTHON, PYTHON_BATCHED = "llama-cpp-python", "llama-cpp-python-batched"
_OPENVINO: dict[str, dict[str, str]] = {
    OPENVINO: {"backend": "openvino"},
    OPENVINO_BF16: {"backend": "openvino", "cache_type_k": "bf16", "cache_type_v": "bf16"},
    OPENVINO_W8A8: {"backend": "openvino", "quantization": "w8a8"},
}
"""Further settings of `engine`."""
NATIVE = (CORRAL, RAY, LLAMA_SERVER, SERVE_RUN, SERVE_PROXY, RAY_DEFAULTS, *_OPENVINO, *VLLM)
"""Sides that take token ids and `ignore_eos`; all others get what any OpenAI server takes."""
SIDES = (*NATIVE, PYTHON, PYTHON_BATCHED)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings of every side, by Corral's names; each side has its own defaults for the rest."""

    threads: int
    n_slots: int = 16
    n_ctx_slot: int = 1024
    n_batch: int = 512


def is_url(side: str) -> bool:
    """Whether this may be a server that runs already: http://HOST:PORT, and nothing after it."""
    parts = urlsplit(side)
    whole = f"{parts.scheme}://{parts.netloc}"
    return parts.scheme in ("http", "https") and bool(parts.hostname) and side == whole


def first_model(url: str) -> str:
    """The name of the server's first model. Raises BenchmarkError if it does not say."""
    try:
        name: str = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{url}/v1/models names no model: {error}") from None
    return name


def engine_settings(text: str) -> dict[str, Any]:
    """The type of an argument with settings of Corral's engine, as JSON."""
    settings = json.loads(text)  # ValueError: argparse says so
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object.")
    return settings


def expect(
    parser: argparse.ArgumentParser, sides: Collection[str], model: Path, server: Path
) -> None:
    """End the command with an error that says what to run if a peer's program is not there."""
    if LLAMA_SERVER in sides:
        llama_server.expect(parser, server)
    batched = llama_server.folder() / llama_server.BATCHED_SERVER
    if PYTHON_BATCHED in sides and not batched.is_file():
        parser.error(f"no {batched}: run python -m loadtests.compare.llama_server")
    if VLLM.keys() & set(sides) and not vllm.is_built(model):
        parser.error(f"no vLLM for {model}: run python -m loadtests.compare.vllm --model {model}")


def start(
    side: str, model: Path, sizes: Sizes, server: Path, engine: Mapping[str, Any] = NO_SETTINGS
) -> AbstractContextManager[Server]:
    """That side's server, which runs inside the `with` block; one that runs already is left as it is.
    `model` and `server`, which is llama-server, are absolute paths; `engine` are further settings of
    Corral's."""
    settings = asdict(sizes) | dict(engine)
    entry = {"id": "model", "source": {"path": str(model)}, "engine": settings}

    def peer(_: Path, port: int) -> list[str | Path]:
        return llama_server_command(server, model, sizes, port)

    def vllm_peer(_: Path, port: int) -> list[str | Path]:
        return vllm.command(
            *(model, VLLM[side], port), n_slots=sizes.n_slots, n_ctx_slot=sizes.n_ctx_slot
        )

    def python(_: Path, port: int) -> list[str | Path]:
        return [
            *(sys.executable, "-m", "llama_cpp.server", "--model", model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--n_threads", str(sizes.threads), "--n_threads_batch", str(sizes.threads)),
            *("--n_ctx", str(sizes.n_ctx_slot), "--n_batch", str(sizes.n_batch)),
            *("--interrupt_requests", "False"),  # or a request cuts off the stream before it
        ]

    def batched(directory: Path, port: int) -> list[str | Path]:
        config = directory / "config.json"
        config.write_text(json.dumps(_batched_config(model, sizes, port)))
        return [sys.executable, llama_server.folder() / llama_server.BATCHED_SERVER, "-C", config]

    if is_url(side):
        return nullcontext(Server(side))
    if side == CORRAL or side in _OPENVINO:
        own = entry | {"engine": settings | _OPENVINO.get(side, {})}
        return running(
            lambda directory, port: local_command(write_config(directory, [own], port)),
            corral_is_ready,
        )
    if side == RAY:
        return serve_run(entry)
    if side == SERVE_RUN:
        return serve_run(entry, environment_of("one-machine.env"), DISABLED)
    if side == SERVE_PROXY:
        return serve_run(entry, environment_of("one-machine.env"))
    if side == RAY_DEFAULTS:
        return serve_run(entry, NO_SETTINGS)
    if side in VLLM:
        return running(vllm_peer, is_healthy, vllm.environment(sizes.threads))
    command, is_ready = {
        LLAMA_SERVER: (peer, is_healthy),
        PYTHON: (python, lists_models),
        PYTHON_BATCHED: (batched, lists_models),
    }[side]
    return running(command, is_ready)


def llama_server_command(program: Path, model: Path, sizes: Sizes, port: int) -> list[str | Path]:
    """llama-server on loopback, with these sizes."""
    return [
        *(program, "--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(sizes.n_slots), "--threads", str(sizes.threads)),
        *("--ctx-size", str(sizes.n_slots * sizes.n_ctx_slot)),
        *("--batch-size", str(sizes.n_batch)),
    ]


def _batched_config(model: Path, sizes: Sizes, port: int) -> dict[str, object]:
    return {
        "server": {"host": "127.0.0.1", "port": port},
        "model": {
            "path": str(model),
            "n_seq_max": sizes.n_slots,
            "n_ctx": sizes.n_slots * sizes.n_ctx_slot,
            "n_batch": sizes.n_batch,
            "threads": sizes.threads,
            "threads_batch": sizes.threads,
        },
    }
