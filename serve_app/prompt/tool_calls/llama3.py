"""The format of tool calls of Llama 3.1, 3.2 and 3.3.

The whole answer is a JSON object with `name` and `parameters`, or several with `;` or blanks between them;
also after `<|python_tag|>`.

Source: Meta's model cards and prompt formats, "JSON based tool calling".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import (
    After,
    CallParser,
    Found,
    Function,
    calls_of,
    json_at,
)

MARKS = (PYTHON_TAG,) = ("<|python_tag|>",)

_KEYS = ('{"name":', '{"type":', '{"parameters":')
_BETWEEN = re.compile(r"\s*;?\s*")


class Llama3Parser(CallParser):
    """An object is taken for a call at the beginning of an answer, behind another call, or behind the
    mark, if it has `name` and `parameters`."""

    mark = PYTHON_TAG

    def _find(self, text: str) -> tuple[int, int | None]:
        if self._after is not After.PROSE:
            blanks = len(text) - len(text.lstrip())
            if self._after is After.CALL and (between := _BETWEEN.match(text)):
                blanks = between.end()
            begun = "".join(text[blanks:][:64].split())
            if any(key.startswith(begun) for key in _KEYS):
                return 0, None
            if begun.startswith(_KEYS):
                return 0, blanks
        return super()._find(text)

    def _read(self, text: str) -> Found | None:
        begun = text.lstrip()
        if begun and not begun.startswith("{"):
            return (), 0
        found = json_at(text)
        if found is None:
            return None
        body, end = found
        has_both = isinstance(body, dict) and "parameters" in body
        return (calls_of(body, arguments=("parameters",)) if has_both else ()), end


def rules(functions: Sequence[Function], mark: lark.Mark, parallel: bool) -> str:
    """See ToolFormat. One call, as the templates refuse turns with more."""
    return lark.one_of("calls", [f'{lark.json_call(one, "parameters")} "}}"' for one in functions])
