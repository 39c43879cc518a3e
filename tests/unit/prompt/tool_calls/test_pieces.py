"""Calls that are told in pieces, in every format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.prompt.tool_calls import FORMATS, GENERIC, CallPiece, ToolCall, ToolFormat
from serve_app.prompt.tool_calls.reader import TextReader
from tests.unit.prompt.splitting import cuts
from tests.unit.prompt.tool_calls.formats import (
    EXAMPLE_CALLS,
    EXAMPLES,
    TOOLS,
    among_content,
    every_format,
)

FIRST, SECOND = EXAMPLE_CALLS


def read(form: ToolFormat, pieces: Sequence[str]) -> list[Any]:
    """What the pieces hold: neighbouring content joined, and so are each call's pieces."""
    parser = form.parser(TOOLS, in_pieces=True)
    joined: list[Any] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        assert part != ""
        assert isinstance(part, str | CallPiece)
        last = joined[-1] if joined else None
        if isinstance(part, str):
            joined[-1:] = [last + part] if isinstance(last, str) else [*joined[-1:], part]
        elif part.name is not None:
            joined.append(ToolCall(part.name, part.arguments))
        else:
            assert isinstance(last, ToolCall), part
            joined[-1] = ToolCall(last.name, last.arguments + part.arguments)
    return joined


@pytest.mark.parametrize("form", [*FORMATS, GENERIC], ids=lambda form: form.name)
def test_the_example_however_it_is_cut(form: ToolFormat) -> None:
    example = EXAMPLES[form.name]
    for text, calls in (
        (example.first, [FIRST]),
        (example.second, [SECOND]),
        (example.both, [FIRST, SECOND]),
    ):
        for pieces in cuts(text) if text else ():
            assert read(form, pieces) == calls


@every_format
def test_calls_among_content(form: ToolFormat) -> None:
    first = among_content(form, EXAMPLES[form.name].first)
    second = among_content(form, EXAMPLES[form.name].second)
    for pieces in cuts(f"One.\n{first}\n{second}\nTwo.{first}"):
        assert read(form, pieces) == ["One.", FIRST, SECOND, "Two.", FIRST]


@every_format
def test_arguments_do_not_wait_for_their_end(form: ToolFormat) -> None:
    """The first argument is told when it is there, and in JSON before."""
    text = EXAMPLES[form.name].first
    parser = form.parser(TOOLS, in_pieces=True)
    told = parser.feed(text[: text.index("days") + 4])
    assert isinstance(told[0], CallPiece)
    assert told[0].name == "get_weather"
    arguments = "".join(part.arguments for part in told if isinstance(part, CallPiece))
    assert arguments.startswith('{"city": "Tromsø"')


@every_format
def test_a_call_that_is_cut_off_stays_as_far_as_it_came(form: ToolFormat) -> None:
    text = EXAMPLES[form.name].first
    for pieces in cuts(text[: text.index("2")]):
        (call,) = read(form, pieces)
        assert call.name == "get_weather"
        assert FIRST.arguments.startswith(call.arguments)
        assert call.arguments.startswith('{"city": "Tromsø"')


@pytest.mark.parametrize("form", [*FORMATS, GENERIC], ids=lambda form: form.name)
def test_work_grows_with_the_text_and_not_with_its_square(
    form: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = dict.fromkeys(("read", "held"), 0)
    advance, append = TextReader.advance, TextReader.append

    def counting_advance(text: TextReader, end: int) -> None:
        counted["read"] += end - text.at
        advance(text, end)

    def counting_append(text: TextReader, piece: str) -> None:
        append(text, piece)
        counted["held"] += len(text.text)

    monkeypatch.setattr(TextReader, "advance", counting_advance)
    monkeypatch.setattr(TextReader, "append", counting_append)
    city = "Tromsø <} " * 500
    text = EXAMPLES[form.name].first.replace("Tromsø", city)
    (call,) = read(form, list(text))
    assert json.loads(call.arguments) == {"city": city, "days": 2}
    assert len(text) <= counted["read"] < 3 * len(text)
    assert counted["held"] < 40 * len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', [ToolCall("f", '{"a": 1}')]),
        ('{"name": "f"}', [ToolCall("f", "{}")]),
        ('{"name": "f", "id": [1], "arguments": { "a":1 } }', [ToolCall("f", '{ "a":1 }')]),
    ],
)
def test_objects_in_another_order(text: str, expected: list[ToolCall]) -> None:
    (hermes,) = (form for form in FORMATS if form.name == "hermes")
    for pieces in cuts(f"<tool_call>\n{text}\n</tool_call>"):
        assert read(hermes, pieces) == expected


def test_arguments_that_go_wrong_stay_and_the_rest_is_content() -> None:
    (hermes,) = (form for form in FORMATS if form.name == "hermes")
    for pieces in cuts('<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'):
        call, *rest = read(hermes, pieces)
        assert call.name == "f"
        assert call.arguments == '{"a" '
        assert rest == ["1}}</tool_call>"]


@every_format
def test_empty_arguments_have_no_blanks(form: ToolFormat) -> None:
    text = EXAMPLES[form.name].second.replace("{}", "{\n    }")
    for pieces in cuts(text):
        assert read(form, pieces) == [SECOND]
