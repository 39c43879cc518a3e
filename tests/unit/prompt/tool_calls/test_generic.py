"""The format for models whose templates have none: how it is asked for, and read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.prompt.tool_calls import GENERIC, ToolCall, generic
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import TOOLS

FIRST, SECOND = EXAMPLE_CALLS
EXAMPLE = GENERIC.example


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EXAMPLE.first, [FIRST]),
        (EXAMPLE.second, [SECOND]),
        (EXAMPLE.both, [FIRST, SECOND]),
        (f"\n {EXAMPLE.first}", [FIRST]),
        ('{"response": "Hi."}', ["Hi."]),
        ('{"response": ""}', []),
        ('{ "response" : "a\\n\\"b\\" \\\\ \\u00e9 \\ud83d\\ude00 é"}', ['a\n"b" \\ é 😀 é']),
        ('{"response": "\\ud83d."}', ["\ufffd."]),
        ('{"response": "Hel', ["Hel"]),
        ("Hi.", ["Hi."]),
        (" \n", [" \n"]),
        ('Like {"response": "x"}', ['Like {"response": "x"}']),
        ('{"city": "Oslo"}', ['{"city": "Oslo"}']),
        ('{"tool_calls": []}', ['{"tool_calls": []}']),
        ('{"tool_calls": [1]}', ['{"tool_calls": [1]}']),
        (f"{EXAMPLE.first}\nSo.", [FIRST, "So."]),
    ],
)
def test_however_the_text_is_cut(text: str, expected: list[str | ToolCall]) -> None:
    for pieces in cuts(text):
        assert parse(GENERIC.parser(TOOLS), pieces) == expected


def test_a_response_is_told_as_it_comes() -> None:
    parser = GENERIC.parser(TOOLS)
    assert parser.feed('{"response": "Hel') == ["Hel"]
    assert parser.feed("lo\\") == ["lo"]
    assert parser.feed('n"') == ["\n"]
    assert parser.feed("}") == []


USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"x": "é"}}}
EARLIER: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    {"role": "tool", "tool_call_id": "c1", "content": "night"},
    {"role": "user", "content": "Thanks."},
]


def test_functions_are_described_by_the_system() -> None:
    told, user = generic.describe([SYSTEM, USER], TOOLS, takes_system=True)
    assert user == USER
    assert told["role"] == "system"
    assert told["content"].startswith("Be brief.\n\nYou can call")
    assert json.dumps(TOOLS[0]["function"]) in told["content"]
    (own, _) = generic.describe([USER], TOOLS, takes_system=True)
    assert own["content"].startswith("You can call")


def test_functions_are_described_by_the_user_if_there_is_no_system() -> None:
    (user,) = generic.describe([SYSTEM, USER], TOOLS, takes_system=False)
    assert user["role"] == "user"
    assert user["content"].startswith("Be brief.\n\nYou can call")
    assert user["content"].endswith("\n\nHi")


def test_calls_and_results_become_turns_that_alternate() -> None:
    told = generic.describe(EARLIER, (), takes_system=True)
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[1] == {
        "role": "assistant",
        "content": 'Hm.\n\n{"tool_calls": [{"name": "now", "arguments": {"x": "é"}}]}',
    }
    assert told[2]["content"] == (
        '{"tool_response": {"name": "now", "content": "noon"}}\n\n'
        '{"tool_response": {"name": "now", "content": "night"}}\n\nThanks.'
    )
    assert EARLIER[1]["tool_calls"] == [CALL]  # what was given is as it was
