"""From a configured source to a GGUF file on this node."""

from __future__ import annotations

import logging
from pathlib import Path

from serve_app.config import ModelSource
from serve_app.demo_model.random_gguf import SHAPES, write_random_gguf
from serve_app.errors import ConfigError

logger = logging.getLogger("corral")

_CACHE = Path("~/.cache/corral")


def locate(source: ModelSource) -> Path:
    """The model file, downloaded or written first if it has to be; may take as long as that takes.

    Raises ConfigError if there is no such file.
    """
    if source.path is not None:
        path = source.path.expanduser()
        if not path.is_file():
            raise ConfigError(f"source.path: there is no file {path} on this node")
        return path
    if source.repo_id is not None and source.filename is not None:
        return _download(source.repo_id, source.filename)
    return _builtin()


def _builtin() -> Path:
    path = _CACHE.expanduser() / "random-tiny-f16-0.gguf"
    logger.warning(
        "Serving the built-in model: random weights, so the answers are noise. Set models[].source "
        "to a real GGUF file."
    )
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_random_gguf(path, SHAPES["tiny"], "f16")
    return path


def _download(repo_id: str, filename: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, filename))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"source: cannot download {filename} of {repo_id}: {error}") from error
