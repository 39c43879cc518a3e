"""The tables of docs/configuration.md, from the models that validate the configuration."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from serve_app.base.sampling import PARAMETERS
from serve_app.config.keys import ApiKey
from serve_app.config.schema import (
    AppConfig,
    BatchConfig,
    DefaultsConfig,
    DraftConfig,
    EngineConfig,
    IngressConfig,
    ModelConfig,
    PriceConfig,
    WhisperConfig,
)
from serve_app.config.sources import AdapterConfig, DownloadsConfig, ModelSource
from tests.documents.tables import table

SECTIONS: dict[str, tuple[type[BaseModel], str]] = {
    "application": (AppConfig, ""),
    "models": (ModelConfig, ""),
    "source": (ModelSource, "source."),
    "adapters": (AdapterConfig, "adapters[]."),
    "draft": (DraftConfig, "engine.draft."),
    "engine": (EngineConfig, "engine."),
    "defaults": (DefaultsConfig, "defaults."),
    "downloads": (DownloadsConfig, "downloads."),
    "ingress": (IngressConfig, "ingress."),
    "whisper": (WhisperConfig, "ingress.whisper."),
    "batch": (BatchConfig, "ingress.batch."),
    "prices": (PriceConfig, "ingress.prices.*."),
    "keys": (ApiKey, "keys[]."),
}
_HEAD = ("field", "type", "default", "meaning")
_ELSEWHERE = {one.name for one in PARAMETERS}  # in docs/api/parameters.md
_LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
_HUGE = 2**31 - 1


def section(name: str) -> str:
    """The table of one of `SECTIONS`."""
    model, prefix = SECTIONS[name]
    schema = model.model_json_schema()
    fields = {k: v for k, v in model.model_fields.items() if k not in _ELSEWHERE}
    rows = []
    for field, info in fields.items():
        meaning, _, said = " ".join((info.description or "").split()).partition(" Default: ")
        if info.is_required():
            default = "required"
        elif said:
            default = said.rstrip(".")
        else:
            default = _default(info.get_default(call_default_factory=True))
        kind = _kind(schema["properties"][field], schema.get("$defs", {}), info.default is None)
        rows.append((f"`{prefix}{field}`", kind, default, meaning))
    return table(_HEAD, rows)


def _default(value: Any) -> str:
    if value is None or isinstance(value, BaseModel) or value in ("", [], {}):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _kind(schema: dict[str, Any], defs: dict[str, Any], null_is_default: bool) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        return _kind(defs[schema["$ref"].rpartition("/")[2]], defs, null_is_default)
    if parts := schema.get("anyOf") or schema.get("allOf"):
        kept = [p for p in parts if not (p.get("type") == "null" and null_is_default)]
        return " or ".join(dict.fromkeys(_kind(part, defs, null_is_default) for part in kept))
    if "const" in schema:
        return _default(schema["const"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "null":
        return "`null`"
    if kind == "array":
        return f"list of {_kind(schema['items'], defs, null_is_default)}s"
    if kind == "string":
        return {"path": "path"}.get(schema.get("format", ""), "text")
    if kind == "boolean":
        return "`true` or `false`"
    limits = [
        f"{word} {schema[limit]:g}"
        for limit, word in _LIMITS.items()
        if limit in schema and abs(schema[limit]) < _HUGE
    ]
    return " ".join([{"object": "section"}.get(kind, kind), *limits])
