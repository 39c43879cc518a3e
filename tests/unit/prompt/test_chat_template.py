"""The model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.prompt.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": 'say "é"'}]


def render(source: str) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", '<s>say "é"</s>'),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\nu\n  {% endif %}\n{% endfor %}",
            "u\n",
        ),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "say \\"é\\""}]'),
        (
            "{{ [1, {'b': 2, 'a': 'é'}] | tojson(indent=1) }}",
            '[\n 1,\n {\n  "b": 2,\n  "a": "é"\n }\n]',
        ),
        ("{{ {'b': 2, 'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"b":2,"a":[1,2]}'),
        ("{{ {'b': 2, 'a': 'é'} | tojson(sort_keys=true) }}", '{"a": "é", "b": 2}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        (
            "{% for m in messages %}a{% generation %}{% if loop.first %}{{ m.role }}{% endif %}"
            "{% endgeneration %}b{% endfor %}",
            "auserb",
        ),
        ("{%- generation -%}\n  a\n{%- endgeneration %}", "a"),
        ("{% set n = 1 %}{% generation %}{% set n = 2 %}{% endgeneration %}{{ n }}", "1"),
        ("{{ strftime_now('%') | length > 0 }}", "True"),
        ("{{ documents is defined }} {{ tools is none }}", "False True"),
    ],
    ids=[
        *(
            "special",
            "prompt",
            "trim",
            "break",
            "tojson",
            "indent",
            "separators",
            "sort_keys",
            "ascii",
        ),
        *("generation", "generation-trim", "generation-scope", "strftime", "undefined"),
    ],
)
def test_renders_as_transformers_does(source: str, expected: str) -> None:
    assert render(source) == expected


def test_callers_can_set_what_is_not_the_servers() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ bos_token }}", bos="<s>", eos="</s>")
    assert template.render(MESSAGES, extra={"enable_thinking": False}) == "False <s>"
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequestError, match=name):
            template.render(MESSAGES, extra={name: None})


def test_the_templates_own_refusal_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages[0].content.x.y }}", "{{ [] + 1 }}"])
def test_so_is_whatever_goes_wrong_in_it(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        render(source)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_are_sandboxed(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


BILLION = 10**9


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * n }}",
        "{{ n * 'ab' }}",
        "{{ [1] * n }}",
        "{{ 9 ** n }}",
        "{% for i in range(n) %}{% endfor %}",
        "{% macro again(m) %}{{ again(m) }}{% endmacro %}{{ again(1) }}",
        "{% for i in range(90000) %}{{ 'abcd' * 250 }}{% endfor %}",
    ],
    ids=["text", "reversed", "list", "power", "range", "recursion", "loop"],
)
def test_what_would_not_end_is_refused(source: str) -> None:
    template = ChatTemplate(source, bos="", eos="")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        template.render(MESSAGES, extra={"n": BILLION})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '=' * 9 }}", "=" * 9),
        ("{{ 4 * n }} {{ 2 ** 10 }} {{ 2.5 * n }}", "12 1024 7.5"),
        ("{{ [1, 2] * 2 }} {{ 'a' * -1 }}", "[1, 2, 1, 2] "),
        ("{{ 2 ** -1 }} {{ nothing is defined }}", "0.5 False"),
    ],
)
def test_what_ends_is_not(source: str, expected: str) -> None:
    template = ChatTemplate(source, bos="", eos="")
    assert template.render(MESSAGES, extra={"n": 3}) == expected


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% if %}", bos="", eos="")


def test_lists_of_the_templates_own() -> None:
    source = "{% set q = [] %}{% set _ = q.append('a') %}{% set _ = q.append('b') %}{{ q.pop(0) }}{{ q }}"
    assert render(source) == "a['b']"


def test_what_cannot_be_none_is_undefined() -> None:
    """As templates have it that are for chats with tools, and are chosen for others, too."""
    source = "{{ messages[0].content }}{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert render(source) == 'say "é"'


def test_todays_date() -> None:
    """As Llama 3.3's template has it, which else writes a day of the past."""
    source = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    assert datetime.strptime(render(source + "{{ date_string }}"), "%d %b %Y").year >= 2025


def test_who_can_think_does_unless_told_otherwise() -> None:
    source = "{# <think> #}{{ enable_thinking is defined and enable_thinking }}"
    assert render(source) == "True"
    template = ChatTemplate(source, bos="", eos="")
    assert template.render(MESSAGES, extra={"enable_thinking": False}) == "False"


def test_nobody_is_told_to_think_in_a_way_that_is_not_read() -> None:
    """As Apertus' template has it, whose deliberation has no tags that are known."""
    assert render("{{ enable_thinking is defined }}") == "False"


def test_filters_results_as_json() -> None:
    assert render("{{ ['a', 'b'] | map('upper') | tojson }}") == '["A", "B"]'


def test_functions_and_the_date_of_firefunction() -> None:
    template = ChatTemplate("{{ datetime }}|{{ functions }}", bos="", eos="")
    today, functions = template.render(MESSAGES).split("|")
    assert (datetime.strptime(today, "%b %d %Y").year >= 2025, functions) == (True, "")
    tool = {"type": "function", "function": {"name": "now"}}
    assert json.loads(template.render(MESSAGES, [tool]).split("|")[1]) == [tool]
    assert template.render(MESSAGES, extra={"datetime": "then"}) == "then|"
