from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prompt.tool_calls import HermesParser, ToolCall

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADDED = ToolCall("add", '{"a": 1, "b": "é"}')


def parse(pieces: list[str]) -> list[str | ToolCall]:
    """What the pieces hold, neighbouring prose joined."""
    parser = HermesParser()
    joined: list[str | ToolCall] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Hello.\n", ["Hello.\n"]),
        ("1 < 2 <tool", ["1 < 2 <tool"]),
        (ADD, [ADDED]),
        (f"\n{ADD}\n", [ADDED]),
        (f"{ADD}\n{ADD}", [ADDED, ADDED]),
        (f"Let me see.\n\n{ADD}\nDone.", ["Let me see.", ADDED, "Done."]),
        (ADD.replace("arguments", "parameters"), [ToolCall("add", "{}")]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
        (ADD[:-1], [ADD[:-1]]),
        ("<tool_call>{</tool_call>\n", ["<tool_call>{</tool_call>\n"]),
        ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
        ('<tool_call>{"name": 1}</tool_call>', ['<tool_call>{"name": 1}</tool_call>']),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>'],
        ),
    ],
)
def test_however_the_text_is_cut(text: str, expected: list[str | ToolCall]) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]]) == expected


def test_prose_is_not_held_back() -> None:
    parser = HermesParser()
    assert parser.feed("a < b") == ["a < b"]
    assert parser.feed(" <tool_") == [" "]
    assert parser.feed("box>") == ["<tool_box>"]


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", "{", '"', "a", "<", "tool"])))
def test_text_without_a_call_comes_back_whole(pieces: list[str]) -> None:
    parts = parse(pieces)
    assert all(isinstance(part, str) for part in parts)
    lines = "".join(pieces).replace("\n", "")
    assert "".join(str(part) for part in parts).replace("\n", "") == lines


@given(
    st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
    st.lists(st.integers(1, 9), min_size=1),
)
def test_any_arguments_survive(arguments: dict[str, object], sizes: list[int]) -> None:
    body = json.dumps({"name": "f", "arguments": arguments})
    if "</tool_call>" in body:
        return
    text, pieces = f"<tool_call>{body}</tool_call>", []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    (call,) = parse([*pieces, text])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments
