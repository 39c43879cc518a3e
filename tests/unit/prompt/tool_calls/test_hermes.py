"""Calls in the Hermes format, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prompt.tool_calls import ToolCall
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import FORMAT

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADDED = ToolCall("add", '{"a": 1, "b": "é"}')


def read(pieces: list[str]) -> list[str | ToolCall]:
    return parse(FORMAT["hermes"].parser(), pieces)


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
        (ADD.replace("arguments", "parameters"), [ADDED]),
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
    for pieces in cuts(text):
        assert read(pieces) == expected


def test_content_is_not_held_back() -> None:
    parser = FORMAT["hermes"].parser()
    assert parser.feed("a < b") == ["a < b"]
    assert parser.feed(" <tool_") == [" "]
    assert parser.feed("box>") == ["<tool_box>"]


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", "{", '"', "a", "<", "tool"])))
def test_text_without_a_call_comes_back_whole(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert read(pieces) == ([text] if text else [])


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
    (call,) = read([*pieces, text])
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == arguments
