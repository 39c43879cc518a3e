"""The description of models for Ollama's clients: their files' metadata, and their capabilities.

Source: ollama, api/types.go, `ModelDetails`, `ListModelResponse`, `ShowResponse` and
`ProcessModelResponse`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gguf import LlamaFileType

from serve_app.apis.ollama.protocol import OllamaShowRequest
from serve_app.apis.ollama.serving import timestamp
from serve_app.base.errors import EngineUnavailableError
from serve_app.server.http.request_model import loads
from serve_app.server.model_registry import ModelInfo, Models, find, full_name

Json = dict[str, Any]

_UNITS = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
"""Ollama's: how many of them, and decimals of numbers that are not whole."""
_NUMBERS = frozenset({"general.file_type", "general.quantization_version", "general.alignment"})
"""The numbers of `general`: all else is text there, even if it looks like a number."""


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


def model_id(models: Models, request: OllamaShowRequest) -> str:
    """POST /api/show: the model's id. Raises CorralError."""
    return find(models, request.wanted_name).id


def describe_models(models: Models, nothing: bytes) -> dict[str, Json]:
    """The fields that /api/tags, /api/ps and /api/show tell of the models, by their ids, with an adapter,
    too. Runs in a worker, as it reads files. A model whose file cannot be read has none."""
    described: dict[str, Json] = {}
    for model in models.values():
        adapted = (model.with_adapter(adapter).id for adapter in model.adapters.values())
        with suppress(EngineUnavailableError, OSError):
            described |= dict.fromkeys((model.id, *adapted), _describe(model))
    return described


def _describe(model: ModelInfo) -> Json:
    """Clients take `context_length` for what a request may have, so it is no more than that."""
    file, n_ctx = model.tokenizer.model, model.n_ctx_slot
    metadata = {
        name: value_of(name, text)
        for name, text in sorted(file.metadata().items())
        if name not in ("general.name", "tokenizer.chat_template")
    }
    family = str(metadata.get("general.architecture", ""))
    own_n_ctx: Any = metadata.get(f"{family}.context_length", n_ctx)
    return {
        "size": file.n_bytes,
        "digest": file.fingerprint().hex(),
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": family,
            "families": [family],
            "parameter_size": human(file.n_params),
            "quantization_level": _quantization(metadata.get("general.file_type")),
        },
        "modified_at": timestamp(file.path.stat().st_mtime),
        "capabilities": _capabilities(model),
        "context_length": n_ctx,
        "modelfile": f"# {full_name(model.id)}\nFROM {model.id}\nPARAMETER num_ctx {n_ctx}\n",
        "parameters": f"{'num_ctx':<30} {n_ctx}",
        "template": model.tokenizer.chat_template or "",
        "license": str(metadata.get("general.license", "")),
        "model_info": {
            **metadata,
            "general.parameter_count": file.n_params,
            f"{family}.context_length": min(n_ctx, own_n_ctx),
        },
    }


def value_of(name: str, text: str) -> str | int | float | bool:
    """A value of a file's metadata, which llama.cpp tells as text only."""
    if name.startswith("general.") and name not in _NUMBERS:
        return text
    try:
        value = loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _capabilities(model: ModelInfo) -> list[str]:
    tokenizer = model.tokenizer
    if model.purpose != "text":
        return ["embedding"] if model.purpose == "embeddings" else []
    capabilities = {
        "completion": True,
        "tools": True,
        "insert": tokenizer.can_infill,
        "vision": model.sees,
        "audio": model.hears,
        "thinking": tokenizer.thinks,
    }
    return [name for name, has_it in capabilities.items() if has_it]
