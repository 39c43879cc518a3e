"""Modelfiles, and what they and POST /api/create change of a model's entry in the configuration.

Source: ollama, docs/modelfile.mdx, "Format" and "Instructions".
"""

from __future__ import annotations

import re
from typing import Any

from serve_app.apis.ollama.catalogue import value_of
from serve_app.apis.ollama.protocol import OllamaCreateRequest
from serve_app.base.errors import InvalidRequestError

Json = dict[str, Any]

_LINE = re.compile(
    r'[ \t]*(?:#[^\n]*|([A-Za-z]+)[ \t]+((?:[^\n"]*""".*?""")|[^\n]*)|)[ \t]*(?:\n|\Z)', re.DOTALL
)
"""A comment, an instruction whose text may go on to the next three quotes, or an empty line."""
_TEXTS = {"from", "system", "template", "license"}


def fields_of(text: str) -> Json:
    """The fields of a Modelfile, by the names that POST /api/create has. Raises InvalidRequestError."""
    fields: Json = {}
    at = 0
    while at < len(text):
        line = _LINE.match(text, at)
        if line is None:
            raise InvalidRequestError(f"No instruction: {text[at : at + 100]!r}.", "modelfile")
        if line[1]:
            _add(fields, line[1].lower(), line[2].strip())
        at = line.end()
    return fields


def _add(fields: Json, instruction: str, argument: str) -> None:
    if instruction == "parameter":
        name, _, value = argument.partition(" ")
        parameters = fields.setdefault("parameters", {})
        if name == "stop":
            parameters.setdefault(name, []).append(_unquote(value.strip()))
        else:
            parameters[name] = value_of(name, _unquote(value.strip()))
    elif instruction == "adapter":
        adapters = fields.setdefault("adapters", {})
        adapters[f"adapter-{len(adapters) + 1}"] = _unquote(argument)
    elif instruction == "message":
        fields.setdefault("messages", []).append(argument)
    elif instruction in _TEXTS:
        fields[instruction] = _unquote(argument)
    else:
        raise InvalidRequestError(f"Corral knows no instruction {instruction[:50]!r}.", "modelfile")


def _unquote(text: str) -> str:
    for quotes in ('"""', '"'):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)]
    return text


def changes_of(request: OllamaCreateRequest) -> dict[str, Any]:
    """The changed sections of an entry of `models`. Raises InvalidRequestError."""
    options = request.parameters
    defaults: Json = options.model_dump(
        exclude_none=True, exclude_unset=True, exclude={"num_ctx", "num_keep", "num_predict"}
    )
    if defaults.get("seed") == -1:
        del defaults["seed"]
    more = {
        "max_tokens": options.max_tokens,
        "system_prompt": request.system or None,
        "chat_template": request.template or None,
        "adapters": [*request.adapters] or None,
    }
    engine = {"n_ctx_slot": options.num_ctx, "n_keep": options.num_keep}
    adapters = [
        {"id": adapter_id, "source": {"repo": name}}
        for adapter_id, name in request.adapters.items()
    ]
    changes: dict[str, Any] = {
        "defaults": defaults | {name: value for name, value in more.items() if value is not None},
        "engine": {name: value for name, value in engine.items() if value is not None},
        "adapters": adapters,
    }
    return {section: changed for section, changed in changes.items() if changed}
