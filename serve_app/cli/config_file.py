"""The configuration file that MODEL and the options of the command line stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from serve_app.base import folders
from serve_app.base.errors import ConfigError
from serve_app.config import model_names as names
from serve_app.config import shards
from serve_app.store import hub

DEMO = "corral-demo"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the command line, as the configuration writes it."""

    id: str
    source: dict[str, str | bool]
    """The fields of `serve_app.config.schema.ModelSource`."""


def named(model: str | None) -> NamedModel:
    """The model that the user means. Asks a repository for its files. Raises ConfigError."""
    if model is None:
        return NamedModel(DEMO, {"builtin": True})
    path = Path(model).expanduser()
    if path.suffix == ".xml":
        shards.refuse_exported(path)
    if path.is_file():
        return NamedModel(_id_of(path.name), {"path": str(path.resolve())})
    if "://" in model and not names.is_hub_url(model):
        return NamedModel(_id_of(model.rpartition("/")[2]), {"url": model})
    is_path = model.endswith(".gguf") and ":" not in model and not names.is_hub_url(model)
    if is_path or model.startswith((".", "/", "~")):
        shards.refuse_exported(path)
        raise ConfigError(f"There is no file {model}.")
    try:
        name = names.parse_hub_name(model)
    except ConfigError:
        raise ConfigError(
            f"{model} is neither a GGUF file nor a Hugging Face repository: OWNER/NAME or "
            "OWNER/NAME:QUANT."
        ) from None
    if not (name.choice or "").endswith(".gguf"):
        pinned = hub.pinned(name, folders.cache_folder() / "models" / ".names")
        name = replace(name, choice=pinned.choice)
    return NamedModel(_id_of(name.choice or ""), {"repo": str(name)})


def _id_of(filename: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9._:-]+", "-", shards.stem(Path(filename).name)).lstrip("._:-")
    return stem[:128] or "model"


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
    manage_models: bool = False


def document(options: ServeOptions) -> dict[str, Any]:
    """A configuration for `serve run`. Raises ConfigError."""
    sizes = {"n_slots": options.slots, "n_ctx_slot": options.context, "threads": options.threads}
    models: dict[str, dict[str, Any]] = {}
    for model in map(named, options.models or (None,)):
        n, model_id = 1, model.id
        while model_id in models:  # a second one of the same name gets a number
            n += 1
            model_id = f"{model.id}-{n}"
        models[model_id] = {"id": model_id, "source": model.source}
        if engine := {name: size for name, size in sizes.items() if size is not None}:
            models[model_id]["engine"] = engine
        if options.manage_models:
            models[model_id]["keep_alive"] = "5m"
    args: dict[str, Any] = {"models": [*models.values()]}
    if options.manage_models:
        args["manage_models"] = True
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


def text(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=100)
