"""Users' control tokens stay text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.prompt.quotes import Quotes

QUOTES = Quotes(["<|im_end|>", "<|im_end|>x", "</s>"])


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("text", ["", "hello", "<|im_start|>", "< /s>"])
def test_most_texts_need_no_quotes(text: str) -> None:
    assert not QUOTES.needed([user(text)], [])


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
    assert QUOTES.needed([user(text)], [])
    quoting = QUOTES.begin()
    (message,) = quoting.put([user(text)])
    assert list(quoting.parts(message["content"])) == parts


@pytest.mark.parametrize(
    "write", [str, repr, json.dumps, str.upper, str.title], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("nest", [lambda text: text, lambda text: [text], lambda text: {text: 1}])
def test_they_are_found_however_templates_write_them(
    write: Callable[[Any], str], nest: Callable[[str], Any]
) -> None:
    """A list that is written out, and JSON in ASCII, escape what is no character."""
    quoting = QUOTES.begin()
    value = quoting.put(nest("a</s>b"))
    parts = list(quoting.parts(write(value if write in (repr, json.dumps) else str(value))))
    assert {part.lower() for part, is_quoted in parts if is_quoted} == {"</s>"}
    assert not any("</s>" in part.lower() for part, is_quoted in parts if not is_quoted)


def test_a_text_that_a_template_cuts_shows_no_marks() -> None:
    quoting = QUOTES.begin()
    before, after = quoting.put("a</s>b").split("</s>")
    parts = list(quoting.parts(f"{before}|{after}"))
    assert "".join(part for part, _ in parts) == "a|b"


def test_marks_are_not_to_be_foreseen() -> None:
    assert QUOTES.begin().put("</s>") != QUOTES.begin().put("</s>")


def test_they_are_found_wherever_they_are() -> None:
    call = {"function": {"name": "f", "arguments": {"a": ["x</s>"]}}}
    tool = {"function": {"description": "ends with </s>"}}
    for messages, tools in (([user("") | {"tool_calls": [call]}], []), ([user("")], [tool])):
        assert QUOTES.needed(messages, tools)
        assert QUOTES.begin().put([messages, tools]) != [messages, tools]


def test_a_model_without_control_tokens() -> None:
    assert not Quotes([]).needed([user("</s>")], [])
