"""Users' control tokens stay text."""

from __future__ import annotations

import json
from collections.abc import Callable
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
        ("a\ufdd0b\ufdd1</s>", [("a\ufdd0b\ufdd1", False), ("</s>", True)]),
        ("12(</s>", [("12(", False), ("</s>", True)]),
    ],
)
def test_they_are_found_again(text: str, parts: list[tuple[str, bool]]) -> None:
    assert ESCAPER.needed([user(text)], [])
    escapes = ESCAPER.begin()
    (message,) = escapes.escape([user(text)])
    assert list(escapes.split(message["content"])) == parts


@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, str.upper, str.title], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("nest", [lambda text: text, lambda text: [text], lambda text: {text: 1}])
def test_they_are_found_however_templates_write_them(
    write: Callable[[Any], str], nest: Callable[[str], Any]
) -> None:
    """A list that is written out, and JSON in ASCII, escape what is no character."""
    escapes = ESCAPER.begin()
    value = escapes.escape(nest("a</s>b"))
    parts = list(escapes.split(write(value if write in (repr, json.dumps) else str(value))))
    assert {part.lower() for part, is_escaped in parts if is_escaped} == {"</s>"}
    assert not any("</s>" in part.lower() for part, is_escaped in parts if not is_escaped)


def test_a_text_that_a_template_cuts_shows_no_escapes() -> None:
    escapes = ESCAPER.begin()
    before, after = escapes.escape("a</s>b").split("</s>")
    parts = list(escapes.split(f"{before}|{after}"))
    assert "".join(part for part, _ in parts) == "a|b"


def test_escapes_are_not_to_be_foreseen() -> None:
    assert ESCAPER.begin().escape("</s>") != ESCAPER.begin().escape("</s>")


def test_they_are_found_wherever_they_are() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["x</s>"]}}}
    tool = {"function": {"description": "ends with </s>"}}
    for messages, tools in (([user("") | {"tool_calls": [call]}], []), ([user("")], [tool])):
        assert ESCAPER.needed(messages, tools)
        assert ESCAPER.begin().escape([messages, tools]) != [messages, tools]


def test_a_model_without_control_tokens() -> None:
    assert not ControlTokenEscaper([]).needed([user("</s>")], [])
