"""The model's own Jinja template, in a sandbox."""

from __future__ import annotations

import pytest

from serve_app.errors import ConfigError, InvalidRequestError
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
        ("{{ strftime_now('%') | length > 0 }}", "True"),
        ("{{ documents is defined }} {{ tools is none }}", "False True"),
    ],
    ids=["special", "generation", "trim", "break", "tojson", "strftime", "undefined"],
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


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% if %}", bos="", eos="")
