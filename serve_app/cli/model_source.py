"""The meanings of MODEL on the command line: a file or folder, a repository, a URL, or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from serve_app import folders
from serve_app.errors import ConfigError
from serve_app.llama import shards
from serve_app.openvino.exported.files import GRAPH, folder_of
from serve_app.store import hub, names
from serve_app.store.names import HubName

DEMO = "corral-demo"
"""The id of the built-in model."""
_OPENVINO = {"backend": "openvino"}


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the command line, as the configuration writes it."""

    id: str
    source: dict[str, str | bool]
    """The fields of `serve_app.config.schema.ModelSource`."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """Settings of `engine` without which the model cannot be served."""


def named(model: str | None) -> NamedModel:
    """The model that the user means. Asks a repository for its files. Raises ConfigError."""
    if model is None:
        return NamedModel(DEMO, {"builtin": True})
    path = Path(model).expanduser()
    folder = folder_of(path)
    if (folder / GRAPH).is_file():
        folder = folder.resolve()
        return NamedModel(_id_of(folder.name), {"path": str(folder)}, _OPENVINO)
    if path.is_file():
        return NamedModel(_id_of(path.name), {"path": str(path.resolve())})
    if "://" in model and not names.is_hub_url(model):
        return NamedModel(_id_of(model.rpartition("/")[2]), {"url": model})
    is_file = model.endswith(".gguf") and ":" not in model and not names.is_hub_url(model)
    if is_file or model.startswith((".", "/", "~")):
        if path.is_dir():
            raise ConfigError(
                f"There is no {GRAPH} in the folder {model}. Of a GGUF model, name the file."
            )
        raise ConfigError(f"There is no file {model}.")
    try:
        name = names.parse(model)
    except ConfigError:
        raise ConfigError(
            f"{model} is neither a GGUF file nor a Hugging Face repository: OWNER/NAME or "
            "OWNER/NAME:QUANT."
        ) from None
    if not (name.choice or "").endswith(".gguf"):
        first, *_ = names.chosen(_files(name), name)
        name = replace(name, choice=first)
    if name.choice == GRAPH:
        return NamedModel(_id_of(name.repo), {"repo": str(name)}, _OPENVINO)
    return NamedModel(_id_of(name.choice or ""), {"repo": str(name)})


def _id_of(filename: str) -> str:
    """A model id made of a file's name."""
    stem = re.sub(r"[^A-Za-z0-9._:-]+", "-", shards.stem(Path(filename).name)).lstrip("._:-")
    return stem[:128] or "model"


def _files(name: HubName) -> list[str]:
    return hub.files(name, folders.cache_folder() / "models" / ".names")
