"""Reasoning, content and calls in an answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prompt.output_parser import OutputParser, Reasoning, ReasoningTags, reasoning_tags
from serve_app.prompt.tool_calls import ToolCall
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import FORMAT

CALL = '<tool_call>{"name": "f"}</tool_call>'
HM = Reasoning("Hm.")


def read(pieces: list[str], *, thinks: bool = True, is_thinking: bool = False) -> list[Any]:
    parser = OutputParser(FORMAT["hermes"].parser(), thinks=thinks, is_thinking=is_thinking)
    return parse(parser, pieces)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n", [" \n"]),
        ("\nHello.", ["\nHello."]),
        ("<thin", ["<thin"]),
        ("<think>Hm.</think>Yes.", [HM, "Yes."]),
        ("\n<think>\n\nHm.\n\n</think>\n\nYes.\n", [HM, "Yes.\n"]),
        ("<think>\n\n</think>\n\nYes.", ["Yes."]),
        ("<think>a\n\n< b</th</think> c", [Reasoning("a\n\n< b</th"), "c"]),
        ("<think>Hm.</think> \n Yes. ", [HM, "Yes. "]),
        ("<think>Hm.</think>\n<think>Yes.", [HM, "<think>Yes."]),
        ("<think>\nHm.\n</thi", [Reasoning("Hm.\n</thi")]),
        (f"<think>Hm.</think>\n{CALL}", [HM, ToolCall("f", "{}")]),
        ("Yes. <think>Hm.</think>", ["Yes. <think>Hm.</think>"]),
    ],
)
def test_however_the_text_is_cut(text: str, expected: list[Any]) -> None:
    for pieces in cuts(text):
        assert read(pieces) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Hm.\n</think>\n\nYes.", [HM, "Yes."]), ("\nHm.", [HM]), ("</think>Yes.", ["Yes."])],
)
def test_reasoning_that_the_prompt_begins(text: str, expected: list[Any]) -> None:
    for pieces in cuts(text):
        assert read(pieces, is_thinking=True) == expected


@pytest.mark.parametrize("is_thinking", [False, True])
def test_without_reasoning_all_is_content(is_thinking: bool) -> None:
    text = "\n<think>Hm.</think>\nYes."
    for pieces in cuts(text):
        assert read(pieces, thinks=False, is_thinking=is_thinking) == [text]


def test_reasoning_is_not_held_back() -> None:
    parser = OutputParser(None, thinks=True, is_thinking=False)
    assert parser.feed("<think>Let me") == [Reasoning("Let me")]
    assert parser.feed(" see.\n</") == [Reasoning(" see.")]
    assert parser.feed("think>\n") == []
    assert parser.feed("\nYes") == ["Yes"]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", CALL, "</thi"]), max_size=8),
    st.booleans(),
)
def test_pieces_do_not_matter(pieces: list[str], is_thinking: bool) -> None:
    text = "".join(pieces)
    found = read(pieces, is_thinking=is_thinking)
    assert found == read([text], is_thinking=is_thinking)
    assert found == read(list(text), is_thinking=is_thinking)


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ '<think>' }}", ("<think>", "</think>")),
        ("[THINK]{{ x }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("<seed:think>", ("<seed:think>", "</seed:think>")),
        ("<thinking>", ("<thinking>", "</thinking>")),
        ("{{ messages }}", None),
    ],
)
def test_a_template_shows_the_tags_of_reasoning(
    template: str, tags: tuple[str, str] | None
) -> None:
    assert reasoning_tags(template) == tags
    if tags is not None:
        for pieces in cuts(f"{tags[0]}\nHm.\n{tags[1]}\n\nYes."):
            parser = OutputParser(None, thinks=True, is_thinking=False, tags=ReasoningTags(*tags))
            parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
            assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "Hm."
            assert "".join(part for part in parts if isinstance(part, str)) == "Yes."
