"""Formats that templates show by writing calls: literals, reading, and what does not show."""

from __future__ import annotations

import json

import pytest

from serve_app.prompt.chat_template import ChatTemplate, delimiters
from serve_app.prompt.tool_calls import GENERIC, ToolCall
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import EXAMPLE_CALLS, TOOLS

TURNS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>\
{% if m.content %}{{ m.content }}{% endif %}{% if m.tool_calls %}CALLS{% endif %}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
PAIRS = "{% for k, v in c.function.arguments.items() %}PAIR{% endfor %}"


def template(calls: str) -> ChatTemplate:
    return ChatTemplate(TURNS.replace("CALLS", calls), bos="", eos="")


def each(call: str, between: str = "") -> str:
    comma = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return EACH.replace("CALL", call + comma)


TAGGED = PAIRS.replace(
    "PAIR", '<arg key="{{ k }}" type="{{ "s" if v is string else "n" }}">{{ v }}</arg>'
)
BY_KEY = PAIRS.replace("PAIR", "<{{ k }}>{{ v }}</{{ k }}>")


@pytest.mark.parametrize(
    ("calls", "written"),
    [
        (
            "[CALLS]" + each(f"{NAME}({JSON})", ";") + "[/CALLS]",
            '[CALLS]get_weather({"city": "Tromsø", "days": 2});now({})[/CALLS]',
        ),
        (
            "<calls>[" + each(f'{{"{NAME}": {JSON}}}', ", ") + "]</calls>",
            '<calls>[{"get_weather": {"city": "Tromsø", "days": 2}}, {"now": {}}]</calls>',
        ),
        (
            "<calls>\n"
            + each(f'{{"id": "{{{{ c.id }}}}", "tool": "{NAME}", "input": {JSON}}}\n')
            + "</calls>",
            '<calls>\n{"id": "x1", "tool": "get_weather", "input": {"city": "Tromsø", "days": 2}}\n'
            '{"id": "x2", "tool": "now", "input": {}}\n</calls>',
        ),
        (
            each(f'<call name="{NAME}">{TAGGED}</call>'),
            '<call name="get_weather"><arg key="city" type="s">Tromsø</arg><arg key="days" type="n">2</arg>'
            '</call><call name="now"></call>',
        ),
        (
            "<calls>" + each(f"<call {NAME}>{BY_KEY}</call>") + "</calls>",
            "<calls><call get_weather><city>Tromsø</city><days>2</days></call><call now></call></calls>",
        ),
    ],
    ids=["name-and-json", "name-as-key", "objects", "tagged", "tags-of-keys"],
)  # fmt: skip
def test_a_format_is_read_off_the_template(calls: str, written: str) -> None:
    form = template(calls).tool_format
    assert form.name == "derived"
    for pieces in cuts(f"So.\n{written}"):
        assert parse(form.parser(TOOLS), pieces) == ["So.", *EXAMPLE_CALLS]
    assert parse(form.parser(TOOLS), [written[:-1]])[-1] != EXAMPLE_CALLS[-1]


def test_values_that_look_like_their_end() -> None:
    form = template(each(f'<call name="{NAME}">{TAGGED}</call>')).tool_format
    text = '<call name="get_weather"><arg key="city" type="s">a</arg>b</arg></call>'
    expected = ToolCall("get_weather", '{"city": "a</arg>b"}')
    for pieces in cuts(text):
        assert parse(form.parser(TOOLS), pieces) == [expected]


@pytest.mark.parametrize(
    "calls",
    [
        each(f"{NAME}: {JSON}"),  # nothing tells a call from other text
        f"<end><call>{each(NAME + JSON)}</call>",  # the turn has ended before
        "<calls>" + each(NAME) + "</calls>",  # arguments are lost
        "<calls>"
        + each(f"{NAME}{{{{ c.function.arguments }}}}")
        + "</calls>",  # as Python has them
    ],
)
def test_calls_that_do_not_show_are_asked_for_in_the_generic_format(calls: str) -> None:
    assert template(calls).tool_format is GENERIC


def test_tags_of_calls_are_delimiters() -> None:
    source = TURNS.replace(
        "CALLS", f"<|calls|>{each(f'<|name|>{NAME}<|args|>{JSON}', '|')}<|/calls|>"
    )
    assert set(delimiters(source)) == {"<|calls|>", "<|name|>", "<|args|>", "<|/calls|>"}


def test_a_template_shows_its_own_blanks() -> None:
    """A format that is known by its tags has the line ends of the template."""
    spaced = template(
        each(f'<tool_call>\n\n{{"name": "{NAME}", "arguments": {JSON}}}\n\n</tool_call>')
    )
    rules = spaced.tool_format.rules([{"name": "now"}], json.dumps, False)
    assert '"\\n\\n"' in rules


def test_a_version_of_a_known_format_is_read_off_its_template() -> None:
    """DeepSeek V3.1 writes calls otherwise than V3 and R1, between the same tags."""
    begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    section = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"  # noqa: RUF001
    form = template(section.format(each(f"{begin}{NAME}{separator}{JSON}{end}"))).tool_format
    assert form.name == "deepseek"
    calls = (f"{begin}{call.name}{separator}{call.arguments}{end}" for call in EXAMPLE_CALLS)
    for pieces in cuts(section.format("".join(calls))):
        assert parse(form.parser(TOOLS), pieces) == [*EXAMPLE_CALLS]
