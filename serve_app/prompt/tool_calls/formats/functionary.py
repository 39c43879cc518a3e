"""Functionary v3.1's format of tool calls: `<function=`, a name, `>`, a JSON object, `</function>`.

Source: the chat template of Functionary Medium v3.1, by MeetKai.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import EXAMPLE_CALLS, Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

OPEN, CLOSE = "<function=", "</function>"
_NAME = re.compile(r"[\w.-]*")


class FunctionaryParser(CallParser):
    """The name is within the tag."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        name = yield from text.run(_NAME)
        yield from text.one_of(">")
        calls = yield from self._named_call(name or None, text)
        yield from text.run(BLANKS)
        yield from text.one_of(CLOSE)
        return calls


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [
        f"{lark.text(function['name'] + '>')} {lark.arguments(function)} {lark.text(CLOSE)}"
        for function in functions
    ]
    more = f"({lark.text(OPEN)} call)*" if parallel else ""
    return f"calls: call {more}\n{lark.one_of('call', bodies)}"


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with a description, which the template does not do without."""
    return {**tool, "function": {"description": "", **tool["function"]}}


_FIRST, _SECOND = (f"{OPEN}{call.name}>{call.arguments}{CLOSE}" for call in EXAMPLE_CALLS)

FORMAT = ToolFormat(
    name="functionary",
    template_patterns=("<function=", "</function>", r"<\|python_tag\|>"),
    delimiters=(),
    make_parser=lambda _: FunctionaryParser(),
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=_FIRST + _SECOND),
    opening=OPEN,
    tool=_tool,
)
