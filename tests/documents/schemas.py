"""Validates the documents' YAML, JSON and requests, by the types that Corral reads them with."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema

from serve_app.apis.batches.objects import Endpoint
from serve_app.base.errors import ConfigError
from serve_app.base.values.replicas import FetchingReplica
from serve_app.config import schema
from serve_app.config.sources import ModelSource
from serve_app.server.access.api_keys import KeyFile
from serve_app.server.http.request_model import RequestModel
from tests.doubles.api import build_api

__all__ = ["ConfigError", "check_body", "check_curl", "check_json", "check_yaml"]
_SECTIONS: Mapping[str, Callable[[Any], object]] = {
    "applications": lambda applications: [
        schema.parse(ServeApplicationSchema.model_validate(one).args) for one in applications
    ],
    "defaults": schema.DefaultsConfig.model_validate,
    "engine": schema.EngineConfig.model_validate,
    "http_options": HTTPOptionsSchema.model_validate,
    "ingress": schema.IngressConfig.model_validate,
    "source": ModelSource.model_validate,
}
"""What may stand alone in a block."""


def check_yaml(text: str) -> None:
    """Raises ValidationError or ConfigError for what Corral refuses, KeyError for an unknown section."""
    match yaml.safe_load(text):
        case {"models": _} as application:
            schema.parse(application)
        case {"keys": _} as keys:
            KeyFile.model_validate(keys)
        case {"model_list": models, "router_settings": _}:  # LiteLLM's, which is no dependency
            for model in models:
                base = model["litellm_params"]["api_base"]
                check_curl([f"{base}/models"])
        case [*models]:
            for model in models:
                schema.ModelConfig.model_validate(model)
        case {**sections}:
            for name, section in sections.items():
                _SECTIONS[str(name)](section)
        case other:
            raise KeyError(other)


def check_json(text: str) -> None:
    """The same for JSON: lines of a batch, or fields of an answer."""
    if text.startswith('"'):
        for name, value in json.loads(f"{{{text}}}").items():
            assert name == "fetching"
            fields = {field.name for field in dataclasses.fields(FetchingReplica)}
            assert all(set(replica) == fields for replica in value), value
        return
    for line in map(json.loads, text.splitlines()):
        assert line.keys() == {"custom_id", "method", "url", "body"}
        assert line["url"] in get_args(Endpoint)
        check_body(line["method"], line["url"], line["body"])


def check_curl(words: Sequence[str]) -> None:
    """Raises AssertionError or ValidationError for a route that is not there, or a body that it refuses."""
    (url,) = [word for word in words if re.match(r"https?://", word)]
    path = re.sub(r"https?://[^/]*", "", url).partition("?")[0] or "/"
    assert "--json" not in words, "curl 7.81 of Ubuntu 22.04 does not know it"
    if "-d" in words:
        assert "Content-Type: application/json" in words
        check_body("POST", path, json.loads(words[[*words].index("-d") + 1]))
    else:
        _operation("GET", path)


def check_body(method: str, path: str, body: Mapping[str, Any]) -> None:
    """Raises AssertionError or ValidationError."""
    schema = _operation(method, path)["requestBody"]["content"]["application/json"]["schema"]
    name, *_ = re.findall(r"#/components/schemas/(\w+)", repr(schema))
    _types()[name].model_validate(body)


def _operation(method: str, path: str) -> Any:
    """The route's description."""
    found = [
        operations[method.lower()]
        for route, operations in _description()["paths"].items()
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), path) and method.lower() in operations
    ]
    assert found, f"{method} {path}"
    return found[0]


@cache
def _description() -> dict[str, Any]:
    return build_api({}).openapi()


@cache
def _types() -> dict[str, type[RequestModel]]:
    def below(base: type[RequestModel]) -> Iterator[type[RequestModel]]:
        for one in base.__subclasses__():
            yield one
            yield from below(one)

    return {one.__name__: one for one in below(RequestModel)}
