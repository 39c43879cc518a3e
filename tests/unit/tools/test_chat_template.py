"""The built-in model's chat template."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.prompt.chat_template import ChatTemplate
from tests.unit.prompt.tool_calls.formats import FORMAT
from tools.chat_template import CHAT_TEMPLATE

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, bos="", eos="<|im_end|>")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {}}}
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_turns() -> None:
    answer = {"role": "assistant", "content": "Hello!"}
    assert TEMPLATE.render([SYSTEM, USER, answer, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_it_calls_tools() -> None:
    assert TEMPLATE.tool_format.name == FORMAT["hermes"].name


@pytest.mark.parametrize(
    ("messages", "start"),
    [
        ([SYSTEM, USER], "<|im_start|>system\nBe brief.\n\n# Tools"),
        ([USER], "<|im_start|>system\n# Tools"),
    ],
)
def test_tools_stand_in_the_system_turn(messages: list[dict[str, Any]], start: str) -> None:
    text = TEMPLATE.render(messages, [TOOL, TOOL])
    tool = '\n{"type": "function", "function": {"name": "now", "parameters": {}}}'
    assert text.startswith(start)
    assert f"<tools>{tool}{tool}\n</tools>" in text
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_and_results() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("f", x="é"), call("g")]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call("f", x=1)]},
        {"role": "tool", "content": "3"},
    ]
    assert TEMPLATE.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nWait.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    )
