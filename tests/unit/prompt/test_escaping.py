"""Users' control tokens stay text."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.prompt.escaping import ControlTokenEscaper

ESCAPER = ControlTokenEscaper(["<|im_end|>", "<|im_end|>x", "</s>"])


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("text", ["", "hello", "<|im_start|>", "< /s>"])
def test_most_texts_need_no_escapes(text: str) -> None:
    assert not ESCAPER.needed([user(text)], [])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("</s>", [("</s>", True)]),
        ("a</s>b", [("a", False), ("</s>", True), ("b", False)]),
        ("<|im_end|>x</s>", [("<|im_end|>x", True), ("</s>", True)]),
        ("<|im_end</s>|>", [("<|im_end", False), ("</s>", True), ("|>", False)]),
        ("a\ufdd0b\ufdd1</s>", [("ab", False), ("</s>", True)]),
        ("\ufdd1<\ufdd0/s>", [("</s>", True)]),
    ],
)
def test_they_are_found_again(text: str, parts: list[tuple[str, bool]]) -> None:
    assert ESCAPER.needed([user(text)], [])
    (message,), _ = ESCAPER.escape([user(text)], [])
    assert list(ESCAPER.split(message["content"])) == parts


def test_they_are_found_wherever_they_are() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["x</s>"]}}}
    tool = {"function": {"description": "ends with </s>"}}
    for messages, tools in (([user("") | {"tool_calls": [call]}], []), ([user("")], [tool])):
        assert ESCAPER.needed(messages, tools)
        assert ESCAPER.escape(messages, tools) != (messages, tools)


def test_a_model_without_control_tokens() -> None:
    assert not ControlTokenEscaper([]).needed([user("</s>")], [])
