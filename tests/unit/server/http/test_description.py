"""The API's description: whole, and true of what is answered."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest

from tests.doubles.api import build_api
from tests.unit.server.harness import ByteTokenizer

API = build_api({})
DESCRIPTION: dict[str, Any] = API.openapi()
OPERATIONS = [
    (method, path, operation)
    for path, item in DESCRIPTION["paths"].items()
    for method, operation in item.items()
]


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    """The description of an operation's body."""
    found: dict[str, Any] = operation["requestBody"]["content"]["application/json"]
    return found


def example_of(operation: dict[str, Any]) -> dict[str, Any]:
    """The body that the description shows."""
    found: dict[str, Any] = body_of(operation)["examples"]["example"]["value"]
    return found


POSTS = [
    (path, operation)
    for method, path, operation in OPERATIONS
    if method == "post"
    and "application/json" in operation.get("requestBody", {"content": {}})["content"]
    and "examples" in body_of(operation)
]
"""All but those that are about slots, adapters, files and batches."""


def conforms(value: object, schema: dict[str, Any]) -> None:
    """Fails unless the schema validates the value."""
    jsonschema.validate(value, {**schema, "components": DESCRIPTION["components"]})


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_answers(method: str, path: str, operation: dict[str, Any]) -> None:
    assert set(operation["responses"]) == {"200", "4XX", "5XX"}
    assert operation["responses"]["200"]["content"], "nothing says what it answers"
    shape = "AnthropicErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
    shape = "OllamaErrorResponse" if path.startswith("/api/") else shape
    for status in ("4XX", "5XX"):
        (content,) = operation["responses"][status]["content"].values()
        assert content["schema"] == {"$ref": f"#/components/schemas/{shape}"}
    is_open = path.endswith(("/health", "/health/live", "/livez"))
    assert operation.get("security") == ([] if is_open else None)


def test_a_key_may_be_sent_and_need_not() -> None:
    assert DESCRIPTION["security"] == [{"bearer": []}, {"x-api-key": []}, {}]
    assert DESCRIPTION["components"]["securitySchemes"].keys() == {"bearer", "x-api-key"}


@pytest.mark.parametrize(
    ("path", "kind", "required"),
    [
        ("/v1/chat/completions", "ChatCompletionRequest", True),
        ("/v1/responses", "ResponsesRequest", True),
        ("/v1/responses/input_tokens", "ResponsesRequest", True),
        ("/v1/messages", "MessagesRequest", True),
        ("/api/chat", "OllamaChatRequest", True),
        ("/v1/batches", "BatchRequest", True),
        ("/v1/keys", "ApiKey", True),
        ("/slots/{id_slot}", "SlotRequest", False),
    ],
)
def test_bodies_have_the_types_that_workers_read(path: str, kind: str, required: bool) -> None:
    operation = DESCRIPTION["paths"][path]["post"]
    assert body_of(operation)["schema"] == {"$ref": f"#/components/schemas/{kind}"}
    assert operation["requestBody"].get("required", False) is required


def test_every_post_says_what_its_body_is() -> None:
    lacking = {
        path
        for method, path, operation in OPERATIONS
        if method == "post" and "requestBody" not in operation
    }
    assert lacking == {
        "/v1/responses/{response_id}/cancel",
        "/v1/batches/{batch_id}/cancel",
        "/v1/keys/{name}/rotate",
    }
    forms = {
        path: set(operation["requestBody"]["content"]["multipart/form-data"]["schema"]["required"])
        for _, path, operation in OPERATIONS
        if "multipart/form-data" in operation.get("requestBody", {"content": {}})["content"]
    }
    assert forms == {
        "/v1/files": {"file", "purpose"},
        "/v1/audio/transcriptions": {"file"},
        "/audio/transcriptions": {"file"},
        "/v1/audio/translations": {"file"},
    }


def test_every_schema_that_is_named_is_there() -> None:
    schemas = DESCRIPTION["components"]["schemas"]
    named = set(re.findall(r"#/components/schemas/(\w+)", repr(DESCRIPTION)))
    assert named <= set(schemas)
    assert {name for name in schemas if "Validation" in name} == set()


@pytest.mark.parametrize(("path", "operation"), POSTS)
async def test_examples(
    client: httpx.AsyncClient, tokenizer: ByteTokenizer, path: str, operation: dict[str, Any]
) -> None:
    """They are what the schemas say, and so are their answers."""
    tokenizer.reranks = any(word in path for word in ("rerank", "score", "classify"))
    example = example_of(operation)
    conforms(example, body_of(operation)["schema"])
    answer = await client.post(path, json=example)
    assert answer.status_code == 200
    content = operation["responses"]["200"]["content"]
    conforms(answer.json(), content["application/json"]["schema"])
    if "text/event-stream" in content:
        streamed = await client.post(path, json=example | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")


GETS = [
    path
    for method, path, _ in OPERATIONS
    if method == "get" and "{" not in path and path != "/v1/live"  # which does not end
]


@pytest.mark.parametrize("path", [*GETS, "/v1/usage?format=csv"])
async def test_what_gets_answer(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    operation = DESCRIPTION["paths"][path.partition("?")[0]]["get"]
    media_type = answer.headers["content-type"].partition(";")[0]
    content = operation["responses"]["200"]["content"][media_type]
    if media_type == "application/json":
        conforms(answer.json(), content["schema"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"stop": "x", "service_tier": "auto"}),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "store": True}),
        ("/v1/messages", {"system": "x", "speed": "standard", "cache_control": {}}),
        ("/completion", {"dry_multiplier": 0, "dry_base": 3}),
    ],
)
async def test_short_forms_and_fields_that_change_nothing_are_in_the_schemas(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    operation = DESCRIPTION["paths"][path]["post"]
    given = example_of(operation) | fields
    conforms(given, body_of(operation)["schema"])
    assert (await client.post(path, json=given)).status_code == 200


async def test_the_pages(client: httpx.AsyncClient) -> None:
    assert (await client.get("/openapi.json")).json() == DESCRIPTION
    assert (await client.get("/redoc")).status_code == 404  # which would come from elsewhere
