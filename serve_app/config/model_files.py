"""Finds a configured model's GGUF file on this node; downloads it first where it has to."""

from __future__ import annotations

from pathlib import Path

from serve_app.config.schema import ModelSource
from serve_app.demo_model import BUILTIN_MODEL
from serve_app.errors import ConfigError


def locate(source: ModelSource) -> Path:
    """The model file, downloaded first if it has to be; may take as long as that takes.

    Raises ConfigError if there is no such file.
    """
    if source.path is not None:
        path = source.path.expanduser()
        if not path.is_file():
            raise ConfigError(f"source.path: there is no file {path} on this node")
        return path
    if source.repo_id is not None and source.filename is not None:
        return download(source.repo_id, source.filename)
    return BUILTIN_MODEL


def download(repo_id: str, filename: str) -> Path:
    """A file of a Hugging Face repository, in this user's cache of such files. Raises ConfigError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, filename))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"source: cannot download {filename} of {repo_id}: {error}") from error
