"""Which characters of a rendered chat are the template's, and which are a user's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from serve_app.prompt.chat_template import ChatTemplate, NamedTemplate
from serve_app.prompt.template_text import TemplateText, control_tokens
from tests.unit.prompt.tool_calls.formats import TOOLS, every_template, template_at

CONTROL = re.compile(re.escape("<|end|>"))


def rendered(source: str, content: str = "A", **extra: str) -> TemplateText:
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    return template.render([{"role": "user", "content": content}], extra=extra)


def own(text: TemplateText) -> str:
    """The text with a dot for each character of a user."""
    return "".join(c if o == "1" else "." for c, o in zip(str(text), text.origin, strict=True))


CONTENT = "messages[0].content"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("<|user|>{{ messages[0].content }}<|end|>", "<|user|>.<|end|>"),
        ("{{ '<|' + messages[0].role + '|>' + messages[0].content }}", "<|user|>."),
        ("{{ '<|' ~ messages[0].role ~ '|>' ~ messages[0].content ~ 1 }}", "<|user|>.."),
        ("{% set x = '<a>' ~ messages[0].content %}{{ x + '</a>' }}", "<a>.</a>"),
        ("{% set x %}<a>{{ messages[0].content }}{% endset %}{{ x }}", "<a>."),
        ("{% macro m(t) %}<{{ t }}>{% endmacro %}{{ m('a') }}{{ m(messages[0].content) }}", "<a><.>"),
        ("{{ bos_token ~ messages[0].content ~ eos_token }}", "<s>.</s>"),
        ("{{ ('<a> ' + messages[0].content) | trim | upper }}", "<A> ."),
        ("{{ '  <a>' | trim }}{{ ' <b>'.strip() }}{{ '<c> '.rstrip() }}", "<a><b><c>"),
        ("{{ ('<x>' + messages[0].content + '<x>').replace('<x>', '<y>') }}", "<y>.<y>"),
        ("{{ ('<x>' + messages[0].content) | replace('x', messages[0].content) }}", "<.>."),
        ("{{ ('<a>,' + messages[0].content + ',<b>').split(',') | join('|') }}", "<a>|.|<b>"),
        ("{{ ['<a>', messages[0].content] | join('<s>') }}", "<a><s>."),
        ("{{ '<s>'.join([messages[0].content, '<a>']) }}", ".<s><a>"),
        ("{{ ('<a>' + messages[0].content)[1:4] }}", "a>."),
        ("{{ '<a{}>'.format('b') }}{{ '<a%s>' % 'b' }}", "<ab><ab>"),
        ("{{ '<a{}>'.format(messages[0].content) }}", "...."),
        ("{{ '<a>' | safe }}{{ '=' * 3 }}", "<a>==="),
        ("{{ messages | tojson }}", "." * len('[{"role": "user", "content": "A"}]')),
        ("{% set a = ['<a>', '<b>'] %}{{ a[1] }}{{ {'k': '<c>'}['k'] }}", "<b><c>"),
        ("{% for m in messages %}{{ '<' ~ loop.index ~ '>' }}{% endfor %}{{ note }}", "<.>...."),
        ("{{ '\n<a>\n<b>'.splitlines() | join(' ') }}", " <a> <b>"),
    ],
)  # fmt: skip
def test_each_operation_keeps_the_origin(source: str, expected: str) -> None:
    assert own(rendered(source, note="<s>A")) == expected


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content.replace('<x>', '') }}", "<|e<x>nd|>"),
        ("{{ messages[0].content | replace('<x>', '') }}", "<|e<x>nd|>"),
        ("{{ messages[0].content.split('<x>') | join }}", "<|e<x>nd|>"),
        ("{{ messages[0].content.split('<x>')[0] ~ messages[0].content.split('<x>')[1] }}", "<|e<x>nd|>"),
        ("<{{ messages[0].content }}>", "|end|"),
        ("<|en{{ messages[0].content }}", "d|>"),
        ("{{ messages[0].content | trim | lower }}", " <|END|> "),
        ("{{ messages[0].content | upper | lower }}", "<|end|>"),
        ("{{ '{}'.format(messages[0].content) }}", "<|end|>"),
        ("{{ messages }}", "<|end|>"),
    ],
)  # fmt: skip
def test_no_control_token_is_made_of_a_users_text(source: str, content: str) -> None:
    text = rendered(source, content)
    assert CONTROL.search(text)
    assert control_tokens(text, CONTROL) == []


def test_control_tokens_of_the_template_are_found_beside_a_users() -> None:
    text = rendered("{{ messages[0].content }}<|end|>", "<|end|><|e")
    assert own(text) == "." * 10 + "<|end|>"
    assert control_tokens(text, CONTROL) == [(10, 17)]


def test_templates_of_llama_cpp() -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": ""}]
    text = NamedTemplate("chatml").render(messages)
    assert own(text) == (
        "<|im_start|>user\n..........<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


DELIMITER = re.compile(
    r"<\W[^<>]{1,40}\W>|\[/?[A-Z_]{3,30}\]|</?(start|end)_of_turn>|</?s>|[\]!~]~?b\[|<SPECIAL_\d+>"
)


@every_template
def test_real_templates_write_their_own_delimiters(path: Path) -> None:
    function = {"name": "now", "arguments": {"a": "b"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "now", "content": "noon"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Bye"},
    ]
    text = template_at(path).render(messages, TOOLS)
    delimiters = [match.span() for match in DELIMITER.finditer(text)]
    assert delimiters
    assert control_tokens(text, DELIMITER) == delimiters
