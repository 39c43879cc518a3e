"""Formats of tool calls that are JSON lists behind an opening: FireFunction's, Granite's and Nemotron's.

Source: the chat templates of Llama 3 FireFunction v2 (Fireworks AI), Granite 3.3 (IBM) and
NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from serve_app.prompt.template_text import TemplateText
from serve_app.prompt.tool_calls import json_list
from serve_app.prompt.tool_calls.calls import ToolCall

_GRANITE_OPEN = "<|tool_call|>"


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with calls as the model wrote them: the template writes contents only."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    arguments = [json.dumps(call["arguments"], ensure_ascii=False) for call in functions]
    written = json_list.written(
        *(ToolCall(call["name"], text) for call, text in zip(functions, arguments, strict=True))
    )
    # The opening is the template's word.
    content = message["content"] + TemplateText.own(_GRANITE_OPEN) + written
    return {**message, "content": content}


FORMATS = (
    json_list.made("firefunction", r" functools\[", " functools"),
    dataclasses.replace(
        json_list.made("granite", r"<\|tool_call\|> followed by a JSON list", _GRANITE_OPEN),
        message=_message,
    ),
    json_list.made("nemotron", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
)
