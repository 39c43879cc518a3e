"""Every format's parser, and which format a chat template asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.demo_model.template import CHAT_TEMPLATE
from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.tool_calls import ToolCall, ToolFormat, detect
from serve_app.prompt.tool_calls.formats import FORMATS
from serve_app.prompt.tool_calls.schemas import types_of
from tests.unit.prompt.splitting import cuts, parse

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
FORMAT = {one.name: one for one in FORMATS}
LLAMA3_TEMPLATE = """{% if tools %}Respond in the format {"name": function name, "parameters": \
dictionary of argument name and its value}.{{ tools | tojson }}{% endif %}{{ messages }}"""

ADD = ToolCall("add", '{"a": 1, "b": "é"}')
NOW = ToolCall("now", "{}")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "flag": {"type": "boolean"},
                    "list": {"type": "array"},
                    "word": {"enum": ["1", "2"]},
                    "any": {},
                    "unit": {"$ref": "#/$defs/unit"},
                },
                "$defs": {"unit": {"enum": ["1", "2"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = {
    "hermes": [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>', ADD),
        ('<tool_call>{"name": "now"}</tool_call>', NOW),
    ],
    "llama3": [
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "é"}}', ADD),
        ('<|python_tag|> {"type": "function", "name": "now", "parameters": {}}', NOW),
    ],
    "mistral-list": [
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "é"}, "id": "123456789"}]', ADD),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}}]', NOW),
    ],
    "mistral-named": [
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}', ADD),
        ("[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", NOW),
    ],
    "qwen-coder": [
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n"
            "</parameter>\n</function>\n</tool_call>",
            ADD,
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", NOW),
    ],
}


def read(name: str, pieces: Sequence[str]) -> list[Any]:
    return parse(FORMAT[name].parser(TOOLS), pieces)


def xml(**values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"


def one(**arguments: Any) -> list[ToolCall]:
    return [ToolCall("add", json.dumps(arguments, ensure_ascii=False))]


L3_ADD = '{"name": "add", "parameters": {"a": 1, "b": "é"}}'
M_ADD = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", CALLS["hermes"][0][0].replace("arguments", "parameters"), [ADD]),
        ("hermes", f"<tool_call>a\n{CALLS['hermes'][0][0]}", ["<tool_call>a", ADD]),
        ("llama3", L3_ADD, [ADD]),
        ("llama3", f"\n\n{L3_ADD}", [ADD]),
        ("llama3", f"{L3_ADD}; {L3_ADD}", [ADD, ADD]),
        ("llama3", f"{L3_ADD}\n{L3_ADD}\n", [ADD, ADD]),
        ("llama3", f"{L3_ADD}; ok", [ADD, "; ok"]),
        ("llama3", f"Wait.\n<|python_tag|>{L3_ADD};{L3_ADD}", ["Wait.", ADD, ADD]),
        ("llama3", f"Like {L3_ADD}", [f"Like {L3_ADD}"]),
        ("llama3", "<|python_tag|>brave.call()", ["<|python_tag|>brave.call()"]),
        ("llama3", '{"name": "Oslo"} is it.', ['{"name": "Oslo"} is it.']),
        ("llama3", ' { "city": "Oslo" }', [' { "city": "Oslo" }']),
        ("llama3", L3_ADD[:-1], [L3_ADD[:-1]]),
        ("llama3", L3_ADD.replace("1", "1e999"), [L3_ADD.replace("1", "1e999")]),
        ("mistral-list", f"[TOOL_CALLS][{M_ADD}, {M_ADD}]", [ADD, ADD]),
        ("mistral-list", f"Hm.\n\n[TOOL_CALLS][{M_ADD}]\nSo.", ["Hm.", ADD, "So."]),
        ("mistral-list", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
        ("mistral-list", f"[TOOL_CALLS][{M_ADD}, 1]", [f"[TOOL_CALLS][{M_ADD}, 1]"]),
        ("mistral-list", "[TOOL_CALLS] a list", ["[TOOL_CALLS] a list"]),
        ("mistral-named", "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}",
         [ToolCall("a", "{}"), ToolCall("b", "{}")]),
        ("mistral-named", "[TOOL_CALLS]a[ARGS]no", ["[TOOL_CALLS]a[ARGS]no"]),
        ("mistral-named", "[TOOL_CALLS]a[CALL", ["[TOOL_CALLS]a[CALL"]),
        ("mistral-named", '[TOOL_CALLS]a[ARGS]{"x": NaN}', ['[TOOL_CALLS]a[ARGS]{"x": NaN}']),
        ("qwen-coder", xml(b="12"), one(b="12")),
        ("qwen-coder", xml(b="\n x\n"), one(b="\n x\n")),
        ("qwen-coder", xml(b="</tool_call> </parameter> x"), one(b="</tool_call> </parameter> x")),
        ("qwen-coder", xml(a="12"), one(a=12)),
        ("qwen-coder", xml(a="twelve"), one(a="twelve")),
        ("qwen-coder", xml(either="12"), one(either="12")),
        ("qwen-coder", xml(either="null"), one(either=None)),
        ("qwen-coder", xml(flag="True"), one(flag=True)),
        ("qwen-coder", xml(list='["a", 1]'), one(list=["a", 1])),
        ("qwen-coder", xml(word="1"), one(word="1")),
        ("qwen-coder", xml(unit="1"), one(unit="1")),
        ("qwen-coder", xml(any="1"), one(any=1)),
        ("qwen-coder", xml(any='"1"'), one(any='"1"')),
        ("qwen-coder", xml(unknown="1.5"), one(unknown=1.5)),
        ("qwen-coder", "<tool_call>\n{}\n</tool_call>", ["<tool_call>\n{}\n</tool_call>"]),
        ("qwen-coder", xml(a="1")[:-5], [xml(a="1")[:-5]]),
        ("qwen-coder", xml(a="1").replace(">\n1", ">1").replace("1\n", "1"), one(a=1)),
        ("qwen-coder", xml(a="1").replace("</function>", "x</function>"),
         [xml(a="1").replace("</function>", "x</function>")]),
    ],
)  # fmt: skip
def test_however_the_text_is_cut(name: str, text: str, expected: list[str | ToolCall]) -> None:
    for pieces in cuts(text):
        assert read(name, pieces) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"const": 1}, {"integer", "number"}),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, {"boolean", "null"}),
        ({"oneOf": [{"type": "array"}, {}]}, set()),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, {"boolean"}),
        ({"allOf": [{"type": "array"}, {"minItems": 1}]}, set()),
        ({"$ref": "#/$defs/circle"}, {"null"}),
        ({"$ref": "elsewhere"}, set()),
        ({"type": 1, "enum": 2, "anyOf": 3}, set()),
        ("no schema", set()),
    ],
)
def test_types_of_schemas(schema: Any, types: set[str]) -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/circle"}, {"type": "null"}]}
    assert types_of(schema, {"$defs": {"a": {"type": "boolean"}, "circle": circle}}) == types


def test_tools_with_odd_schemas_are_read() -> None:
    odd: list[Any] = [{"properties": []}, {"properties": {"a": 1}}, {"properties": None}, None]
    for parameters in odd:
        parser = FORMAT["qwen-coder"].parser(
            [{"function": {"name": "add", "parameters": parameters}}]
        )
        assert parse(parser, [xml(a="1")]) == one(a=1)


@pytest.mark.parametrize("name", CALLS)
def test_calls_among_prose(name: str) -> None:
    (add, _), (now, _) = CALLS[name]
    for pieces in cuts(f"One.\n{add}\n{now}\nTwo.{add}"):
        assert read(name, pieces) == ["One.", ADD, NOW, "Two.", ADD]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>", "</parameter>", "</function>",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f"', ', "arguments": {}',
    ', "parameters": {}', "}", "{", "[", "]", '"', "\n", " ", ";", "a", "1", "<", "<tool", "[TOOL",
    *(text for calls in CALLS.values() for text, _ in calls), L3_ADD,
]  # fmt: skip


@given(
    name=st.sampled_from(sorted(CALLS)),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    sizes=st.lists(st.integers(1, 30)),
)
def test_any_text_is_read_the_same_in_any_pieces(name: str, text: str, sizes: list[int]) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    found = read(name, [*pieces, rest])
    assert found == read(name, [text])
    # Prose is the text, in order, without the calls.
    place, skipped = 0, []
    for prose in (part for part in found if isinstance(part, str)):
        assert prose in text[place:]
        place = text.index(prose, place) + len(prose)
        skipped.append(prose)
    if len(skipped) == len(found):
        assert "".join(skipped) == text


@given(
    name=st.sampled_from(sorted(CALLS)),
    parts=st.lists(st.tuples(st.booleans(), st.sampled_from(["a", "b c", "<", "1;", "é\n\nx"]))),
)
def test_prose_and_calls_lose_nothing(name: str, parts: list[tuple[bool, str]]) -> None:
    (add, _), _ = CALLS[name]
    found = read(name, [add if is_call else prose for is_call, prose in parts])
    expected: list[Any] = []
    for is_call, prose in parts:
        if not is_call and expected and isinstance(expected[-1], str):
            expected[-1] += prose
        else:
            expected.append(ADD if is_call else prose)
    assert found == expected


@pytest.mark.parametrize(("name", "begun"), [
    ("hermes", "<tool_"), ("llama3", "<|python"), ("mistral-list", "[TOOL_"), ("qwen-coder", "<tool"),
])  # fmt: skip
def test_prose_is_not_held_back(name: str, begun: str) -> None:
    parser = FORMAT[name].parser(TOOLS)
    assert parser.feed("a < b [c]") == ["a < b [c]"]
    assert parser.feed(f" {begun}") == [" "]
    assert parser.feed("box>") == [f"{begun}box>"]


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text()), st.integers(1, 9))
def test_any_arguments_survive(arguments: dict[str, object], size: int) -> None:
    body = json.dumps({"name": "f", "parameters": arguments})
    bodies = {"llama3": body, "mistral-named": f"[TOOL_CALLS]f[ARGS]{json.dumps(arguments)}"}
    if "</tool_call>" not in body:
        bodies["hermes"] = f"<tool_call>{body}</tool_call>"
    for name, text in bodies.items():
        (call,) = read(name, [text[i : i + size] for i in range(0, len(text), size)])
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("qwen3", "hermes"),
        ("qwen3-coder", "qwen-coder"),
        ("mistral-nemo", "mistral-list"),
        ("mistral-small-3.2", "mistral-named"),
        ("deepseek-r1", None),
    ],
)
def test_the_format_of_real_templates(file: str, name: str | None) -> None:
    template = ChatTemplate((TEMPLATES / f"{file}.jinja").read_text(), bos="<s>", eos="</s>")
    found = template.tool_format
    assert (found and found.name) == name
    assert template.thinks is (file in ("qwen3", "deepseek-r1"))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHAT_TEMPLATE, "hermes"),
        (LLAMA3_TEMPLATE, "llama3"),
        ("{{ messages }} <tool_call>", None),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", None),
        ("use <tool_call>[]</tool_call>, {{ tools }}", None),
    ],
)
def test_the_format_of_other_templates(template: str, name: str | None) -> None:
    found = detect(template)
    assert (found and found.name) == name


def test_a_template_without_tools_has_no_format() -> None:
    assert ChatTemplate('{{ messages }}<tool_call>{"name', bos="", eos="").tool_format is None


def earlier_turns(call_id: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": {"a": 1, "b": "é"}}
    return [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "2"},
    ]


@pytest.mark.parametrize("file", ["qwen3", "qwen3-coder", "mistral-nemo", "mistral-small-3.2"])
def test_what_a_template_writes_is_read(file: str) -> None:
    """The call of an earlier turn, as the model sees it, is what the parser finds."""
    template = ChatTemplate((TEMPLATES / f"{file}.jinja").read_text(), bos="<s>", eos="</s>")
    text = template.render(earlier_turns("call_0123456789abcdef"), TOOLS)
    tool_format = template.tool_format
    assert isinstance(tool_format, ToolFormat)
    assert tool_format.opening is not None
    said = text[text.rindex(tool_format.opening) :]
    assert parse(tool_format.parser(TOOLS), [said])[0] == ADD


def test_mistral_gets_ids_that_it_takes() -> None:
    template = ChatTemplate((TEMPLATES / "mistral-nemo.jinja").read_text(), bos="<s>", eos="</s>")
    kept = template.render(earlier_turns("abcdefgh1"))
    assert kept.count('"abcdefgh1"') == 2
    one, other = (template.render(earlier_turns(given)) for given in ("call_1", "call_2"))
    assert one != other
    assert "call_1" not in one
