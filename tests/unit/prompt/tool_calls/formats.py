"""What tests of all tool-call formats share: the formats, and real templates that ask for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serve_app.prompt.chat_template import ChatTemplate
from serve_app.prompt.tool_calls import FORMATS, GENERIC, ToolCall, ToolFormat
from serve_app.prompt.tool_calls.calls import describe_function

TEMPLATES = sorted((Path(__file__).parents[3] / "data" / "templates").glob("*/*.jinja"))
EXAMPLE_FUNCTIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "now"},
)
"""The functions in every format's example."""
EXAMPLE_CALLS = (ToolCall("get_weather", '{"city": "Tromsø", "days": 2}'), ToolCall("now", "{}"))
"""The calls in every format's example."""
TOOLS = [
    {"type": "function", "function": describe_function(function)} for function in EXAMPLE_FUNCTIONS
]
FORMAT = {form.name: form for form in (*FORMATS, GENERIC)}


@dataclass(frozen=True)
class Example:
    """EXAMPLE_CALLS, as the format's models write them: what all formats are tested with."""

    first: str
    second: str
    both: str | None
    """An answer of both calls; None if there is one call in an answer at most."""


# fmt: off
# ruff: noqa: E501, RUF001
EXAMPLES = {
    "command-r": Example(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Tromsø", "days": 2}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Tromsø", "days": 2}}, {"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    "deepseek": Example(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tromsø", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tromsø", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "firefunction": Example(
        ' functools[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}]',
        ' functools[{"name": "now", "arguments": {}}]',
        ' functools[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}, {"name": "now", "arguments": {}}]',
    ),
    "functionary": Example(
        '<function=get_weather>{"city": "Tromsø", "days": 2}</function>',
        '<function=now>{}</function>',
        '<function=get_weather>{"city": "Tromsø", "days": 2}</function><function=now>{}</function>',
    ),
    "gemma": Example(
        '<|tool_call>call:get_weather{city:<|"|>Tromsø<|"|>,days:2}<tool_call|>',
        '<|tool_call>call:now{}<tool_call|>',
        '<|tool_call>call:get_weather{city:<|"|>Tromsø<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ),
    "generic": Example(
        '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}]}',
        '{"tool_calls": [{"name": "now", "arguments": {}}]}',
        '{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}, {"name": "now", "arguments": {}}]}',
    ),
    "gigachat": Example(
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}',
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}',
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}',
    ),
    "glm": Example(
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tromsø</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>',
        '<tool_call>now</tool_call>',
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tromsø</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>',
    ),
    "granite": Example(
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}]',
        '<|tool_call|>[{"name": "now", "arguments": {}}]',
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}, {"name": "now", "arguments": {}}]',
    ),
    "harmony": Example(
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Tromsø", "days": 2}',
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}',
        None,
    ),
    "hermes": Example(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "kimi": Example(
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Tromsø", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Tromsø", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "kimi-k3": Example(
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Tromsø<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Tromsø<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    ),
    "lfm2": Example(
        '<|tool_call_start|>[get_weather(city="Tromsø", days=2)]<|tool_call_end|>',
        '<|tool_call_start|>[now()]<|tool_call_end|>',
        '<|tool_call_start|>[get_weather(city="Tromsø", days=2), now()]<|tool_call_end|>',
    ),
    "llama3": Example(
        '{"name": "get_weather", "parameters": {"city": "Tromsø", "days": 2}}',
        '{"name": "now", "parameters": {}}',
        None,
    ),
    "minimax": Example(
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Tromsø</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Tromsø</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "mistral-list": Example(
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}]',
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}, {"name": "now", "arguments": {}}]',
    ),
    "mistral-named": Example(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Tromsø", "days": 2}',
        '[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Tromsø", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    ),
    "muse": Example(
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Tromsø</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        ' to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Tromsø</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    ),
    "nemotron": Example(
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}, {"name": "now", "arguments": {}}]</TOOLCALL>',
    ),
    "phi4": Example(
        '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}<|/tool_call|>',
        '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
        '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}<|/tool_call|><|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>',
    ),
    "pythonic": Example(
        "<|tool_call_start|>[get_weather(city='Tromsø', days=2)]<|tool_call_end|>",
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(city='Tromsø', days=2), now()]<|tool_call_end|>",
    ),
    "qwen-coder": Example(
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nTromsø\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>',
        '<tool_call>\n<function=now>\n</function>\n</tool_call>',
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nTromsø\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>',
    ),
    "recipients": Example(
        'get_weather\n{"city": "Tromsø", "days": 2}',
        'now\n{}',
        'get_weather\n{"city": "Tromsø", "days": 2}>>>now\n{}',
    ),
    "solar": Example(
        '<|tool_calls|><|tool_call:begin|>abcdefghij<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Tromsø", "days": 2}<|tool_call:end|>',
        '<|tool_calls|><|tool_call:begin|>abcdefghij<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>',
        '<|tool_calls|><|tool_call:begin|>abcdefghij<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Tromsø", "days": 2}<|tool_call:end|><|tool_call:begin|>klmnopqrst<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>',
    ),
}
# fmt: on

every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
every_template = pytest.mark.parametrize(
    "path", TEMPLATES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)


def format_of(path: Path) -> ToolFormat:
    """The format that a template's folder names."""
    return FORMAT[path.parent.name]


@functools.cache
def template_at(path: Path) -> ChatTemplate:
    return ChatTemplate(path.read_text(), bos="<s>", eos="</s>")


def among_content(form: ToolFormat, call: str) -> str:
    """The call as it is written behind content: where it needs no opening, a delimiter makes it one."""
    begins = form.opening or form.name == "muse"
    return call if begins else form.delimiters[0] + call
