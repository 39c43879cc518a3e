"""Each tool-call format's own cases, however the text is cut, and the schemas that tell what values are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.prompt.tool_calls import Reasoning, ToolCall
from serve_app.prompt.tool_calls.lark import types_of
from tests.unit.prompt.splitting import cuts, parse
from tests.unit.prompt.tool_calls.formats import FORMAT

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


def read(name: str, pieces: Sequence[str]) -> list[Any]:
    return parse(FORMAT[name].parser(TOOLS), pieces)


def xml(**values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"


def one(**arguments: Any) -> list[ToolCall]:
    return [ToolCall("add", json.dumps(arguments, ensure_ascii=False))]


def glm(**values: str) -> str:
    """As GLM 4.6 writes it, with line ends."""
    inner = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>add\n{inner}</tool_call>"


def kimi(*ids: str) -> str:
    calls = "".join(
        f"<|tool_call_begin|>{one}<|tool_call_argument_begin|>{{}}<|tool_call_end|>" for one in ids
    )
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def minimax(**values: str) -> str:
    inner = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items())
    return f'<minimax:tool_call>\n<invoke name="add">\n{inner}</invoke>\n</minimax:tool_call>'


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Noon.\n"
H_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
L3_ADD = '{"name": "add", "parameters": {"a": 1, "b": "é"}}'
M_ADD = '{"name": "add", "arguments": {"a": 1, "b": "é"}}'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [NOW]),
        ("hermes", HERMES_ADD, [ADD]),
        ("hermes", HERMES_ADD.replace("é", "</tool_call>"),
         [ToolCall("add", '{"a": 1, "b": "</tool_call>"}')]),
        ("kimi", kimi("now", "functions.now", "now:12"), [NOW, NOW, NOW]),
        ("kimi", kimi("functions.a.b:1"), [ToolCall("a.b", "{}")]),
        ("kimi", kimi(":1") + "x", [ToolCall(":1", "{}"), "x"]),
        ("kimi", kimi(""), [kimi("")]),
        ("kimi", kimi("now:0").replace("{}", "[]"), [kimi("now:0").replace("{}", "[]")]),
        ("minimax", minimax(a="1", b="é"), [ADD]),
        ("minimax", minimax(b="<b>\n1", flag="True", any='{"x": []}'),
         one(b="<b>\n1", flag=True, any={"x": []})),
        ("minimax", minimax(a="1").replace("</invoke>", "?"), [minimax(a="1").replace("</invoke>", "?")]),
        ("llama3", f"<|python_tag|>{L3_ADD}", [ADD]),
        ("llama3", '<|python_tag|> {"type": "function", "name": "now", "parameters": {}}', [NOW]),
        ("mistral-list", f'[TOOL_CALLS][{M_ADD[:-1]}, "id": "123456789"}}]', [ADD]),
        ("mistral-list", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', [NOW]),
        ("mistral-named", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "é"}', [ADD]),
        ("mistral-named", "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", [NOW]),
        ("qwen-coder", xml(a="1", b="é"), [ADD]),
        ("qwen-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [NOW]),
        ("hermes", HERMES_ADD.replace("arguments", "parameters"), [ADD]),
        ("hermes", f"<tool_call>a\n{HERMES_ADD}", ["<tool_call>a", ADD]),
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
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", [NOW]),
        ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>", [NOW]),
        ("harmony", ANALYSIS + "<|start|>assistant" + H_NOW, [Reasoning("Hm."), NOW]),
        ("harmony", ANALYSIS + FINAL + "<|return|>", [Reasoning("Hm."), "Noon.\n"]),
        ("harmony", f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{H_NOW}",
         ["Wait.", NOW]),
        ("harmony", "<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]),
        ("harmony", "<|channel|>final<|message|>", []),
        ("harmony", "Noon.", ["Noon."]),
        ("harmony", " to", [" to"]),
        ("harmony", H_NOW.replace("{}", "[]"), [H_NOW.replace("{}", "[]")]),
        ("harmony", "<|channel|>" + "x" * 300 + "<|message|>", ["<|channel|>" + "x" * 300 + "<|message|>"]),
        ("glm", glm(a="1", b="é"), [ADD]),
        ("glm", glm(b="\n</tool_call> "), one(b="\n</tool_call> ")),
        ("glm", glm(either="null", flag="true"), one(either=None, flag=True)),
        ("glm", "<tool_call>add <b>", ["<tool_call>add <b>"]),
        ("glm", f"<tool_call><tool_call>\n{glm(a='1')}", ["<tool_call><tool_call>", *one(a=1)]),
        ("glm", glm(a="1")[:-1], [glm(a="1")[:-1]]),
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


def test_harmony_without_tools_or_without_reasoning() -> None:
    form = FORMAT["harmony"]
    for pieces in cuts(ANALYSIS + FINAL):
        assert parse(form.parser(), pieces) == [Reasoning("Hm."), "Noon.\n"]
        kept = form.parser(splits_reasoning=False)
        assert parse(kept, pieces) == ["Hm.Noon.\n"]
    assert parse(form.parser(), [H_NOW]) == [H_NOW]


SPECIAL = [
    {
        "type": "function",
        "function": {
            "name": "special_function",
            "parameters": {"type": "object", "properties": {"arg1": {"type": "integer"}}},
        },
    }
]
CALLED = ToolCall("special_function", '{"arg1": 1}')
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "nemotron",
            'I\n\n<TOOLCALL>[{"name": "special_function", "arguments": {"arg1": 1}}]</TOOLCALL>\n',
            ["I", CALLED],
        ),
        ("nemotron", "<TOOLCALL>[]</TOOLCALL>", ["<TOOLCALL>[]</TOOLCALL>"]),
        (
            "firefunction",
            ' functools[{"name": "special_function", "arguments": {"arg1": 1}}]',
            [CALLED],
        ),
        ("firefunction", "the functools module", ["the functools module"]),
        (
            "granite",
            '<|tool_call|>[{"name": "special_function", "arguments": {"arg1": 1}}]',
            [CALLED],
        ),
        ("functionary", '<function=special_function>{"arg1": 1}</function>', [CALLED]),
        ("functionary", "<function=a b>{}</function>", ["<function=a b>{}</function>"]),
        (
            "deepseek",
            _DEEPSEEK.format(
                'function<｜tool▁sep｜>special_function\n```json\n{"arg1": 1}```'  # noqa: RUF001
            ),
            [CALLED],
        ),
        (
            "command-r",
            "<|START_THINKING|>I'm\nthinking<|END_THINKING|><|START_RESPONSE|>Hello!<|END_RESPONSE|>",
            [Reasoning("I'm\nthinking"), "Hello!"],
        ),
        (
            "command-r",
            "<|START_THINKING|>I'm\nthinking<|END_THINKING|><|START_ACTION|>[\n"
            '    {"tool_call_id": "0", "tool_name": "special_function", "parameters": {"arg1": 1}}\n'
            "]<|END_ACTION|>",
            [Reasoning("I'm\nthinking"), CALLED],
        ),
        ("command-r", "<|START_ACTION|>[]<|END_ACTION|>", ["<|START_ACTION|>[]<|END_ACTION|>"]),
        ("phi4", '<|tool_call|>{"name": "special_function", "arguments": {"arg1": 1}}<|/tool_call|>',
         [CALLED]),
        ("phi4", 'So:<|tool_call|>[{"name": "special_function", "arguments": {"arg1": 1}}]<|/tool_call|>',
         ["So:", CALLED]),
        ("phi4", "<|tool_call|>1<|/tool_call|>", ["<|tool_call|>1<|/tool_call|>"]),
        (
            "gemma",
            "<|channel>thought\nI'm\nthinking<channel|>Hello!<|tool_call>call:special_function{arg1:1}"
            "<tool_call|>",
            [Reasoning("I'm\nthinking"), "Hello!", CALLED],
        ),
        (
            "gemma",
            '<|tool_call>call:f{a:<|"|>"{},<|"|>,b:[1.5,true,null,[]],'
            'c:{<|"|>d e<|"|>:-2,f:{}}}<tool_call|>',
            [ToolCall("f", '{"a": "\\"{},", "b": [1.5, true, null, []], "c": {"d e": -2, "f": {}}}')],
        ),
        ("gemma", "<|tool_call>call:f{a:b}<tool_call|>", ["<|tool_call>call:f{a:b}<tool_call|>"]),
        ("gemma", f"<|tool_call>call:f{{a:{'[' * 40}", [f"<|tool_call>call:f{{a:{'[' * 40}"]),
    ],
)  # fmt: skip
def test_true_outputs(name: str, text: str, expected: list[Any]) -> None:
    """As llama.cpp has them in `tests/test-chat.cpp`, and near misses."""
    for pieces in cuts(text):
        assert parse(FORMAT[name].parser(SPECIAL), pieces) == expected
