"""A model in OpenVINO's format, as its exporter writes it: a folder, or a repository, with these files.

Their readers trust their form, and say so if it is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.errors import ConfigError

GRAPH = "openvino_model.xml"
WEIGHTS = "openvino_model.bin"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ONLY_OPENVINO = "llama.cpp cannot read a model in OpenVINO's format. Set engine.backend: openvino"
"""The refusal of any other backend."""
ONLY_GGUF = (
    "A model in OpenVINO's format cannot be computed in stages: engine.stages needs a GGUF file"
)
_NEEDED = (GRAPH, WEIGHTS, CONFIG, TOKENIZER, TOKENIZER_CONFIG)
_OPTIONAL = (GENERATION, "chat_template.jinja", "chat_template.json")
FILES = (*_NEEDED, *_OPTIONAL)
"""All that are read, the graph first."""
SMALL_FILES = tuple(name for name in FILES if name not in (GRAPH, WEIGHTS))


def is_graph(path: Path) -> bool:
    """Whether the path is that of a model in OpenVINO's format."""
    return path.name == GRAPH


def folder_of(path: Path) -> Path:
    """The folder of the model at that path, if it is in OpenVINO's format: the path, or its graph's."""
    return path.parent if is_graph(path) else path


def present(names: Iterable[str]) -> tuple[str, ...]:
    """The names that belong to the model, the graph first."""
    found = frozenset(names)
    return tuple(name for name in FILES if name in found)


def missing(names: Iterable[str]) -> tuple[str, ...]:
    """Files without which there is no model."""
    found = frozenset(names)
    return tuple(name for name in _NEEDED if name not in found)


@contextmanager
def trusted(what: str) -> Iterator[None]:
    """A context for code that reads keys and types as if they were there. Its errors become ConfigError,
    with the reason as the rest of a sentence; only OSError stays what it is."""
    try:
        yield
    except (ConfigError, OSError):
        raise
    except Exception as error:  # of each package's own kinds
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} is not as an exporter writes it ({reason})") from error
