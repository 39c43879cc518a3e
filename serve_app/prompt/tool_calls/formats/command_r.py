"""Command R7B's and Command A's format: `<|START_ACTION|>`, a JSON list of calls, `<|END_ACTION|>`.

Each call is an object with `tool_call_id`, `tool_name` and `parameters`. Reasoning is between
`<|START_THINKING|>` and `<|END_THINKING|>`, what the user reads between `<|START_RESPONSE|>` and
`<|END_RESPONSE|>`.

Source: Cohere's chat template of c4ai-command-r7b-12-2024 for tool use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.channels import ChannelParser, thought_rules
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS, Example, ToolFormat
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_THOUGHT = ("<|START_THINKING|>", "<|END_THINKING|>")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
# What is before the id, the name and the arguments of a call.
_ID, _NAME, _PARAMETERS = '{"tool_call_id": "', '", "tool_name": "', '", "parameters": '


class CommandRParser(ChannelParser):
    """Reads calls without an id, too."""

    opening = OPEN
    name_key = "tool_name"
    thought = _THOUGHT
    dropped = _RESPONSE

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls = yield from self._json_calls(text, ("parameters",))
        yield from text.run(BLANKS)
        yield from text.one_of(CLOSE)
        return calls


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    start = f"{lark.text(_ID)} ID {lark.text(_NAME)}"
    bodies = [
        f"{lark.text(function['name'])} {lark.text(_PARAMETERS)} {lark.arguments(function)}"
        for function in functions
    ]
    more = '("," BLANKS? call)*' if parallel else ""
    return f"""calls: "[" BLANKS? call {more} BLANKS? "]" {delimiter(CLOSE)}
call: {start} body "}}"
ID: /[0-9]{{1,4}}/
BLANKS: /[ \\n]{{1,9}}/
{lark.one_of("body", bodies)}"""


def _said(delimiter: lark.Delimiter) -> str:
    """Reasoning may come first, and content before calls."""
    opening, closing = map(delimiter, _RESPONSE)
    end = "" if closing.startswith('"') else f"{closing}?"
    lazy = "[lazy]" if delimiter(OPEN).startswith('"') else ""
    return f"""start: thought* {opening}? (TEXT {end} | opened calls)
opened{lazy}: TEXT {delimiter(OPEN)}
{thought_rules(_THOUGHT, delimiter)}"""


def _held(delimiter: lark.Delimiter, has_calls: bool) -> str:
    opening, closing = map(delimiter, _RESPONSE)
    calls = f"| {delimiter(OPEN)} calls" if has_calls else ""
    return f"""start: thought* ({opening}? answer {closing}? {calls})
{thought_rules(_THOUGHT, delimiter)}"""


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with reasoning, which the template writes before calls."""
    return {"reasoning_content": "", **message} if message.get("tool_calls") else message


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with the fields that the template does not do without."""
    return {**tool, "function": {"description": "", "parameters": {}, **tool["function"]}}


def _written(*calls: ToolCall) -> str:
    bodies = (
        f'{{"tool_call_id": "{i}", "tool_name": {json.dumps(one.name)}, "parameters": {one.arguments}}}'
        for i, one in enumerate(calls)
    )
    return f"{OPEN}[{', '.join(bodies)}]{CLOSE}"


_FIRST, _SECOND = EXAMPLE_CALLS

FORMAT = ToolFormat(
    name="command-r",
    template_patterns=(r"<\|START_ACTION\|>", r"<\|START_RESPONSE\|>"),
    delimiters=(OPEN, CLOSE, *_THOUGHT, *_RESPONSE),
    make_parser=CommandRParser,
    rules=_rules,
    example=Example(_written(_FIRST), _written(_SECOND), both=_written(_FIRST, _SECOND)),
    opening=OPEN,
    said=_said,
    held=_held,
    has_channels=True,
    message=_message,
    tool=_tool,
)
