"""The description of models for Ollama's clients: their files' metadata, and their capabilities.

Source: ollama, api/types.go, `ModelDetails`, `ListModelResponse`, `ShowResponse` and
`ProcessModelResponse`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import LlamaFileType

from serve_app.ingress.http.dependencies import Bodies
from serve_app.ingress.http.request_model import parsed
from serve_app.ingress.model_registry import ModelInfo, Models, find, full_name
from serve_app.ingress.ollama.protocol import OllamaShowRequest
from serve_app.ingress.ollama.serving import timestamp

Json = dict[str, Any]

_UNITS = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
"""Ollama's: how many of them, and decimals of numbers that are not whole."""
_FOR_EVER_S = 100 * 365 * 86400
"""Models stay loaded; some clients cannot read a year of five digits."""
_NUMBERS = frozenset({"general.file_type", "general.quantization_version", "general.alignment"})
"""The numbers of `general`: all else is text there, even if it looks like a number."""


@dataclass(frozen=True, slots=True)
class Description:
    """A model."""

    id: str
    n_ctx: int
    """Tokens that one request may have."""
    n_bytes: int
    n_params: int
    digest: str
    modified_at: float
    """Unix time."""
    metadata: Json
    """The metadata of the model's file: texts, numbers and truth values."""
    template: str
    capabilities: tuple[str, ...]

    @property
    def _architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def details(self) -> Json:
        """`ModelDetails`."""
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self._architecture,
            "families": [self._architecture],
            "parameter_size": human(self.n_params),
            "quantization_level": _quantization(self.metadata.get("general.file_type")),
        }

    def _named(self, alias: str | None = None) -> Json:
        name = full_name(alias or self.id)
        return {
            "name": name,
            "model": name,
            "size": self.n_bytes,
            "digest": self.digest,
            "details": self.details,
        }

    def listed(self, alias: str | None = None) -> Json:
        """The model's entry in /api/tags, under this name."""
        return {
            **self._named(alias),
            "modified_at": timestamp(self.modified_at),
            "capabilities": list(self.capabilities),
        }

    def running(self) -> Json:
        """The model's entry in /api/ps."""
        expires_at = timestamp(time.time() + _FOR_EVER_S)
        return {
            **self._named(),
            "expires_at": expires_at,
            "size_vram": 0,
            "context_length": self.n_ctx,
        }

    def shown(self) -> Json:
        """The answer of /api/show. Clients take `context_length` for what a request may have, so it is no
        more than that."""
        own = f"{self._architecture}.context_length"
        n_ctx = min(self.n_ctx, self.metadata.get(own, self.n_ctx))
        parameters = f"{'num_ctx':<30} {self.n_ctx}"
        return {
            "modelfile": f"# {full_name(self.id)}\nFROM {self.id}\nPARAMETER num_ctx {self.n_ctx}\n",
            "parameters": parameters,
            "template": self.template,
            "license": str(self.metadata.get("general.license", "")),
            "details": self.details,
            "model_info": {
                **self.metadata,
                "general.parameter_count": self.n_params,
                own: n_ctx,
            },
            "capabilities": list(self.capabilities),
            "modified_at": timestamp(self.modified_at),
        }


def human(number: int) -> str:
    """A number as Ollama writes it: `7.6B`, `5.51M`."""
    for size, unit, decimals in _UNITS:
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else decimals}f}{unit}"
    return str(number)


def _quantization(file_type: object) -> str:
    for one in LlamaFileType:
        if one.value == file_type:
            return one.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return "unknown"


def named(models: Models, body: bytes) -> str:
    """POST /api/show: the model's id. Raises CorralError."""
    request = parsed(OllamaShowRequest, body)
    return find(models, request.name if request.model is None else request.model).id


def describe(models: Models, nothing: bytes) -> list[Description]:
    """Describe all models. Runs in a worker, as it reads files. Raises OSError if one is gone."""
    return [_described(model) for model in models.values()]


def _described(model: ModelInfo) -> Description:
    file = model.tokenizer.model
    metadata = {
        name: value_of(name, text)
        for name, text in sorted(file.metadata().items())
        if name not in ("general.name", "tokenizer.chat_template")
    }
    return Description(
        id=model.id,
        n_ctx=model.n_ctx_slot,
        n_bytes=file.n_bytes,
        n_params=file.n_params,
        digest=file.fingerprint().hex(),
        modified_at=file.path.stat().st_mtime,
        metadata=metadata,
        template=model.tokenizer.chat_template or "",
        capabilities=tuple(_capabilities(model)),
    )


def value_of(name: str, text: str) -> str | int | float | bool:
    """A value of a file's metadata, which llama.cpp tells as text only."""
    if name.startswith("general.") and name not in _NUMBERS:
        return text
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _capabilities(model: ModelInfo) -> list[str]:
    tokenizer = model.tokenizer
    if tokenizer.reranks:
        return []
    if tokenizer.model.pooling is not None or not tokenizer.model.is_causal:
        return ["embedding"]
    found = {
        "completion": True,
        "tools": True,
        "insert": tokenizer.can_infill,
        "vision": model.sees,
        "audio": model.hears,
        "thinking": tokenizer.thinks,
    }
    return [name for name, has_it in found.items() if has_it]


class Catalogue:
    """The models' descriptions, which are made once. For one event loop."""

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._by_id: Mapping[str, Description] | None = None

    async def all(self, bodies: Bodies) -> Mapping[str, Description]:
        """The descriptions by the models' ids. Raises CorralError."""
        async with self._making:
            if self._by_id is None:
                descriptions = await bodies.work(describe)
                self._by_id = {description.id: description for description in descriptions}
        return self._by_id
