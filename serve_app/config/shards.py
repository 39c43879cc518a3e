"""Names of the files of a model that is in several, as llama.cpp looks for them."""

from __future__ import annotations

import re
from pathlib import Path

from serve_app.base.errors import ConfigError

_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def number(name: str) -> int:
    """The number of a shard, from 1; 1 for a model in one file."""
    shard = _SHARD.search(name)
    return 1 if shard is None else int(shard["number"])


def stem(name: str) -> str:
    return _SHARD.sub("", name).removesuffix(".gguf")


def names(first: str) -> tuple[str, ...]:
    """All files of a model, of which this is the first or the only one. Raises ConfigError for another."""
    shard = _SHARD.search(first)
    if shard is None:
        return (first,)
    begin, count = first[: shard.start()], int(shard["count"])
    if int(shard["number"]) != 1:
        raise ConfigError(
            f"{first} is one of {count} files of a model. Name the first one, "
            f"{begin}-00001-of-{count:05d}.gguf."
        )
    return tuple(f"{begin}-{one:05d}-of-{count:05d}.gguf" for one in range(1, count + 1))


def refuse_exported(path: Path) -> None:
    """Raises ConfigError for a folder or a graph, as OpenVINO's exporter writes them."""
    if path.is_dir() or path.suffix == ".xml":
        raise ConfigError(
            f"{path} is no GGUF file, and Corral serves no models in OpenVINO's exported format: name a "
            "GGUF file of the model."
        )


def size_on_disk(first: Path) -> int:
    """The size of all files of a model, by the first or only file. Raises ConfigError, OSError."""
    return sum(first.with_name(name).stat().st_size for name in names(first.name))
