"""The format of tool calls of Llama 3.1, 3.2 and 3.3.

The whole answer is a JSON object with `name` and `parameters`, or several with `;` or blanks between them;
also after `<|python_tag|>`.

Source: Meta's model cards and prompt formats, "JSON based tool calling".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, Previous
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader

PYTHON_TAG = "<|python_tag|>"

_KEYS = ('{"name":', '{"type":', '{"parameters":')
_BETWEEN = re.compile(r"\s*;?\s*")


class Llama3Parser(CallParser):
    """An object is taken for a call at the beginning of an answer, behind another call, or behind the
    tag, if it has `name` and `parameters`."""

    opening = PYTHON_TAG

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is not Previous.CONTENT:
            between = (_BETWEEN if self._after is Previous.CALL else BLANKS).match(text, at)
            end = between.end() if between else at
            begun = "".join(text[end : end + 64].split())
            if any(key.startswith(begun) for key in _KEYS):
                return at, None
            if begun.startswith(_KEYS):
                return at, end
        return super()._find(text, at)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        return self._json_call(text, ("parameters",), needs_arguments=True)


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """One call, as the templates refuse turns with more."""
    return lark.one_of("calls", [f'{lark.json_call(one, "parameters")} "}}"' for one in functions])


FORMAT = ToolFormat(
    name="llama3",
    template_patterns=(r'\{\\*"name\\*": function name, \\*"parameters\\*":',),
    delimiters=(PYTHON_TAG,),
    make_parser=lambda _: Llama3Parser(),
    rules=_rules,
    example=Example(
        first='{"name": "get_weather", "parameters": {"city": "Tromsø", "days": 2}}',
        second='{"name": "now", "parameters": {}}',
        both=None,
    ),
)
