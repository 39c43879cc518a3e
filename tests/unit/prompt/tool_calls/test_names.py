"""Names of functions in characters that no format can write, and functions as templates read them."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.prompt.conversation import PastCall, Turn
from serve_app.prompt.tool_calls.calls import FunctionNames, describe_function


def test_names_go_to_the_model_and_back() -> None:
    names = FunctionNames(["get weather", "get/weather", "get_weather", "a.b-c_1", "天气", ":"])
    of_model = [names.of_model(name) for name in ("get weather", "get/weather", "get_weather")]
    assert of_model == ["get_weather_2", "get_weather_3", "get_weather"]
    assert [names.of_client(name) for name in of_model] == [
        "get weather",
        "get/weather",
        "get_weather",
    ]
    assert names.of_model("a.b-c_1") == "a.b-c_1"
    assert names.of_model("天气") == "天气"
    assert names.of_client(names.of_model(":")) == ":"


def test_calls_of_earlier_turns_have_the_models_names() -> None:
    names = FunctionNames(["get weather"])
    asked = Turn("user", ("Hi",))
    called = Turn("assistant", calls=(PastCall("get weather"), PastCall("no longer there")))
    result = Turn("tool", ("Sunny",), name="get weather")
    changed = names.renamed_calls([asked, called, result])
    assert changed[0] is asked
    assert [call.name for call in changed[1].calls] == ["get_weather", "no_longer_there"]
    assert changed[2].name == "get_weather"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("Get-Weather", "get_weather"),
        (" get_weather", "get_weather"),
        ("functions.get_weather", "get_weather"),
        ("GET", "GET"),
        ("weather", "weather"),
        ("SET_A", "SET_A"),
    ],
)
def test_a_name_that_means_one_function_is_its_name(written: str, meant: str) -> None:
    names = FunctionNames(["get_weather", "Get", "get", "set-a", "set_a"])
    assert names.of_client(written) == meant


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        ({}, {}),
        ({"parameters": None, "description": None}, {}),
        ({"parameters": {}}, {}),
        (
            {"parameters": {"type": "object", "properties": None, "required": None}},
            {"type": "object"},
        ),
        (
            {"parameters": {"properties": {"a": {"type": "string", "description": None}}}},
            {"properties": {"a": {"type": "string"}}},
        ),
        (
            {"parameters": {"type": "OBJECT", "properties": {"type": {"type": "STRING"}}}},
            {"type": "object", "properties": {"type": {"type": "string"}}},
        ),
        (
            {"parameters": {"properties": {"a": {"enum": [None, 1], "default": None}}}},
            {"properties": {"a": {"enum": [None, 1], "default": None}}},
        ),
    ],
)
def test_templates_get_what_they_read(function: dict[str, Any], parameters: dict[str, Any]) -> None:
    assert describe_function({"name": "f", **function}) == {
        "name": "f",
        "description": "",
        "parameters": parameters,
    }
