"""Parts of the configuration that need no Ray, so that processes that only read requests can import them.

They are sources of files, and durations.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serve_app.base.errors import ConfigError
from serve_app.config import model_names as names

_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_PART = r"(\d+(?:\.\d+)?)([smh])"


def seconds(value: object) -> object:
    """The seconds of such a text; any other value as it is. Raises ValueError for another text."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(f"(?:{_PART})+", value):
        raise ValueError("give seconds, or a text such as 30s, 5m or 1h30m")
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, value))


KeepAlive = Annotated[float, Field(gt=0, le=10**7), BeforeValidator(seconds)]


MODEL_ID = r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$"
"""A pattern: what the id of a model or an adapter may be."""


class Section(BaseModel):
    """A part of the configuration. Unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSource(Section):
    """The source of a model: exactly one of `builtin`, `path`, `repo`, `url`, and `repo_id` with
    `filename`. Of a model in shards, the first one is named."""

    builtin: bool = False
    """The small model that comes with Corral. Nothing is downloaded."""
    path: Path | None = None
    """A GGUF file. It must exist under this path on every node that runs a replica or the ingress."""
    repo: str | None = None
    """A model of a Hugging Face repository: `OWNER/NAME`, `OWNER/NAME:QUANT` or `OWNER/NAME:FILE.gguf`.
    `@REVISION` at the end chooses another revision than the newest."""
    repo_id: str | None = None
    """A Hugging Face repository, with `filename`. `repo` is the shorter way."""
    filename: str | None = None
    """The file in that repository."""
    url: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://")] | None = None
    """A file at a URL that fsspec reads, such as `https://`, `s3://` or `gs://`."""

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSource:
        given = [self.path, self.repo, self.repo_id, self.url]
        if [self.builtin, *(one is not None for one in given)].count(True) != 1:
            raise ValueError(
                "give exactly one of builtin: true, path, repo, url, or repo_id with filename"
            )
        if (self.repo_id is None) != (self.filename is None):
            raise ValueError("repo_id and filename belong together")
        if self.repo is not None:
            try:
                names.parse_hub_name(self.repo)
            except ConfigError as error:
                raise ValueError(f"repo: {error}") from None
        return self


class ProjectorSource(ModelSource):
    """The source of a projector: the same, but for `builtin`, which is the built-in model's own."""


class DownloadsConfig(Section):
    """The folder where each node keeps the models that it downloads."""

    folder: Path | None = None
    """The folder on each node. Default: `models` in this user's cache folder, `~/.cache/corral`."""
    max_gib: Annotated[float, Field(gt=0)] | None = None
    """The most that downloaded models take together, in GiB. At the limit, the least recently used
    model that is not in use is deleted. Default: what the disk has room for."""
    max_converted_gib: Annotated[float, Field(gt=0)] | None = None
    """The most that models converted for OpenVINO take together, in GiB. They are in `openvino` in
    the cache folder. Default: what the disk has room for."""

    @property
    def max_converted_bytes(self) -> int | None:
        return None if self.max_converted_gib is None else int(self.max_converted_gib * 2**30)


NO_DOWNLOADS = DownloadsConfig()
"""The folder of downloads unless the configuration says otherwise."""


class AdapterConfig(Section):
    """A LoRA adapter of a model, as a model name of its own: `MODEL:ADAPTER`."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    """The adapter's name. Clients write it after the model's name and a colon."""
    source: ModelSource
    """The adapter's GGUF file, from any kind of source except `builtin`."""
    scale: Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)] = 1.0
    """The factor by which its change of the weights is multiplied."""

    @model_validator(mode="after")
    def _is_no_model(self) -> AdapterConfig:
        if self.source.builtin:
            raise ValueError("source.builtin is a model, not an adapter")
        return self
