"""What every tool-call format has to do, by its own example and its templates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.tool_calls import FORMATS, GENERIC, ToolCall, ToolFormat, detect, reader
from serve_app.prompt.tool_calls.calls import Reasoning
from serve_app.prompt.tool_calls.reader import Reading, TextReader
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import (
    EXAMPLE_CALLS,
    EXAMPLES,
    FORMAT,
    TEMPLATES,
    TOOLS,
    among_content,
    every_format,
    every_template,
    format_of,
    template_at,
)
from tools.chat_template import CHAT_TEMPLATE

FIRST, SECOND = EXAMPLE_CALLS


def read(form: ToolFormat, pieces: Sequence[str]) -> list[Any]:
    return parse(form.parser(TOOLS), pieces)


# -- parsing --------------------------------------------------------------------------------------


@every_format
def test_the_example_however_it_is_cut(form: ToolFormat) -> None:
    example = EXAMPLES[form.name]
    for text, calls in ((example.first, [FIRST]), (example.second, [SECOND])):
        for pieces in cuts(text):
            assert read(form, pieces) == calls
    if example.both is not None:
        for pieces in cuts(example.both):
            assert read(form, pieces) == [FIRST, SECOND]


@every_format
def test_calls_among_content(form: ToolFormat) -> None:
    first = among_content(form, EXAMPLES[form.name].first)
    second = among_content(form, EXAMPLES[form.name].second)
    for pieces in cuts(f"One.\n{first}\n{second}\nTwo.{first}"):
        assert read(form, pieces) == ["One.", FIRST, SECOND, "Two.", FIRST]


@every_format
def test_a_call_that_is_cut_off_is_content(form: ToolFormat) -> None:
    text = EXAMPLES[form.name].first[:-1]
    for pieces in cuts(text):
        assert read(form, pieces) == [text]


FRAGMENTS = [
    "<function=get_weather>", "<parameter=city>", "</parameter>", "</function>",
    '{"name": "f"', ', "arguments": {}', ', "parameters": {}', "}", "{", "[", "]", '"', "\\", "\n", " ",
    ";", ":", ",", "a", "1", "<", "<tool", "[TOOL",
    *(text for form in FORMATS for text in form.delimiters),
    *(text for example in EXAMPLES.values() for text in (example.first, example.second)),
]  # fmt: skip


@given(
    form=st.sampled_from(FORMATS),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    sizes=st.lists(st.integers(1, 30)),
)
def test_any_text_is_read_the_same_in_any_pieces(
    form: ToolFormat, text: str, sizes: list[int]
) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    found = read(form, [*pieces, rest])
    assert found == read(form, [text])
    if form.has_channels:
        return  # there are headers between
    # Content is the text, in order, without the calls.
    place, skipped = 0, []
    for content in (part for part in found if isinstance(part, str)):
        assert content in text[place:]
        place = text.index(content, place) + len(content)
        skipped.append(content)
    if len(skipped) == len(found):
        assert "".join(skipped) == text


@given(
    form=st.sampled_from(FORMATS),
    parts=st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b c", "<", "1;", "é\n\nx"]))),
)
def test_content_and_calls_lose_nothing(form: ToolFormat, parts: list[tuple[bool, str]]) -> None:
    call = among_content(form, EXAMPLES[form.name].first)
    found = read(form, [call if is_call else content for is_call, content in parts])
    expected: list[Any] = []
    for is_call, content in parts:
        if not is_call and expected and isinstance(expected[-1], str):
            expected[-1] += content
        else:
            expected.append(FIRST if is_call else content)
    assert found == expected


@every_format
def test_content_is_not_held_back(form: ToolFormat) -> None:
    opening = form.opening or form.delimiters[0]
    begun = opening[: min(6, len(opening) - 1)]
    parser = form.parser(TOOLS)
    assert parser.feed("a < b [c]") == ["a < b [c]"]
    assert parser.feed(f" {begun}") == [" "]
    assert parser.feed("box,") == [f"{begun}box,"]


@given(
    form=st.sampled_from(
        [form for form in FORMATS if FIRST.arguments in EXAMPLES[form.name].first]
    ),
    arguments=st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
    size=st.integers(1, 9),
    ascii_only=st.booleans(),
)
def test_any_arguments_survive(
    form: ToolFormat, arguments: dict[str, object], size: int, ascii_only: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = EXAMPLES[form.name].first.replace(FIRST.arguments, written)
    (call,) = read(form, [text[i : i + size] for i in range(0, len(text), size)])
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("name", "is_thinking", "before", "content"),
    [
        ("solar", False, "<|think|>Hm.<|end|><|begin|>assistant", "<|content|>{}"),
        ("kimi-k3", True, "Hm.<|close|>think<|sep|>", "<|open|>response<|sep|>{}<|close|>response<|sep|>"),
        ("muse", False, " to=self<|message|>Hm.<|eom|><|start|>assistant", " to=user<|message|>{}<|eom|>"),
        ("command-r", False, "<|START_THINKING|>Hm.<|END_THINKING|>", "<|START_RESPONSE|>{}"),
    ],
)  # fmt: skip
def test_reasoning_content_and_calls_between_tags(
    name: str, is_thinking: bool, before: str, content: str
) -> None:
    form = FORMAT[name]
    text = f"{before}{content.format('Hello.')}{EXAMPLES[name].first}"
    for pieces in cuts(text):
        parser = form.parser(TOOLS, is_thinking=is_thinking)
        assert parse(parser, pieces) == [Reasoning("Hm."), "Hello.", FIRST]


def test_the_end_of_a_turn_is_no_content() -> None:
    form = FORMAT["gigachat"]
    for pieces in cuts("Hello.<|message_sep|>\n\n"):
        assert read(form, pieces) == ["Hello."]
        assert parse(form.parser(), pieces) == ["Hello."]


def test_a_recipient_is_no_content() -> None:
    form = FORMAT["recipients"]
    for pieces in cuts(f"all\nHello.>>>{EXAMPLES['recipients'].first}"):
        assert read(form, pieces) == ["Hello.", FIRST]
    assert parse(form.parser(), list("all\nHello >>>all\nyou")) == ["Hello you"]


# -- work -----------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many characters were read, how many were there whenever a read went on, and how many JSON texts
    were decoded."""
    counted: Counter[str] = Counter()

    def counting(original: Callable[..., Reading[str]]) -> Callable[..., Reading[str]]:
        def read(text: TextReader, *args: Any) -> Reading[str]:
            reading = original(text, *args)
            while True:
                counted["there"] += len(text.text) - text.at
                try:
                    next(reading)
                except StopIteration as end:
                    return str(end.value)
                yield

        return read

    def advance(text: TextReader, end: int) -> None:
        counted["read"] += end - text.at
        original_advance(text, end)

    def decode(text: str) -> object:
        counted["decoded"] += len(text)
        return original_decode(text)

    original_advance, original_decode = TextReader.advance, reader.decode
    monkeypatch.setattr(TextReader, "advance", advance)
    for name in ("run", "until"):
        monkeypatch.setattr(TextReader, name, counting(getattr(TextReader, name)))
    monkeypatch.setattr(reader, "decode", decode)
    return counted


@every_format
def test_work_grows_with_the_text_and_not_with_its_square(
    form: ToolFormat, work: Counter[str]
) -> None:
    """A long call that comes character by character."""
    city = "Tromsø <} " * 500
    text = EXAMPLES[form.name].first.replace("Tromsø", city)
    parser = form.parser(TOOLS)
    parts = [part for char in text for part in parser.feed(char)]
    parts += parser.finish()
    (call,) = parts
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"city": city, "days": 2}
    assert len(text) <= work["read"] < 3 * len(text)
    assert work["there"] < 12 * len(text)
    assert work["decoded"] <= len(text)


@every_format
def test_what_looks_like_many_calls_is_not_read_again_and_again(
    form: ToolFormat, work: Counter[str]
) -> None:
    call = among_content(form, EXAMPLES[form.name].first)
    start = call[: call.rindex("days") + 2] + '{"'
    text = start * 200
    for pieces in ([text], list(text)):
        work.clear()
        assert "".join(part for part in read(form, pieces) if isinstance(part, str)) == text
        assert work["read"] < 5 * len(text)
        assert work["decoded"] <= len(text)


# -- templates ------------------------------------------------------------------------------------


@every_template
def test_the_format_of_real_templates(path: Path) -> None:
    template, form = template_at(path), format_of(path)
    assert template.tool_format.name == form.name
    assert template.thinks is ((form.has_channels and form.thinks) or "<think>" in path.read_text())


def test_kimis_own_parser_is_used() -> None:
    """Literals that are read off its template would not fit ids that lack parts."""
    (path,) = (path for path in TEMPLATES if path.parent.name == "kimi")
    assert template_at(path).tool_format is FORMAT["kimi"]


@every_format
def test_every_format_has_a_template(form: ToolFormat) -> None:
    assert [path for path in TEMPLATES if format_of(path) is form]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CHAT_TEMPLATE, FORMAT["hermes"]),
        ("{{ messages }} <tool_call>", None),
        ("<tool_call>{function-name}\n<arg>{arg-1}</arg>", None),
        ("use <tool_call>[]</tool_call>, {{ tools }}", None),
    ],
)
def test_the_format_of_other_templates(template: str, form: ToolFormat | None) -> None:
    assert detect(template) is form


def test_a_template_without_tools_gets_the_generic_format() -> None:
    template = ChatTemplate('{{ messages }}<tool_call>{"name', bos="", eos="")
    assert template.tool_format is GENERIC


def earlier_turns(call_id: str) -> list[dict[str, Any]]:
    function = {"name": FIRST.name, "arguments": json.loads(FIRST.arguments)}
    return [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "2"},
    ]


@every_template
def test_what_a_template_writes_is_read(path: Path) -> None:
    """The call of an earlier turn, as the model sees it, is what the parser finds."""
    template, form = template_at(path), format_of(path)
    if form is GENERIC:
        return
    text = template.render(earlier_turns("call_0123456789abcdef"), TOOLS)
    opening = form.opening or EXAMPLES[form.name].first.partition(FIRST.name)[0]
    said = text[text.rindex(opening, 0, text.rindex(FIRST.name)) :]
    assert read(form, [said])[0] == FIRST


def test_mistral_gets_ids_that_it_takes() -> None:
    (path,) = (path for path in TEMPLATES if path.stem == "mistral-nemo")
    template = template_at(path)
    kept = template.render(earlier_turns("abcdefgh1"))
    assert kept.count('"abcdefgh1"') == 2
    one, other = (template.render(earlier_turns(given)) for given in ("call_1", "call_2"))
    assert one != other
    assert "call_1" not in one
