"""The forms that vLLM's clients ask a text to have, as grammars."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.server.harness import ScriptedEngine, chat, takes

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"guided_json": SCHEMA}, '{"a": 1}', '{"a": "x"}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}', "{}"),
        ({"guided_regex": "[0-9]+"}, "12", "a"),
        ({"guided_choice": ["yes (ja)", "no.", "a|b"]}, "a|b", "a"),
        ({"guided_grammar": 'root ::= "a"+'}, "aa", "b"),
        ({"structured_outputs": {"json": SCHEMA, "disable_fallback": True}}, '{"a": 1}', "1"),
        ({"structured_outputs": {"json_object": True}}, '{"b": []}', "1"),
        ({"structured_outputs": {"regex": "a|b"}}, "b", "ab"),
        ({"structured_outputs": {"choice": ["ä", "no."]}}, "no.", "nox"),
        ({"structured_outputs": {"grammar": 'root ::= "x" "y"?'}}, "xy", "y"),
    ],
)
async def test_a_text_has_the_form(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    route: str,
    fields: dict[str, Any],
    taken: str,
    refused: str,
) -> None:
    body = chat(guided_decoding_backend="xgrammar", **fields)
    if route == "/v1/completions":
        body = {"prompt": "Hi", **fields}
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    assert "x-corral-ignored" not in response.headers
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert takes(grammar, taken)
    assert not takes(grammar, refused)


@pytest.mark.parametrize(
    ("answer_format", "taken", "refused"),
    [
        ({"type": "json_object"}, '{"b": [1]}', "[1]"),
        ("json_object", '{"b": [1]}', "[1]"),
        ({"type": "json_object", "schema": {}}, '{"b": [1]}', "[1]"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, '{"b": [1]}', "null"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "{}", "1"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, '{"a": 1}', "{}"),
    ],
)
async def test_a_format_without_a_schema_is_any_object(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    answer_format: dict[str, Any] | str,
    taken: str,
    refused: str,
) -> None:
    body = chat(response_format=answer_format)
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert (takes(grammar, taken), takes(grammar, refused)) == (True, False)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    ],
)
async def test_responses_take_a_format_in_both_forms(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    answer = await client.post("/v1/responses", json={"input": "Hi", **fields})
    assert (answer.status_code, "x-corral-ignored" in answer.headers) == (200, False), answer.text
    assert answer.json()["text"]["format"]["name"] == "x"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert (takes(grammar, '{"a": 1}'), takes(grammar, "{}")) == (True, False)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"json_schema": "x"}}, "response_format.json_schema"),
        ({"response_format": {}, "text": "x"}, "text"),
    ],
)
async def test_a_response_names_the_field_that_is_no_object(
    client: httpx.AsyncClient, fields: dict[str, Any], name: str
) -> None:
    answer = await client.post("/v1/responses", json={"input": "Hi", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


@pytest.mark.parametrize("answer_format", [{}, None, {"type": None}, {"type": "text"}])
async def test_a_format_of_text_is_none(
    client: httpx.AsyncClient, engine: ScriptedEngine, answer_format: object
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(response_format=answer_format))
    assert (response.status_code, engine.requests[0].sampling.grammar) == (200, None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "no JSON schema"),
        ({"guided_choice": []}, "guided_choice", "no text is listed"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json", 'type: "x"'),
        ({"guided_regex": "a", "regex": "b"}, "guided_regex", "Only one of regex, guided_regex"),
    ],
)
async def test_what_is_no_form_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]
