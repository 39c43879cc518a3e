"""The configuration file that the options of the command line stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.cli.model_source import NamedModel, named
from serve_app.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of `corral serve` and `corral config`. None leaves a size to Corral."""

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int | None = None
    context: int | None = None
    threads: int | None = None
    api_key_file: Path | None = None
    allow_anonymous: bool = False
    web_apps: bool = False


def document(options: ServeOptions) -> dict[str, Any]:
    """A configuration for `serve run`. Raises ConfigError."""
    found = [named(model) for model in options.models or (None,)]
    sizes = {
        "n_slots": options.slots,
        "n_ctx_slot": options.context,
        "threads": options.threads,
    }
    engine = {name: size for name, size in sizes.items() if size is not None}
    args: dict[str, Any] = {
        "models": [
            _model(one_id, one, engine) for one_id, one in zip(_distinct(found), found, strict=True)
        ]
    }
    if ingress := _ingress(options):
        args["ingress"] = ingress
    application = {
        "name": "corral",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": args,
    }
    return {
        "http_options": {"host": options.host, "port": options.port},
        "applications": [application],
    }


def _model(model_id: str, named: NamedModel, sizes: Mapping[str, int]) -> dict[str, Any]:
    engine = {**named.engine, **sizes}
    return {"id": model_id, "source": named.source} | ({"engine": engine} if engine else {})


def _ingress(options: ServeOptions) -> dict[str, Any]:
    ingress: dict[str, Any] = {}
    if options.api_key_file is not None:
        path = options.api_key_file.expanduser()
        if not path.is_file():
            raise ConfigError(f"--api-key-file: there is no file {path}.")
        ingress["api_key_file"] = str(path.resolve())
    if options.allow_anonymous:
        ingress["allow_anonymous"] = True
    if options.web_apps:
        ingress["cors_origins"] = ["localhost", "apps"]
    return ingress


def _distinct(models: Sequence[NamedModel]) -> list[str]:
    """An id for each model: a second one of the same name gets a number."""
    ids: list[str] = []
    for model in models:
        n, unique = 1, model.id
        while unique in ids:
            n += 1
            unique = f"{model.id}-{n}"
        ids.append(unique)
    return ids


def text(content: dict[str, Any]) -> str:
    """The configuration as YAML."""
    return yaml.safe_dump(content, sort_keys=False, width=100)
