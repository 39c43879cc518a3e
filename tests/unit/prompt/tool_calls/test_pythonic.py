"""Calls as Python writes them: values, strings with quotation marks, and JSON in their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.prompt.tool_calls import ToolCall
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import EXAMPLE_CALLS, FORMAT, TOOLS

FORM = FORMAT["pythonic"]


def read(calls: str, pieces: list[str] | None = None) -> list[Any]:
    text = f"<|tool_call_start|>[{calls}]<|tool_call_end|>"
    return parse(FORM.parser(TOOLS), pieces or [text])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'Tromsø'", "Tromsø"),
        ('"It\'s"', "It's"),
        ("'It's'", "It's"),
        ("'a, b) c'", "a, b) c"),
        (r"'a\'b\n\u00e9\xe9\\'", "a'b\néé\\"),
        ("''", ""),
        ("2", 2),
        ("-0.5", -0.5),
        ("1e-3", 0.001),
        ("True", True),
        ("false", False),
        ("None", None),
        ("[1, 'a', [True]]", [1, "a", [True]]),
        ("('a', 'b')", ["a", "b"]),
        ("{'a': {\"b\": None}}", {"a": {"b": None}}),
        ("{}", {}),
    ],
)
def test_values(written: str, value: object) -> None:
    text = f"<|tool_call_start|>[get_weather(city={written}, days = 2)]<|tool_call_end|>"
    for pieces in cuts(text):
        (call,) = read("", pieces)
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"city": value, "days": 2}


@pytest.mark.parametrize(
    "calls",
    [
        "get_weather(city=Oslo)",
        "get_weather('Oslo')",
        "get_weather(city='Oslo'",
        "get_weather",
        "(city='Oslo')",
        "",
        "now(], now()",
        "f(a=" + "[" * 100_000,
    ],
)
def test_what_is_no_call_is_content(calls: str) -> None:
    (content,) = read(calls)
    assert content == f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


def test_json_in_the_list() -> None:
    calls = ", ".join(
        json.dumps({"name": call.name, "arguments": json.loads(call.arguments)})
        for call in EXAMPLE_CALLS
    )
    assert read(calls) == list(EXAMPLE_CALLS)
