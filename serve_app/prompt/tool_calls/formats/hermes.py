"""The Hermes format of tool calls.

Each call is a JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>`. Qwen2.5's,
Qwen3's, Granite 4's and Corral's own chat templates ask for it.

Source: the Hermes Function Calling repository of Nous Research.
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Some models write `parameters` where they should write `arguments`."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls = yield from self._json_call(text, ("arguments", "parameters"))
        yield from text.run(BLANKS)
        yield from text.one_of(CLOSE)
        return calls


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
    more = f'("\\n" {delimiter(OPEN)} call)*' if parallel else ""
    call = f'call: "\\n" body "\\n" {delimiter(CLOSE)}'
    return f"calls: call {more}\n{call}\n{lark.one_of('body', bodies)}"


_FIRST = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}\n</tool_call>'
)
_SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

FORMAT = ToolFormat(
    name="hermes",
    template_patterns=(
        "<tool_call>",
        r'(?:<tool_call>(?:\\n|\s)*\{\\*"name|\{"name": <function-name>,)',
    ),
    delimiters=(OPEN, CLOSE),
    make_parser=lambda _: HermesParser(),
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=f"{_FIRST}\n{_SECOND}"),
    opening=OPEN,
)
