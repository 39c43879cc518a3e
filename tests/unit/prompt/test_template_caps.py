"""What templates can do, as llama-server finds it."""

from __future__ import annotations

from serve_app.prompt.chat_template import ChatTemplate, NamedTemplate, Template

NOTHING = dict.fromkeys(
    (
        "supports_tools",
        "supports_tool_calls",
        "supports_parallel_tool_calls",
        "supports_object_arguments",
        "supports_preserve_reasoning",
        "supports_reasoning_effort",
        "supports_typed_content",
    ),
    False,
)


def caps(template: Template) -> dict[str, bool]:
    return template.caps.report()


def of_source(source: str) -> dict[str, bool]:
    return caps(ChatTemplate(source, bos="", eos=""))


TEXTS = NOTHING | {"supports_string_content": True, "supports_system_role": True}


def test_texts_and_no_more() -> None:
    assert caps(NamedTemplate("chatml")) == TEXTS
    assert of_source("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}") == TEXTS


def test_one_that_knows_no_system() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert of_source(source) == TEXTS | {"supports_system_role": False}


def test_parts_instead_of_texts() -> None:
    source = (
        "{% for m in messages %}{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
    )
    parts = {"supports_typed_content": True, "supports_string_content": False}
    assert of_source(source) == TEXTS | parts


def test_calls_with_arguments_as_text() -> None:
    source = """{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments.strip() }}
{%- endif %}{% endfor %}"""
    found = of_source("{% if tools %}" + source + "{% endif %}")
    called = {"supports_tools": True, "supports_tool_calls": True}
    assert {name: found[name] for name in called} == called
    assert not found["supports_object_arguments"]
    assert not found["supports_parallel_tool_calls"]


def test_reasoning() -> None:
    source = """{% for m in messages %}{{ m.content }}{% if preserve_thinking %}{{ m.reasoning_content }}
{%- endif %}{% endfor %}{{ reasoning_effort }}"""
    more = {"supports_preserve_reasoning": True, "supports_reasoning_effort": True}
    assert of_source(source) == TEXTS | more
