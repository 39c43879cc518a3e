"""Schemas as grammars can hold them: what is kept, closed, loosened and named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, SecretStr

from serve_app.prompt import json_schemas
from serve_app.prompt.json_schemas import SchemaError, compile_error, fit

BYTES = LLTokenizer("byte")
TEXT = {"type": "string"}
A, B = ({"type": "object", "properties": {name: TEXT}, "required": [name]} for name in "ab")
EMPTY = {"type": "integer", "minimum": 5, "maximum": 1}
NO_NUMBER = "minimum (5) is greater than maximum (1)"
LONG = "a" * (json_schemas.MAX_LITERAL_CHARS + 1)


def takes(schema: dict[str, Any], text: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides=json_schemas.options()
    )
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "loosened"),
    [
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, ("propertyNames",)),
        ({"type": "object", "propertyNames": {"type": "string"}}, ()),  # as zod's records have it
        ({"type": "array", "uniqueItems": True, "items": TEXT}, ("uniqueItems",)),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"type": "string", "format": "path"}, ()),
        ({"type": "string", "format": "binary"}, ()),
        ({"type": "string", "format": "password", "writeOnly": True}, ()),
        ({"type": "string", "pattern": "^(?=.*[A-Z]).{8,}$"}, ("pattern",)),
        ({"type": "string", "pattern": "^(?!-)[a-z]+$"}, ("pattern",)),
        ({"type": "string", "pattern": r"^(\w)\1$"}, ("pattern",)),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ()),
        ({"not": TEXT}, ("not",)),
        ({"if": TEXT, "then": {"minLength": 2}}, ("if", "then")),
        ({"type": "array", "contains": TEXT, "minContains": 2}, ("contains", "minContains")),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"type": "object", "properties": {"a": A}, "unevaluatedProperties": False}, ()),
        ({"allOf": [A, B], "unevaluatedProperties": False}, ("unevaluatedProperties",)),
        ({"x-guidance": {"lenient": False}, "kind": "unknown", "title": None}, ()),
        ({"required": None, "properties": None, "type": None, "enum": None}, ()),
        ({"properties": {"a": {"items": {"not": TEXT}}}}, ("properties.a.items.not",)),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}}}}, ()),
        ({"$ref": "#a", "$defs": {"A": {"$anchor": "a", "type": "string"}}}, ()),
        ({"$id": "https://a.example/s", "$ref": "#/definitions/A", "definitions": {"A": TEXT}}, ()),
        ({"const": None}, ()),
    ],
)  # fmt: skip
def test_a_schema_of_json_schema_is_held(schema: dict[str, Any], loosened: tuple[str, ...]) -> None:
    fitted = fit(schema, is_strict=True)
    assert fitted.loosened == loosened
    assert compile_error(fitted.schema) == ""


@pytest.mark.parametrize(
    ("schema", "message", "loosened"),
    [
        ({"type": "any"}, 'type: "any" is no type of JSON', "type"),
        ({"items": {"type": ["null", "x"]}}, 'items.type: ["null", "x"] is no type of JSON', "items.type"),
        ({"properties": 1}, "properties: is no object of schemas", "properties"),
        ({"properties": {"a": 1}}, "properties.a: is no JSON schema", "properties.a"),
        ({"required": "a"}, "required: is no list of names", "required"),
        ({"minLength": "1"}, "minLength: is no whole number of 0 or more", "minLength"),
        ({"maximum": 10**400}, "maximum: is no number", "maximum"),
        ({"enum": []}, "enum: is no list of values", "enum"),
        ({"type": "string", "enum": [1]}, "type: incompatible types", "type"),
        ({"type": "string", "pattern": "("}, "pattern: unclosed group", "pattern"),
        ({"multipleOf": 0}, "multipleOf: invalid multiple of", "multipleOf"),
        ({"$ref": "#/$defs/B"}, '$ref: there is no "#/$defs/B"', "$ref"),
        ({"$ref": "https://a.example/b"}, '$ref: there is no "https://a.example/b"', "$ref"),
        ({"type": "array", "minItems": 1, "items": EMPTY}, f"items.minimum: {NO_NUMBER}", "items.minimum"),
        ({"$defs": {"A": EMPTY}, "$ref": "#/$defs/A"}, f"$defs.A.minimum: {NO_NUMBER}", "$defs.A.minimum"),
        ({"const": LONG}, "const: has a number out of range, or more than 16384 characters", "const"),
    ],
)  # fmt: skip
def test_a_wrong_schema_is_an_error_or_loosened(
    schema: dict[str, Any], message: str, loosened: str
) -> None:
    with pytest.raises(SchemaError) as raised:
        fit(schema, is_strict=True)
    assert str(raised.value) == message
    fitted = fit(schema, is_strict=False)
    assert fitted.loosened == (loosened,)
    assert compile_error(fitted.schema) == ""


def test_a_constant_that_is_loosened_allows_all() -> None:
    assert takes(fit({"const": LONG}, is_strict=False).schema, '"x"')


def test_only_what_is_wrong_is_loosened() -> None:
    """The rest of the schema counts."""
    schema = {
        "properties": {"a": {"type": "string", "pattern": "(", "maxLength": 2}, "b": {"enum": [1]}},
        "required": ["a", "b"],
    }
    fitted = fit(schema, is_strict=False).schema
    assert takes(fitted, '{"a": "xy", "b": 1}')
    assert not takes(fitted, '{"a": "xyz", "b": 1}')
    assert not takes(fitted, '{"a": "xy", "b": 2}')


@pytest.mark.parametrize(
    ("schema", "text", "taken"),
    [
        (A, '{"a": "x"}', True),
        (A, '{"a": "x", "more": 1}', False),
        ({**A, "additionalProperties": True}, '{"a": "x", "more": 1}', True),
        ({**A, "additionalProperties": {}}, '{"a": "x", "more": 1}', True),
        ({"type": "object"}, '{"more": 1}', True),
        ({"type": "object", "properties": {}}, '{"more": 1}', True),
        ({"properties": {"a": TEXT}}, '"x"', False),
        ({"properties": {"a": TEXT}, "required": ["b"]}, '{"b": 1}', True),
        ({"allOf": [A, B]}, '{"a": "x", "b": "y"}', True),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a": "x", "b": "y"}', True),
        ({"$ref": "#/$defs/A", **B, "$defs": {"A": A}}, '{"a": "x", "b": "y"}', True),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, '{"a": "x", "more": 1}', False),
        ({"anyOf": [A, B]}, '{"b": "y"}', True),
        ({"anyOf": [A, B]}, '{"b": "y", "c": 1}', False),
        ({"oneOf": [A, {"type": "object"}]}, '{"a": "x"}', True),
        ({"type": "object", "unevaluatedProperties": False}, '{"a": "x"}', False),
        ({"type": "string", "nullable": True}, "null", True),
        ({"enum": ["x"], "nullable": True}, "null", True),
        ({"type": "STRING"}, '"x"', True),
        ({"type": "array", "items": [TEXT, {"type": "integer"}]}, '["x", 1]', True),
    ],
)  # fmt: skip
def test_texts_of_a_schema(schema: dict[str, Any], text: str, taken: bool) -> None:
    assert takes(fit(schema, is_strict=True).schema, text) is taken


@pytest.mark.parametrize(
    ("parameters", "taken", "refused"),
    [
        (None, "{}", '{"a": 1}'),
        ({}, "{}", '{"a": 1}'),
        ({"type": "object"}, "{}", '{"a": 1}'),
        ({"type": "object", "properties": {}}, "{}", '{"a": 1}'),
        ({"type": "object", "properties": [], "required": None}, "{}", '{"a": 1}'),
        ({"type": "string"}, "{}", '"a"'),
        ({"type": "object", "additionalProperties": {}}, '{"a": 1}', "1"),
        ({"type": "object", "additionalProperties": TEXT}, '{"a": "x"}', '{"a": 1}'),
        ({"properties": {"a": TEXT}}, '{"a": "x"}', '{"b": 1}'),
        ({"anyOf": [A, B]}, '{"b": "y"}', "1"),
    ],
)
def test_arguments_are_an_object(parameters: Any, taken: str, refused: str) -> None:
    schema = fit(json_schemas.of_arguments(parameters), is_strict=False).schema
    assert takes(schema, taken)
    assert not takes(schema, refused)


def test_what_pydantic_writes() -> None:
    from pathlib import Path  # pydantic reads the annotations

    class Answer(BaseModel):
        where: Path
        data: bytes
        tags: set[str]
        key: SecretStr
        matrix: dict[str, list[float]] = {}

    fitted = fit(Answer.model_json_schema(), is_strict=True)
    assert fitted.loosened == ("properties.tags.uniqueItems",)
    text = '{"where": "/a", "data": "x", "tags": ["a"], "key": "k", "matrix": {"r": [1.5]}}'
    assert takes(fitted.schema, text)


def test_a_schema_may_be_nested_deep_and_wide() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(json_schemas.MAX_DEPTH + 10):
        deep = {"type": "object", "properties": {"a": deep}}
    fitted = fit(deep, is_strict=False)
    assert len(fitted.loosened) == 1
    assert compile_error(fitted.schema) == ""
    wrong = {"properties": {f"p{i}": {"type": "string", "pattern": "("} for i in range(400)}}
    assert compile_error(fit(wrong, is_strict=False).schema) == ""


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer"}, "9" * 16, "9" * 17),
        ({"type": ["integer", "null"]}, "-" + "9" * 16, "1" * 17),
        ({"type": "integer", "minimum": 0}, "9" * 16, "-1"),
        ({"type": "integer", "minimum": 10**17}, "1" * 20, "1"),
        ({"type": "integer", "exclusiveMaximum": 5}, "-" + "9" * 16, "5"),
        ({"type": "number"}, "6.02e23", '"6"'),
        ({"type": "number", "minimum": 1e20}, "1" * 30, '"6"'),
    ],
)
def test_integers_have_an_end(schema: dict[str, Any], taken: str, refused: str) -> None:
    fitted = fit(schema, is_strict=True).schema
    assert (takes(fitted, taken), takes(fitted, refused)) == (True, False)
