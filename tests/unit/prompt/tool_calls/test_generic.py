"""The format for models whose templates have none: how it is asked for, and read."""

from __future__ import annotations

import json

import pytest

from serve_app.prompt.conversation import PastCall, Turn
from serve_app.prompt.tool_calls import GENERIC, ToolCall
from serve_app.prompt.tool_calls.formats import generic
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import EXAMPLE_CALLS, EXAMPLES, TOOLS

FIRST, SECOND = EXAMPLE_CALLS
EXAMPLE = EXAMPLES["generic"]


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


USER = Turn("user", ("Hi",))
SYSTEM = Turn("system", ("Be brief.",))
CALL = PastCall("now", '{"x": "é"}', "c1")
EARLIER = [
    USER,
    Turn("assistant", ("Hm.",), calls=(CALL, PastCall("odd", "{", "c2"))),
    Turn("tool", ("noon",), call_id="c1", name="now"),
    Turn("tool", ("night",), call_id="c3"),
    Turn("user", ("Thanks.",)),
]


def test_functions_are_described_by_the_system() -> None:
    system, user = generic.describe_chat([SYSTEM, USER], TOOLS)
    assert user == USER
    assert system.role == "system"
    assert system.text.startswith("Be brief.\n\nYou can call")
    assert json.dumps(TOOLS[0]["function"]) in system.text
    (own, _) = generic.describe_chat([USER], TOOLS)
    assert own.text.startswith("You can call")


def test_calls_and_results_become_texts() -> None:
    turns = generic.describe_chat(EARLIER, ())
    assert [turn.role for turn in turns] == ["user", "assistant", "user", "user", "user"]
    assert [turn.text for turn in turns[1:]] == [
        'Hm.\n\n{"tool_calls": [{"name": "now", "arguments": {"x": "é"}}, '
        '{"name": "odd", "arguments": "{"}]}',
        '{"tool_response": {"name": "now", "content": "noon"}}',
        '{"tool_response": {"name": null, "content": "night"}}',
        "Thanks.",
    ]
    assert not any(turn.calls for turn in turns)
