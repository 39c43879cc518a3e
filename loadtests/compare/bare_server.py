"""Corral without Ray: its routes before its engine, in one process under plain uvicorn.

    python -m loadtests.compare.bare_server CONFIG

CONFIG is a file for `serve run`; of its models, the first is served, without its system prompts. This
is one side of `loadtests.compare`: what the real server takes longer is what Ray Serve costs. It is no way
to serve: nothing restarts it, nothing scales it.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from fastapi import FastAPI

from loadtests.compare.capitals import CapitalHeaders
from serve_app.application.deployments import access
from serve_app.application.resolving import resolve
from serve_app.batch.answerer import LocalClient
from serve_app.config import schema
from serve_app.engine import Engine
from serve_app.folders import cache_folder
from serve_app.ingress.api import WORKER_MODULES, build_api
from serve_app.ingress.media.decoder import opened
from serve_app.ingress.model_registry import ModelFile
from serve_app.ingress.workers.pool import WorkerPool
from serve_app.llama.vision.senses import NO_SENSES, senses
from serve_app.progress import nowhere
from serve_app.store.models import locate


def serve(file: Path) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError for a configuration that cannot work."""
    http_options = yaml.safe_load(file.read_text())["http_options"]
    config = schema.load(file)
    (model,) = resolve(config.models[:1])
    path = locate(model.source, model.downloads, nowhere)
    options = dataclasses.replace(
        model.options,
        profile_folder=cache_folder() / "profiles",
        projector=None
        if model.projector is None
        else locate(model.projector, model.downloads, nowhere),
    )
    engine = Engine.load(path, options)  # as the replica does it
    try:
        found = senses(options.projector) if options.projector else NO_SENSES
        model_file = ModelFile(
            str(path),
            model.id,
            options.n_ctx_slot,
            options.embedding_pooling,
            model.defaults,
            aliases=model.aliases,
            tags=model.tags,
            senses=found,
        )
        served = opened(model_file).served_by(LocalClient(engine))
        workers = WorkerPool([model_file], WORKER_MODULES, opened)
        api = build_api({served.id: served}, access(config.ingress), workers)
        listen(api, **http_options)
    finally:
        engine.close(timeout_s=0)


def listen(api: FastAPI, host: str = "127.0.0.1", port: int = 8000, **options: Any) -> None:
    """Serve at this host, or at several with commas between, as llama-server's `--host`."""
    configs = [
        uvicorn.Config(
            api, one, port, http=CapitalHeaders, log_level="warning", access_log=False, **options
        )
        for one in host.split(",")
    ]
    uvicorn.Server(configs[0]).run([config.bind_socket() for config in configs])


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.bare_server", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, help="a configuration file for `serve run`")
    serve(parser.parse_args().config)


if __name__ == "__main__":
    main()
