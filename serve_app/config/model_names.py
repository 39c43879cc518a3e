"""Names of models: a Hugging Face repository with a quantisation, and the files of it that are meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.base.errors import ConfigError
from serve_app.config import shards

PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q8_0", "F16", "BF16")
"""Quantisations to take where none is named, the best for CPUs first."""
PREFERRED_PROJECTORS = ("Q8_0", "F16", "BF16", "F32")
"""Types of projectors to take where none is named: small ones lose more by few bits than models do."""
_HOSTS = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/", re.IGNORECASE)
_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<early>[\w./-]+))?(?::(?P<choice>[\w./-]+))?"
    r"(?:@(?P<late>[\w./-]+))?"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """The name that a user gives for a model of a repository."""

    repo: str
    choice: str | None = None
    """A quantisation, or a file of the repository."""
    revision: str | None = None

    def __str__(self) -> str:
        choice = f":{self.choice}" if self.choice else ""
        return self.repo + choice + (f"@{self.revision}" if self.revision else "")


def is_hub_url(text: str) -> bool:
    """Whether it is the address of a repository's page."""
    return re.fullmatch(r"https?://(hf\.co|huggingface\.co)/[^/]+/[^/]+/?", text) is not None


def parse_hub_name(text: str) -> HubName:
    """`OWNER/NAME`, maybe with `:QUANT` or `:FILE.gguf`, `@REVISION`, `hf.co/`. Raises ConfigError."""
    match = _NAME.fullmatch(_HOSTS.sub("", text).rstrip("/"))
    if match is None or (match["early"] and match["late"]):
        raise ConfigError(
            f"{text} is not the name of a Hugging Face repository. Give OWNER/NAME, OWNER/NAME:QUANT or "
            "OWNER/NAME:FILE.gguf, and add @REVISION for another revision than the newest."
        )
    choice = match["choice"]
    if choice is not None and choice.lower() == "latest":  # as Ollama calls what is not chosen
        choice = None
    return HubName(match["repo"], choice, match["early"] or match["late"])


def choose_files(files: Iterable[str], hub_name: HubName) -> tuple[str, ...]:
    """The files of the model that is meant. It is the quantisation or file of the name, or the first of
    `PREFERRED`, or the only one. Raises ConfigError that lists what there is."""
    present = frozenset(files)
    models = sorted(name for name in present if _begins_model(name))
    if not models:
        raise ConfigError(f"{hub_name.repo} holds no GGUF model.")
    if hub_name.choice is not None and hub_name.choice.endswith(".gguf"):
        return _complete(_find_file(models, hub_name), present, hub_name)
    if hub_name.choice is not None:
        return _complete(_only(models, hub_name.choice, hub_name), present, hub_name)
    for quant in PREFERRED:
        if any(_is_of(name, quant) for name in models):
            return _complete(_only(models, quant, hub_name), present, hub_name)
    if len(models) == 1:
        return _complete(models[0], present, hub_name)
    raise ConfigError(f"{hub_name.repo}: choose a file by its quantisation. {_list(models)}")


def projector(files: Iterable[str], hub_name: HubName, beside: str | None = None) -> str | None:
    """The projector that is meant: the file or the type that the name says, or the first of
    PREFERRED_PROJECTORS. One in the folder of `beside`, the model's file, comes first. None if the
    repository has none. Raises ConfigError that lists those that it has."""
    present = frozenset(files)
    projectors = sorted(name for name in present if is_projector(name) and shards.number(name) == 1)
    if hub_name.choice is not None and hub_name.choice.endswith(".gguf"):
        return _find_file(sorted(present), hub_name)
    folder = (beside or "").rpartition("/")[0]
    projectors = [name for name in projectors if name.rpartition("/")[0] == folder] or projectors
    if hub_name.choice is not None:
        return _only(projectors, hub_name.choice, hub_name)
    for kind in PREFERRED_PROJECTORS:
        if any(_is_of(name, kind) for name in projectors):
            return _only(projectors, kind, hub_name)
    if len(projectors) > 1:
        raise ConfigError(f"{hub_name.repo}: choose a projector. {_list(projectors)}")
    return projectors[0] if projectors else None


def parts_of(files: Iterable[str], name: HubName) -> tuple[str, ...]:
    """The files of the model or of the projector that is meant. Raises ConfigError."""
    present = frozenset(files)
    if name.choice is not None and is_projector(name.choice):
        return _complete(_find_file(sorted(present), name), present, name)
    return choose_files(present, name)


def _find_file(models: Sequence[str], name: HubName) -> str:
    first, *_ = shards.names(name.choice or "")
    if first not in models:
        raise ConfigError(f"{name.repo} has no model {first}. {_list(models)}")
    return first


def _only(models: Sequence[str], quant: str, hub_name: HubName) -> str:
    fitting = [name for name in models if _is_of(name, quant)]
    if not fitting:
        raise ConfigError(
            f"{hub_name.repo} has no file of {quant}. Choose another quantisation. {_list(models)}"
        )
    if len(fitting) > 1:
        example = HubName(hub_name.repo, fitting[0], hub_name.revision)
        raise ConfigError(
            f"{hub_name.repo} has several files of {quant}. Name a file, such as {example}. "
            f"{_list(fitting)}"
        )
    return fitting[0]


def _complete(first: str, present: frozenset[str], hub_name: HubName) -> tuple[str, ...]:
    parts = shards.names(first)
    missing = [name for name in parts if name not in present]
    if missing:
        raise ConfigError(f"{hub_name.repo} lacks {', '.join(missing)}, which belongs to {first}.")
    return parts


def _list(models: Sequence[str]) -> str:
    return f"It has: {', '.join(models)}"


def is_projector(name: str) -> bool:
    """Whether a file is one that a model sees or hears with."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(".gguf") and "mmproj" in base


def _begins_model(name: str) -> bool:
    """Whether a file is a model, or the first shard of one."""
    base = name.rpartition("/")[2].lower()
    return (
        base.endswith(".gguf")
        and not base.startswith("imatrix")
        and not is_projector(base)
        and "imatrix.gguf" not in base
        and shards.number(base) == 1
    )


def _is_of(name: str, quant: str) -> bool:
    return re.search(rf"(^|[-_./]){re.escape(quant)}([-./]|$)", name, re.IGNORECASE) is not None
